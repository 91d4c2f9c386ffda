//! What goes wrong between ranks ends with an error that says where, not with a hang.

mod strangers;

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use crate::collective_world::{PATIENCE, Rank, World, done, failure, launch};
use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;
use ddp_worker::collective::{
    AllToAll, Communicator, Executor, Failure, Launch, RankInfo, ReduceOp, Subgroup, Traffic, Work, connect,
};
use ddp_worker::config::{Parallel, Pipeline};
use ddp_worker::device::{ArenaSpec, Compute, DType, DeviceError, Event, EventState};
use ddp_worker::mesh::{Mesh, MeshShape};
use ddp_worker::model::ActivationPool;
use ddp_worker::parallel::pipeline::{Action, ActionKind, Placement};
use ddp_worker::parallel::{MessageShape, StageMessages};
use ddp_worker::session::KeyValue;

const SUM: ReduceOp = ReduceOp::Sum;
/// Long enough for ranks on a loaded machine to come to the same operation.
const SHORT: Duration = Duration::from_millis(700);

/// Runs a world in which the last rank never issues the operation that all others fail in.
/// The last rank does `instead`.
fn without_the_last(world: &World, len: usize, instead: impl Fn() + Sync) -> Vec<Option<Failure>> {
    let last = world.size() - 1;
    let (is_set_up, set_up) = channel::<()>();
    let (all_failed, failed) = channel::<()>();
    let heard = std::sync::Mutex::new((set_up, failed));
    let outcomes = world.run(Executor::Inline, |rank| {
        let arena = rank.arena(true, &vec![1.0_f32; len]);
        if rank.rank() == last {
            let (set_up, failed) = &*heard.lock().unwrap();
            // What is done instead must not hit the others while they allocate.
            for _ in 0..last {
                set_up.recv_timeout(PATIENCE).expect("the others set up");
            }
            instead();
            // Stays connected until the others are done, each of which says so.
            for _ in 0..last {
                failed.recv_timeout(PATIENCE).expect("the others fail");
            }
            return (None, rank);
        }
        is_set_up.send(()).unwrap();
        let launch = Launch::now(Traffic::Other, "test");
        let failure = failure(&rank.comm.all_reduce(&arena.whole(), SUM, launch));
        all_failed.send(()).unwrap();
        // The rank is returned too: one that left would be named by those that still wait.
        (Some(failure), rank)
    });
    outcomes.into_iter().map(|(failure, _)| failure).collect()
}

#[test]
fn a_time_out_names_the_missing_rank() {
    for (nodes, tree) in [
        (&[3][..], false),
        (&[1, 1], false),
        (&[1, 1, 1], false),
        (&[2, 1], false),
        (&[1, 1, 1, 1], true),
    ] {
        for len in [1, 100_000] {
            let mut world = World::of(nodes).timeout(SHORT);
            world.tree = Some(tree);
            let failures = without_the_last(&world, len, || {});
            for failure in failures.into_iter().flatten() {
                let named = matches!(&failure, Failure::TimedOut { waiting_for, waited_ms }
                    if *waiting_for == [world.size() - 1] && *waited_ms >= 700);
                assert!(named, "{nodes:?}, {len} elements: {failure}");
            }
        }
    }
}

/// The error of the stream of a rank that waits for `action` of a pipeline of two, whose other rank does nothing.
fn waiting_in_a_pipeline(action: Action) -> String {
    let world = World::of(&[2]).timeout(SHORT);
    let (is_over, over): (Sender<()>, Receiver<()>) = channel();
    let over = std::sync::Mutex::new(over);
    let parallel = Parallel {
        pipeline: Pipeline {
            stages: 2,
            ..Pipeline::default()
        },
        ..Parallel::default()
    };
    let env = WorkerEnv {
        world_size: WorldSize(2),
        local_world_size: 2,
        ..WorkerEnv::single()
    };
    let shape = MeshShape::new(&parallel, &env).unwrap();
    let errors = world.run(Executor::Thread, |rank| {
        let compute = Compute::new(rank.device.clone());
        let mesh = Mesh::new(shape, rank.comm.clone(), Executor::Thread);
        let (placement, dtype) = (Placement::looped(2, 1), DType::F32);
        let dimensions = vec![4];
        let shape = MessageShape { dimensions, dtype };
        let mut messages = StageMessages::connect(&mesh, &compute, &placement, shape).unwrap();
        if messages.rank() != action.rank {
            // Stays connected, as one that is slow or stopped.
            over.lock().unwrap().recv_timeout(PATIENCE).unwrap();
            return String::new();
        }
        let pool = ActivationPool::new(rank.device.clone());
        messages.begin();
        let waited = if action.kind.is_receive() {
            let arrival = messages.receive(action, &pool).unwrap();
            messages.arrived(arrival).map(drop)
        } else {
            let activation = pool.lease("output", dtype, &[4]).unwrap();
            messages.send(action, activation).unwrap();
            messages.finish()
        };
        let error = waited.and_then(|()| compute.synchronize()).unwrap_err();
        is_over.send(()).unwrap();
        error.to_string()
    });
    errors.concat()
}

