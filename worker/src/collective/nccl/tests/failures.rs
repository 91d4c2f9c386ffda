//! What goes wrong, and that it ends with a name, once, and without a call that must not be made.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::fake::{BROKEN, FakeDevice, Fault};
use super::functions::{functions, old_version};
use super::{Rank, SUM, World, deadline, done, failure, launch, nccl, read};
use crate::collective::nccl::library::Nccl;
use crate::collective::nccl::library::Status;
use crate::collective::{Executor, Failure, Launch, Traffic};
use crate::device::{Device, DeviceError, Event};

/// A time-out for tests in which something times out; nothing is shorter than that.
const SHORT: Duration = Duration::from_millis(300);

/// What every survivor must know of a lost rank within: far less than the operations' own bound.
const BOUND: Duration = Duration::from_mins(1);

/// What would happen without being waited for happens within it.
const TICK: Duration = Duration::from_millis(100);

/// Waits for `condition` with a deadline.
fn eventually(what: &str, condition: impl Fn() -> bool) {
    let deadline = deadline();
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        std::thread::yield_now();
    }
}

fn reduce(rank: &Rank, tag: &str) -> crate::collective::Work {
    let arena = rank.arena(&[1.0_f32; 64]);
    rank.comm.all_reduce(&arena.whole(), SUM, launch(tag))
}

#[test]
fn a_library_that_is_too_old_says_so() {
    let error = Nccl::with(functions(old_version), Path::new("fake")).unwrap_err();
    assert_eq!(error, "is NCCL 2.17.1, but at least 2.18.0 is required");
}

#[test]
fn a_rank_that_never_comes_to_the_set_up_is_waited_for_until_the_deadline() {
    let world = World::of(3, &[]).within(SHORT);
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let world = &world;
            scope.spawn(move || {
                let error = world.connect(rank, &FakeDevice::new()).err().unwrap();
                let Failure::TimedOut { waiting_for, .. } = error else {
                    panic!("{error}");
                };
                assert!(waiting_for.contains(&2));
            });
        }
    });
    let log = world.fake.log();
    assert_eq!((log.aborted, log.violations), (2, vec![]));
}