#[test]
fn a_message_of_a_pipeline_times_out_and_names_itself_and_the_other_rank() {
    let action = |stage, kind| Action {
        rank: stage,
        stage,
        kind,
        micro_batch: 3,
    };
    std::thread::scope(|scope| {
        for (stage, kind, message) in [
            (0, ActionKind::ReceiveGradient, "`0RECV_B3`"),
            (1, ActionKind::ReceiveActivation, "`1RECV_F3`"),
            (0, ActionKind::SendActivation, "`1RECV_F3`"),
        ] {
            scope.spawn(move || {
                let error = waiting_in_a_pipeline(action(stage, kind));
                let other = format!("for rank {}", 1 - stage);
                assert!(error.contains(message) && error.contains(&other), "{error}");
            });
        }
    });
}

#[test]
fn a_cancel_ends_every_wait_with_its_cause() {
    for nodes in [&[2][..], &[1, 1]] {
        let world = World::of(nodes);
        let started = Instant::now();
        let cancel = world.cancel.clone();
        let cancel = || cancel.cancel("rank 5 died of SIGKILL");
        for failure in without_the_last(&world, 100_000, cancel).into_iter().flatten() {
            assert_eq!(failure, Failure::GenerationOver("rank 5 died of SIGKILL".into()));
        }
        assert!(
            started.elapsed() < PATIENCE / 2,
            "the operation's own bound did not end the wait"
        );
    }
}

#[test]
fn a_cancel_ends_the_search_for_peers() {
    let world = World::of(&[1, 1]);
    let places = world.places();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| world.connect(&places[0]).err());
        world
            .store
            .wait_for("collective/rank/0", Instant::now() + PATIENCE)
            .unwrap();
        world.cancel.cancel("superseded");
        assert_eq!(
            first.join().unwrap(),
            Some(Failure::GenerationOver("superseded".into()))
        );
    });
}

#[test]
fn a_rank_that_never_connects_is_named() {
    for nodes in [&[3][..], &[1, 2]] {
        let world = World::of(nodes);
        let places = world.places();
        std::thread::scope(|scope| {
            let connect = |rank: usize| {
                let (place, world) = (&places[rank], &world);
                scope.spawn(move || connect(place, &world.store, &world.cancel, SHORT).err())
            };
            for thread in [connect(0), connect(1)] {
                match thread.join().unwrap() {
                    Some(Failure::TimedOut { waiting_for, .. }) => assert_eq!(waiting_for, [2]),
                    other => panic!("{nodes:?}: {other:?}"),
                }
            }
        });
    }
}

/// An address at which a system drops what comes, as a firewall does: the queue of the listener is full.
fn deaf_address() -> (SocketAddr, impl Sized) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    nix::sys::socket::listen(&listener, nix::sys::socket::Backlog::new(0).unwrap()).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queued = Vec::new();
    while let Ok(stream) = TcpStream::connect_timeout(&address, Duration::from_secs(1)) {
        queued.push(stream);
    }
    (address, (listener, queued))
}

#[test]
fn a_rank_that_cannot_be_reached_is_named_with_its_address() {
    let world = World::of(&[1, 1]);
    let (address, _listener) = deaf_address();
    let card = serde_json::json!({"node": 0, "local": 0, "unix": "", "tcp": address});
    let card = serde_json::to_vec(&card).unwrap();
    world
        .store
        .put("collective/rank/0", &card, Instant::now())
        .unwrap();
    let failure = world
        .connect(&world.places()[1])
        .err()
        .expect("nobody answers")
        .to_string();
    let (what, hint) = failure.split_once("\n  hint: ").expect(&failure);
    assert!(
        what.starts_with(&format!("cannot reach rank 0 at `{address}`: no answer within ")),
        "{failure}"
    );
    assert!(
        hint.starts_with("check that the ports between the nodes are open"),
        "{failure}"
    );
}