#[test]
fn without_rank_0_there_is_no_meeting_point() {
    let world = World::of(2, &[]).within(SHORT);
    let error = world.connect(1, &FakeDevice::new()).err().unwrap();
    let Failure::TimedOut { waiting_for, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(waiting_for, [0]);
}

#[test]
fn the_end_of_the_generation_ends_the_set_up() {
    let world = World::of(2, &[]);
    std::thread::scope(|scope| {
        let connecting = scope.spawn(|| world.connect(0, &FakeDevice::new()).err().unwrap());
        eventually("the set-up", || world.fake.log().made == 1);
        world.cancel.cancel("rank 1 died of SIGKILL");
        let error = connecting.join().unwrap();
        assert_eq!(error, Failure::GenerationOver("rank 1 died of SIGKILL".into()));
    });
    assert_eq!(world.fake.log().aborted, 1);
}

/// Three ranks of four wait for the last, which was killed: nothing of NCCL says so, the agent does.
#[test]
fn a_lost_rank_is_named_on_every_survivor_in_time() {
    let world = World::of(4, &[]);
    let lost_at = std::sync::Mutex::new(None);
    let all_have_seen_it = std::sync::Barrier::new(4);
    let errors = world.run(|rank| {
        done(&reduce(&rank, "bucket 0"));
        all_have_seen_it.wait();
        if rank.rank() == 3 {
            *lost_at.lock().unwrap() = Some(Instant::now());
            world.cancel.cancel("rank 3 died of SIGKILL");
            return None;
        }
        let works = [reduce(&rank, "bucket 1"), reduce(&rank, "bucket 2")];
        let errors = works.map(|work| failure(&work).0);
        let took = lost_at.lock().unwrap().unwrap().elapsed();
        Some((errors, took))
    });
    for (rank, (errors, took)) in errors.into_iter().flatten().enumerate() {
        assert!(took < BOUND, "{took:?}");
        let words =
            "(bucket 1, 256 bytes) failed: the launcher ended this generation: rank 3 died of SIGKILL";
        assert_eq!(
            errors[0],
            format!("rank {rank}: all-reduce #1 of `world` {words}")
        );
        assert!(errors[1].contains("#2 of `world` (bucket 2"), "{}", errors[1]);
    }
    // The lost one did not live to see it.
    eventually("every abort", || world.fake.log().aborted >= 3);
    assert_eq!(world.fake.log().violations, Vec::<String>::new());
}

#[test]
fn a_rank_that_does_not_come_to_an_operation_is_named_and_the_others_are_not() {
    let world = World::of(3, &[]).within(SHORT);
    let failures = world.run(|rank| {
        done(&reduce(&rank, "bucket 0"));
        (rank.rank() < 2).then(|| {
            let (late, behind) = (reduce(&rank, "bucket 1"), reduce(&rank, "bucket 2"));
            (failure(&late), failure(&behind))
        })
    });
    for (late, behind) in failures.into_iter().flatten() {
        let Failure::TimedOut {
            waiting_for,
            waited_ms,
        } = late.1
        else {
            panic!("{}", late.0);
        };
        assert_eq!(waiting_for, [2]);
        assert!(waited_ms >= SHORT.as_millis() as u64);
        assert!(
            late.0.contains("all-reduce #1 of `world` (bucket 1, 256 bytes)"),
            "{}",
            late.0
        );
        assert!(matches!(behind.1, Failure::GivenUp { .. }), "{}", behind.0);
        assert!(
            behind.0.contains("abandoned because of #1 of `world`: waited"),
            "{}",
            behind.0
        );
    }
}

/// The reports were those of the first communicator, in which nobody waits: every rank was named.
#[test]
fn a_rank_that_does_not_come_to_the_second_communicator_is_named_alone() {
    let world = World::of(3, &[]).within(SHORT);
    let failures = world.run(|rank| {
        let all = [0, 1, 2];
        let part = rank.comm.split("parameters", &all, Executor::Thread).unwrap();
        (rank.rank() < 2).then(|| {
            let arena = rank.arena(&[1.0_f32; 64]);
            failure(&part.all_reduce(&arena.whole(), SUM, launch("layer 0")))
        })
    });
    for (words, failure) in failures.into_iter().flatten() {
        let Failure::TimedOut { waiting_for, .. } = failure else {
            panic!("{words}");
        };
        assert_eq!(waiting_for, [2], "{words}");
    }
}

#[test]
fn a_buffer_that_is_never_ready_is_not_the_other_ranks_fault() {
    let world = World::of(2, &[]).within(SHORT);
    world.run(|rank| {
        let (event, _signal) = Event::pair("a gradient");
        let arena = rank.arena(&[1.0_f32; 64]);
        let launch = Launch::after(event, Traffic::Grads, "bucket 0");
        let work = rank.comm.all_reduce(&arena.whole(), SUM, launch);
        let (words, _) = failure(&work);
        let expected = [
            "ms for the input of all-reduce #0 (bucket 0)",
            "ms for a gradient",
        ];
        // The stream's own wait ends at the same moment as the watchdog's.
        assert!(
            expected.iter().any(|expected| words.contains(expected)),
            "{words}"
        );
    });
}

#[test]
fn an_error_that_comes_by_itself_is_found_and_named() {
    let reported = Fault::Reported {
        rank: 0,
        operation: 1,
        status: Status::REMOTE_ERROR,
    };
    let world = World::of(2, &[reported]);
    let cause = "remote process exited or there was a network error: injected by a test";
    world.run(|rank| {
        done(&reduce(&rank, "bucket 0"));
        if rank.rank() == 1 {
            return;
        }
        let (words, failure) = failure(&reduce(&rank, "bucket 1"));
        assert!(
            words.ends_with(&format!("ncclCommGetAsyncError: {cause}")),
            "{words}"
        );
        assert!(matches!(failure, Failure::Library { of_peer: true, .. }));
    });
    eventually("the abort", || world.fake.log().aborted == 1);
}

#[test]
fn a_call_that_fails_gives_the_communicator_up() {
    let world = World::of(
        2,
        &[Fault::CallFails {
            rank: 1,
            operation: 1,
        }],
    );
    world.run(|rank| {
        done(&reduce(&rank, "bucket 0"));
        if rank.rank() == 0 {
            return;
        }
        let work = reduce(&rank, "bucket 1");
        assert!(work.is_done(), "known at once");
        let (words, failure) = failure(&work);
        assert!(
            words.ends_with("ncclAllReduce: internal error: injected by a test"),
            "{words}"
        );
        assert!(matches!(failure, Failure::Library { of_peer: false, .. }));
    });
    eventually("the abort", || world.fake.log().aborted == 1);
    assert_eq!(world.fake.log().violations, Vec::<String>::new());
    assert_eq!(BROKEN, Status(3));
}

#[test]
fn a_call_that_goes_on_for_ever_ends_with_the_generation() {
    let world = World::of(
        2,
        &[Fault::CallNeverSettles {
            rank: 0,
            operation: 0,
        }],
    );
    world.run(|rank| {
        if rank.rank() == 0 {
            let (_, failure) = failure(&reduce(&rank, "bucket 0"));
            assert_eq!(failure, Failure::GenerationOver("stopped".into()));
        } else {
            done(&reduce(&rank, "bucket 0"));
            world.cancel.cancel("stopped");
        }
    });
    assert_eq!(world.fake.log().violations, Vec::<String>::new());
}

/// The watchdog must not free what another thread's call uses; that thread aborts when its call returns.
#[test]
fn nothing_is_aborted_beside_a_call_that_has_not_returned() {
    let world = World::of(
        2,
        &[Fault::CallBlocks {
            rank: 0,
            operation: 1,
        }],
    );
    world.run(|rank| {
        let first = reduce(&rank, "bucket 0");
        if rank.rank() == 1 {
            done(&first);
            world.fake.await_blocked(1);
            world.cancel.cancel("stopped");
            // This rank's own is aborted by its watchdog; the other's watchdog has seen as much by then.
            eventually("the abort of rank 1", || world.fake.log().aborted == 1);
            let tick = Event::pair("nothing").0.wait(Instant::now() + TICK);
            assert!(tick.is_err());
            assert_eq!(world.fake.log().aborted, 1);
            world.fake.release();
            return;
        }
        let (_, failure) = failure(&reduce(&rank, "bucket 1"));
        assert_eq!(failure, Failure::GenerationOver("stopped".into()));
        eventually("the abort of rank 0", || world.fake.log().aborted == 2);
    });
    assert_eq!(world.fake.log().violations, Vec::<String>::new());
}

/// Aborts at any point of a busy rank's work: never beside a call, never twice, nothing called after it.
#[test]
fn an_abort_comes_between_the_calls_of_a_busy_thread() {
    for round in 0..20_u32 {
        let world = World::of(2, &[]);
        world.run(|rank| {
            let arena = rank.arena(&[1.0_f32; 16]);
            if rank.rank() == 1 {
                // After another number of operations each time.
                for number in 0..round {
                    let work = rank
                        .comm
                        .all_reduce(&arena.whole(), SUM, launch(&number.to_string()));
                    if work.wait(deadline()).is_err() {
                        break;
                    }
                }
                world.cancel.cancel("stopped");
            }
            let last = loop {
                let work = rank.comm.all_reduce(&arena.whole(), SUM, launch("busy"));
                // Not waited for until then, so that many are in the stream.
                if world.cancel.cause().is_some() && work.wait(deadline()).is_err() {
                    break work;
                }
            };
            let (_, failure) = failure(&last);
            assert!(
                matches!(failure, Failure::GenerationOver(_) | Failure::Poisoned(_)),
                "{failure}"
            );
            // No rank leaves before its watchdog has done its part.
            eventually("both aborts", || world.fake.log().aborted == 2);
        });
        assert_eq!(world.fake.log().violations, Vec::<String>::new(), "round {round}");
    }
}

#[test]
fn what_is_left_without_a_word_keeps_its_memory_and_calls_nothing() {
    let world = World::of(2, &[]);
    let memory = world.run(|rank| {
        let arena = rank.arena(&[1.0_f32; 16]);
        if rank.rank() == 0 {
            // Nobody comes: it is in the stream when the communicator is dropped.
            drop(rank.comm.all_reduce(&arena.whole(), SUM, launch("left")));
        }
        arena
    });
    let log = world.fake.log();
    assert_eq!((log.aborted, log.destroyed, log.violations), (0, 0, vec![]));
    // The arena outlives its communicator, as it does without this test's own clone.
    assert!(memory.iter().all(|arena| arena.len() == 16));
}

/// Its input has failed, but the library has it: the other rank finds it in the stream when its own rank is gone, which
/// knew of the failure at once.
#[test]
fn what_is_left_without_its_input_keeps_its_memory() {
    let world = World::of(2, &[]);
    let is_gone = std::sync::Barrier::new(2);
    world.run(|rank| {
        if rank.rank() == 0 {
            let arena = rank.arena(&[1.0_f32; 64]);
            let input = Event::failed(DeviceError::Upstream("no gradient".into()));
            let launch = Launch::after(input, Traffic::Grads, "bucket 0");
            let (words, _) = failure(&rank.comm.all_reduce(&arena.whole(), SUM, launch));
            assert!(words.ends_with("no gradient"), "{words}");
            drop((arena, rank));
            is_gone.wait();
            return;
        }
        is_gone.wait();
        let arena = rank.arena(&[1.0_f32; 64]);
        let work = rank.comm.all_reduce(&arena.whole(), SUM, launch("bucket 0"));
        // The watchdog of rank 0 may have looked before its rank was gone.
        let is_aborted = || world.fake.log().aborted == 1;
        eventually("the sum, or the abort", || work.is_done() || is_aborted());
        if work.is_done() {
            assert_eq!(read::<f32>(&arena.whole()), [2.0; 64]);
        }
    });
}

/// The thread that aborts is not the one that ends the process.
#[test]
fn a_process_that_fails_does_not_end_beside_an_abort() {
    let world = World::of(2, &[Fault::AbortBlocks { rank: 0 }]);
    world.run(|rank| {
        if rank.rank() == 1 {
            return;
        }
        let work = reduce(&rank, "bucket 0");
        world.cancel.cancel("rank 1 died of SIGKILL");
        failure(&work);
        world.fake.await_blocked(1);
        std::thread::scope(|scope| {
            let leaving = scope.spawn(|| rank.comm.abandon());
            let tick = Event::pair("nothing").0.wait(Instant::now() + TICK);
            assert!(tick.is_err());
            assert!(!leaving.is_finished());
            world.fake.release();
            leaving.join().unwrap();
        });
        assert!(world.fake.log().aborted >= 1);
    });
}

#[test]
fn an_abort_that_does_not_return_holds_up_the_end_for_a_bounded_time() {
    let world = World::of(2, &[Fault::AbortBlocks { rank: 0 }]);
    world.run(|rank| {
        if rank.rank() == 0 {
            let work = reduce(&rank, "bucket 0");
            world.cancel.cancel("rank 1 died of SIGKILL");
            failure(&work);
            world.fake.await_blocked(1);
            rank.comm.abandon();
            world.fake.release();
        }
    });
}

/// An abort waits for all that runs on the device, also for what only the abort of another communicator ends. Whether
/// the watchdog gives up the first one, or a thread that uses it.
#[test]
fn communicators_of_a_process_are_aborted_beside_each_other() {
    for by_a_call in [false, true] {
        let mut faults = vec![Fault::AbortsWait { rank: 0, count: 3 }];
        if by_a_call {
            let (rank, operation) = (0, 0);
            faults.push(Fault::CallFails { rank, operation });
        }
        let world = World::of(2, &faults);
        world.run(|rank| {
            let parts =
                ["parameters", "shard"].map(|name| rank.comm.split(name, &[0, 1], Executor::Thread).unwrap());
            if rank.rank() == 1 {
                return;
            }
            let arena = rank.arena(&[1.0_f32; 64]);
            // Without a partner, they fill their streams.
            let works = [&parts[0], &parts[1], &rank.comm].map(|comm| {
                let work = comm.all_reduce(&arena.whole(), SUM, launch("alone"));
                if !by_a_call {
                    assert!(!work.is_done());
                }
                work
            });
            if !by_a_call {
                world.cancel.cancel("rank 1 died of SIGKILL");
            }
            for work in &works {
                failure(work);
            }
            rank.comm.abandon();
            assert!(world.fake.log().aborted >= 3, "by a call: {by_a_call}");
        });
        assert_eq!(world.fake.log().violations, Vec::<String>::new());
    }
}

#[test]
fn a_time_out_in_one_communicator_is_told_to_those_who_wait_in_another() {
    let world = World::of(2, &[]).within(SHORT);
    world.run(|rank| {
        let part = rank.comm.split("parameters", &[0, 1], Executor::Thread).unwrap();
        done(&reduce(&rank, "bucket 0"));
        if rank.rank() == 1 {
            return;
        }
        let late = reduce(&rank, "bucket 1");
        let (words, _) = failure(&late);
        assert!(words.contains("ms for rank 1"), "{words}");
        let arena = rank.arena(&[1.0_f32; 64]);
        let elsewhere = part.all_reduce(&arena.whole(), SUM, launch("layer 0"));
        let (words, found) = failure(&elsewhere);
        assert!(
            words.contains(
                "`parameters` (layer 0, 256 bytes) failed: abandoned because of #1 of `world`: waited"
            ),
            "{words}"
        );
        assert!(matches!(found, Failure::GivenUp { .. }));
    });
}

/// The stream had passed it when the other one was given up.
#[test]
fn an_operation_that_was_done_before_a_later_one_failed_stays_done() {
    let fails = Fault::CallFails {
        rank: 0,
        operation: 1,
    };
    let world = World::of(2, &[fails]);
    let both_are_done = std::sync::Barrier::new(2);
    world.run(|rank| {
        let first = reduce(&rank, "bucket 0");
        // Not asked about by its handle before the other one fails.
        rank.device.wait_event(rank.compute, first.event(), deadline());
        rank.device.synchronize(rank.compute).unwrap();
        both_are_done.wait();
        if rank.rank() == 0 {
            failure(&reduce(&rank, "bucket 1"));
            done(&first);
        }
    });
}

#[test]
fn a_device_that_is_no_gpu_is_refused() {
    use crate::collective::nccl::{Membership, NcclTransport};
    use crate::session::{Cancel, MemoryStore};
    let device: Arc<dyn Device> = FakeDevice::new();
    let world = Membership {
        name: "world".into(),
        rank: 0,
        members: vec![0],
        timeout: SHORT,
        cancel: Cancel::new(),
    };
    let store = Arc::new(MemoryStore::default());
    let error = NcclTransport::connect(&nccl(), &device, store, world)
        .err()
        .unwrap();
    assert_eq!(error.to_string(), "NCCL needs a GPU, the device is fake");
}