/// Waits until somebody in the world says that it waits for exactly this rank, and returns in what.
fn awaited(world: &World, rank: usize) -> String {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let waits = world.cancel.waits();
        if let Some(wait) = waits.iter().find(|wait| wait.ranks == [rank]) {
            return wait.what.clone();
        }
        assert!(Instant::now() < deadline, "{waits:?}");
        std::thread::yield_now();
    }
}

#[test]
fn a_set_up_says_for_whom_it_waits() {
    for nodes in [&[2][..], &[1, 1]] {
        let world = World::of(nodes);
        let places = world.places();
        std::thread::scope(|scope| {
            let connect = |rank: usize| {
                let (world, place) = (&world, &places[rank]);
                scope.spawn(move || world.connect(place).unwrap())
            };
            let first = connect(0);
            assert_eq!(awaited(&world, 1), "connect of `world`");
            let second = connect(1);
            let allocate = |transport| {
                let comm = Communicator::new("pair", transport, Executor::Inline, PATIENCE, &world.cancel);
                Rank::new(comm).arena(true, &[1.0_f32])
            };
            let (first, second) = (first.join().unwrap(), second.join().unwrap());
            let first = scope.spawn(move || allocate(first));
            assert_eq!(awaited(&world, 1), "shared allocation (test) of `pair`");
            allocate(second);
            first.join().unwrap();
        });
        assert!(world.cancel.waits().is_empty(), "{nodes:?}");
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    for (nodes, len) in [(&[2][..], 100_000), (&[1, 1], 100_000), (&[1, 1], 10)] {
        let mut world = World::of(nodes);
        world.tree = Some(len == 10);
        let failures = world.run(Executor::Inline, |rank| {
            let arena = rank.arena(true, &vec![1.0_f32; len]);
            done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
            (rank.rank() == 0).then(|| failure(&rank.comm.all_reduce(&arena.whole(), SUM, launch())))
        });
        let Some(Some(Failure::PeerLost { rank: 1, .. })) = &failures.first() else {
            panic!("{nodes:?}: {failures:?}");
        };
    }
}

/// An all-to-all in which this rank sends `sent(rank)` elements to each other rank, and expects `received` of each.
fn exchange(rank: &Rank, sent: &dyn Fn(usize) -> usize, received: usize) -> Work {
    let (me, size) = (rank.rank(), rank.comm.size());
    let counts = |each: &dyn Fn(usize) -> usize| -> Vec<usize> {
        (0..size)
            .map(|peer| if peer == me { 2 } else { each(peer) })
            .collect()
    };
    let (sent_counts, received_counts) = (counts(sent), counts(&|_| received));
    let [sent, into] = [&sent_counts, &received_counts]
        .map(|counts| rank.arena(false, &vec![me as f32; counts.iter().sum()]).whole());
    let parts = AllToAll {
        sent,
        sent_counts,
        received_counts,
    };
    rank.comm.all_to_all(&into, parts, launch())
}

#[test]
fn parts_of_another_length_are_an_error_that_names_both_ranks() {
    for nodes in [&[3][..], &[1, 1, 1]] {
        for wrong in [50_000, 5, 0] {
            let failures = World::of(nodes).run(Executor::Inline, |rank| {
                let me = rank.rank();
                let work = exchange(&rank, &|peer| if (me, peer) == (0, 1) { wrong } else { 4 }, 4);
                (me == 1).then(|| failure(&work))
            });
            let Some(Failure::Mismatch {
                rank: 0,
                ours,
                theirs,
            }) = &failures[1]
            else {
                panic!("{nodes:?}, {wrong}: {failures:?}");
            };
            let call = |count| format!("all-to-all #0 with a part of {count} f32, traffic gradients (test)");
            assert_eq!([ours, theirs], [&call(4), &call(wrong)]);
        }
    }
}

#[test]
fn a_rank_that_leaves_an_all_to_all_is_named() {
    for nodes in [&[3][..], &[1, 1, 1]] {
        let failures = World::of(nodes).run(Executor::Inline, |rank| {
            done(&exchange(&rank, &|_| 10, 10));
            // The others have sent what the kernel holds, and wait for the rest.
            let many = 3_000_000;
            (rank.rank() != 2).then(|| failure(&exchange(&rank, &|_| many, many)))
        });
        for failure in &failures[..2] {
            assert!(
                matches!(failure, Some(Failure::PeerLost { .. })),
                "{nodes:?}: {failures:?}"
            );
        }
    }
}

#[test]
fn what_a_rank_wrote_before_it_left_counts() {
    // Rank 1 leaves at once after each last operation; rank 0 must still see it complete.
    for nodes in [&[2][..], &[1, 1]] {
        for _ in 0..10 {
            World::of(nodes).run(Executor::Inline, |rank| {
                let arena = rank.arena(true, &[1.0_f32; 3000]);
                done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
            });
        }
    }
}

#[test]
fn a_mismatch_names_both_operations() {
    for nodes in [&[2][..], &[1, 1]] {
        let issue = |rank: &Rank, which: usize| {
            let arena = rank.arena(true, &[1.0_f32; 64]);
            let whole = arena.whole();
            match which {
                0 => rank.comm.all_reduce(&whole, SUM, launch()),
                1 => rank.comm.all_reduce(&whole.slice(0..63), SUM, launch()),
                2 => rank.comm.all_reduce(&whole, ReduceOp::Max, launch()),
                3 => rank.comm.broadcast(&whole, 1, launch()),
                _ => rank.comm.all_gather(&whole, launch()),
            }
        };
        for other in 1..=4 {
            let failures = World::of(nodes).run(Executor::Inline, |rank| {
                let which = if rank.rank() == 0 { 0 } else { other };
                failure(&issue(&rank, which))
            });
            let Failure::Mismatch {
                rank: 1,
                ours,
                theirs,
            } = &failures[0]
            else {
                panic!("{nodes:?}: {failures:?}");
            };
            assert_eq!(ours, "all-reduce #2 of 64 f32, sum, traffic gradients (test)");
            assert!(
                matches!(&failures[1], Failure::Mismatch { rank: 0, ours: o, theirs: t } if o == theirs && t == ours)
            );
        }
    }
}

#[test]
fn a_failed_communicator_stays_failed() {
    let failures = World::of(&[2]).run(Executor::Inline, |rank| {
        let arena = rank.arena(false, &[1.0_f32; 4]);
        let len = 3 + rank.rank();
        failure(&rank.comm.all_reduce(&arena.slice(0..len), SUM, launch()));
        failure(&rank.comm.all_reduce(&arena.whole(), SUM, launch()))
    });
    assert!(
        failures.iter().all(|f| matches!(f, Failure::Poisoned(_))),
        "{failures:?}"
    );
}

#[test]
fn impossible_operations_are_refused_by_all() {
    World::of(&[2]).run(Executor::Inline, |rank| {
        let fresh = |name: &str| {
            rank.comm
                .split(&Subgroup::new(name, [0, 1]), Executor::Inline)
                .unwrap()
        };
        let invalid = |failure: Failure, words: &str| {
            assert!(
                matches!(&failure, Failure::Invalid(what) if what.contains(words)),
                "{failure}"
            );
        };
        let floats = rank.arena(false, &[1.0_f32; 3]);
        let integers = rank.arena(false, &[1_i32; 3]);
        invalid(
            failure(&fresh("a").all_gather(&floats.whole(), launch())),
            "3 elements cannot be split into 2 equal slices",
        );
        invalid(
            failure(&fresh("b").all_reduce(&integers.whole(), SUM, launch())),
            "i32 cannot be summed",
        );
        invalid(
            failure(&fresh("c").broadcast(&floats.whole(), 2, launch())),
            "no rank 2 in a group of 2",
        );
        let parts = |sent: [usize; 2], received: &[usize]| AllToAll {
            sent: floats.whole(),
            sent_counts: sent.to_vec(),
            received_counts: received.to_vec(),
        };
        for (sent, received) in [([1, 2], &[1, 2, 0][..]), ([1, 1], &[1, 2]), ([1, 2], &[2, 1])] {
            let words = format!(
                "cannot send the parts {sent:?} of 3 f32 and receive the parts {received:?} of 3 f32"
            );
            let into = rank.arena(false, &[0.0_f32; 3]);
            let work = fresh("e").all_to_all(&into.whole(), parts(sent, received), launch());
            invalid(failure(&work), &words);
        }
        invalid(
            failure(&fresh("d").send(&floats.whole(), rank.rank(), launch())),
            "not another rank",
        );
    });
}

#[test]
fn splits_must_agree() {
    World::of(&[3]).run(Executor::Inline, |rank| {
        let members: &[usize] = if rank.rank() == 2 { &[1, 2] } else { &[0, 1] };
        let failure = rank
            .comm
            .split(&Subgroup::new("pair", members), Executor::Inline)
            .err()
            .map(|e| e.failure);
        match rank.rank() {
            0 => assert!(failure.is_none() || matches!(failure, Some(Failure::PeerLost { .. }))),
            1 => drop(failure),
            _ => assert!(
                matches!(failure, Some(Failure::Mismatch { rank: 1, .. })),
                "{failure:?}"
            ),
        }
    });
}

#[test]
fn strangers_are_refused() {
    let world = World::of(&[1, 1]);
    let places = world.places();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| world.connect(&places[0]));
        let card = world
            .store
            .wait_for("collective/rank/0", Instant::now() + PATIENCE)
            .unwrap();
        let card: serde_json::Value = serde_json::from_slice(&card).unwrap();
        let address: SocketAddr = card["tcp"].as_str().unwrap().parse().unwrap();
        let silent = TcpStream::connect(address).unwrap();
        let mut noisy = TcpStream::connect(address).unwrap();
        noisy
            .write_all(b"GET / HTTP/1.1\r\nHost: a-very-long-name-of-a-host\r\n\r\n")
            .unwrap();
        let second = world.connect(&places[1]).unwrap();
        let first = first.join().unwrap().unwrap();
        drop((silent, noisy));
        let work = |transport| {
            let comm = Communicator::new("world", transport, Executor::Inline, PATIENCE, &world.cancel);
            let rank = Rank::new(comm);
            let arena = rank.arena(false, &[1.0_f32; 4]);
            done(&rank.comm.all_reduce(&arena.whole(), SUM, launch()));
        };
        let other = scope.spawn(move || work(second));
        work(first);
        other.join().unwrap();
    });
}

#[test]
fn more_memory_than_there_is_is_refused_by_all() {
    World::of(&[2]).run(Executor::Inline, |rank| {
        let error = rank
            .comm
            .alloc_shared(&rank.device, &ArenaSpec::on_node("test", DType::U8, 1 << 46))
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot allocate 64.0 TiB for `test`"), "{text}");
        assert!(!error.is_consequence(), "it is this rank's own as well: {text}");
    });
}

/// Runs in a process of its own, since the limit holds for the whole process.
#[test]
fn the_limit_on_file_sizes_is_an_error_and_not_a_signal() {
    const MARK: &str = "DDP_TEST_FILE_SIZE_LIMIT";
    const NAME: &str = "the_limit_on_file_sizes_is_an_error_and_not_a_signal";
    if std::env::var_os(MARK).is_none() {
        let test = std::env::current_exe().unwrap();
        let child = std::process::Command::new(test)
            .args(["--exact", NAME])
            .env(MARK, "1")
            .output()
            .unwrap();
        assert!(child.status.success(), "{child:?}");
        return;
    }
    World::of(&[2]).run(Executor::Inline, |rank| {
        use nix::sys::resource::{Resource, setrlimit};
        setrlimit(Resource::RLIMIT_FSIZE, 4 << 20, 4 << 20).unwrap();
        let error = rank
            .comm
            .alloc_shared(&rank.device, &ArenaSpec::on_node("test", DType::U8, 5 << 20))
            .unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot allocate 5.0 MiB for `test`"), "{text}");
        assert!(text.contains("limit on file sizes"), "{text}");
        assert!(
            rank.comm
                .alloc_shared(&rank.device, &ArenaSpec::on_node("test", DType::U8, 3 << 20))
                .is_ok()
        );
    });
}

#[test]
fn eight_ranks_make_progress_on_few_cores() {
    World::of(&[8]).run(Executor::Thread, |rank| {
        let arena = rank.arena(true, &vec![1.0_f32; 80_000]);
        for _ in 0..100 {
            done(&rank.comm.all_reduce(&arena.slice(0..64), ReduceOp::Max, launch()));
            done(&rank.comm.all_reduce(&arena.whole(), ReduceOp::Max, launch()));
        }
        assert!(
            crate::collective_world::read::<f32>(&arena.whole())
                .iter()
                .all(|&x| x == 1.0)
        );
        rank.comm.shutdown();
    });
}

#[test]
fn a_stale_generation_is_not_let_in() {
    let world = World::of(&[2]);
    let mut places = world.places();
    places[1].generation = 2;
    let join = |rank: usize| connect(&places[rank], &world.store, &world.cancel, SHORT).err();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(0));
        assert!(join(1).is_some());
        let failure = first.join().unwrap();
        let named = matches!(&failure, Some(Failure::TimedOut { waiting_for, .. }) if *waiting_for == [1]);
        assert!(named, "{failure:?}");
    });
}

/// A rank that gave up is no longer waited for, but one that comes late does not know that yet: it may write.
#[test]
fn memory_of_a_failed_operation_stays_closed() {
    let (gave_up, late) = channel::<()>();
    let late = std::sync::Mutex::new(late);
    World::of(&[2]).timeout(SHORT).run(Executor::Inline, |rank| {
        let shared = rank.arena(true, &vec![1.0_f32; 100_000]);
        let private = rank.arena(false, &[1.0_f32; 4]);
        if rank.rank() == 1 {
            late.lock()
                .unwrap()
                .recv_timeout(PATIENCE)
                .expect("rank 0 gives up");
            failure(&rank.comm.all_reduce(&shared.slice(0..90_000), SUM, launch()));
            return;
        }
        failure(&rank.comm.all_reduce(&shared.slice(0..90_000), SUM, launch()));
        gave_up.send(()).unwrap();
        let refused = shared.slice(89_999..90_001).host::<f32>().err();
        assert!(matches!(refused, Some(DeviceError::Race { .. })), "{refused:?}");
        assert!(shared.slice(90_000..100_000).host::<f32>().is_ok());
        assert!(private.whole().host_mut::<f32>().is_ok());
    });
}

#[test]
fn a_cancel_ends_the_wait_for_a_buffer_that_is_never_ready() {
    for executor in [Executor::Inline, Executor::Thread] {
        let world = World::of(&[1]);
        let cancel = world.cancel.clone();
        let failures = world.run(executor, |rank| {
            let arena = rank.arena(false, &[1.0_f32; 4]);
            let (after, _signal) = Event::pair("a gradient");
            let launch = Launch::after(after, Traffic::Grads, "test");
            std::thread::scope(|scope| {
                let work = scope.spawn(|| failure(&rank.comm.all_reduce(&arena.whole(), SUM, launch)));
                cancel.cancel("rank 5 died of SIGKILL");
                work.join().unwrap()
            })
        });
        assert_eq!(
            failures,
            [Failure::GenerationOver("rank 5 died of SIGKILL".into())]
        );
    }
}

#[test]
fn a_buffer_that_is_never_ready_is_an_error_with_the_whole_time() {
    let world = World::of(&[1]).timeout(SHORT);
    let failures = world.run(Executor::Inline, |rank| {
        let arena = rank.arena(false, &[1.0_f32; 4]);
        let (after, _signal) = Event::pair("a gradient");
        let launch = Launch::after(after, Traffic::Grads, "test");
        failure(&rank.comm.all_reduce(&arena.whole(), SUM, launch))
    });
    assert_eq!(failures[0].to_string(), "waited 700 ms for a gradient");
}

/// Reached between the end of a wait for it and the next look at it.
struct ReachedAfterTheWait;

impl EventState for ReachedAfterTheWait {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        Some(Ok(()))
    }

    fn wait(&self, _: Instant) -> Result<(), DeviceError> {
        Err(DeviceError::TimedOut {
            what: "a gradient".into(),
            waited_ms: 0,
        })
    }
}

#[test]
fn a_buffer_that_is_ready_just_after_a_wait_for_it_ended_is_no_error() {
    World::of(&[1]).run(Executor::Inline, |rank| {
        let arena = rank.arena(false, &[1.0_f32; 4]);
        let after = Event::new(ReachedAfterTheWait);
        let launch = Launch::after(after, Traffic::Grads, "test");
        done(&rank.comm.all_reduce(&arena.whole(), SUM, launch));
    });
}

#[test]
fn a_place_outside_its_world_is_refused() {
    let world = World::of(&[2]);
    let good = world.places().remove(1);
    for change in [
        |place: &mut RankInfo| place.rank = 2,
        |place: &mut RankInfo| place.local_rank = 2,
        |place: &mut RankInfo| place.local_world_size = 3,
        |place: &mut RankInfo| place.world_size = 0,
    ] {
        let mut place = good.clone();
        change(&mut place);
        let refused = world.connect(&place).err();
        assert!(
            matches!(&refused, Some(Failure::Invalid(what)) if what.contains("cannot be rank")),
            "{refused:?}"
        );
    }
}
