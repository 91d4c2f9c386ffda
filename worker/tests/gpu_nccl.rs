//! NCCL between 2 and 4 ranks on one GPU, against the same operations over shared memory.
//!
//! Functional, not for bandwidth. Without a GPU the tests say so and pass, unless `DDP_REQUIRE_GPU=1`.

mod nccl_ranks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_worker::collective::{
    AllToAll, Communicator, Executor, Failure, Launch, ReduceOp, Subgroup, Traffic, Work, WorkError,
};
use ddp_worker::device::{ArenaSpec, Buffer, CpuDevice, Device, Element};
use half::bf16;
use nccl_ranks::{PATIENCE, Place, Rank, TIMEOUT, nccl_and_gpu, run_ranks, timeline};

/// Elements of a buffer: more than one of NCCL's chunks, slices of odd size for 2 and 4 ranks.
const LEN: usize = 4 * 100_003;

/// How far sums over NCCL may be from those in rank order, relative to the largest element.
const F32_TOLERANCE: f32 = 1e-6;
const BF16_TOLERANCE: f32 = 0.02;

/// How long an absentee is waited for. It bounds the set-up of the group too, which may take seconds on a busy machine.
const ABSENCE: Duration = Duration::from_secs(15);

/// The same where nothing else has to be done within it.
const SHORT_ABSENCE: Duration = Duration::from_secs(5);

/// What ranks give: spread over several orders of magnitude, different on each.
fn numbers(rank: usize, len: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(rank as u64 + 1);
    let next = |state: &mut u64| {
        *state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (*state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..len).map(|_| next(&mut state)).collect()
}

/// An operation on a communicator.
type Act<'a> = &'a dyn Fn(&Communicator, &Buffer, Launch) -> Work;

/// The elements after an operation on `device`; its input comes through a stream.
fn apply<T: Element>(device: &dyn Device, comm: &Communicator, elements: &[T], act: Act<'_>) -> Vec<T> {
    let buffer = buffer(device, elements);
    let stream = device.stream();
    device.upload(stream, &buffer, bytemuck::cast_slice(elements));
    let work = act(
        comm,
        &buffer,
        Launch::after(device.record(stream), Traffic::Grads, "test"),
    );
    device.wait_event(stream, work.event(), Instant::now() + TIMEOUT);
    let bytes = device.download(stream, &buffer).unwrap();
    work.wait(Instant::now() + TIMEOUT).unwrap();
    from_bytes(&bytes)
}

fn from_bytes<T: Element>(bytes: &[u8]) -> Vec<T> {
    let each = bytes.chunks_exact(size_of::<T>());
    each.map(bytemuck::pod_read_unaligned).collect()
}

fn buffer<T: Element>(device: &dyn Device, elements: &[T]) -> Buffer {
    let spec = ArenaSpec::private("test", T::DTYPE, elements.len());
    device.alloc(&spec).unwrap().whole()
}

/// The same operation both ways.
fn both<T: Element>(rank: &Rank, elements: &[T], act: Act<'_>) -> (Vec<T>, Vec<T>) {
    let over_nccl = apply(rank.gpu.as_ref(), &rank.over_nccl, elements, act);
    let over_memory = apply(rank.cpu.as_ref(), &rank.over_memory, elements, act);
    (over_nccl, over_memory)
}

fn close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    let scale = expected.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let worst = found
        .iter()
        .zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max);
    assert!(
        worst <= tolerance * scale,
        "{what}: off by {worst}, largest is {scale}"
    );
}

fn sums_agree(rank: &Rank) {
    let own = numbers(rank.number, LEN);
    let half: Vec<bf16> = own.iter().map(|x| bf16::from_f32(*x)).collect();
    let slice = LEN / rank.size;
    let mine = rank.number * slice..(rank.number + 1) * slice;
    let reduce = ReduceOp::Sum;
    let all_reduce: Act<'_> = &|comm, buffer, launch| comm.all_reduce(buffer, reduce, launch);
    let (found, expected) = both(rank, &own, all_reduce);
    close("all-reduce of f32", &found, &expected, F32_TOLERANCE);
    let scatter: Act<'_> = &|comm, buffer, launch| comm.reduce_scatter(buffer, reduce, launch);
    let (found, expected) = both(rank, &own, scatter);
    close(
        "reduce-scatter of f32",
        &found[mine.clone()],
        &expected[mine.clone()],
        F32_TOLERANCE,
    );
    let (found, expected) = both(rank, &half, all_reduce);
    let widen = |x: &[bf16]| x.iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    close(
        "all-reduce of bf16",
        &widen(&found),
        &widen(&expected),
        BF16_TOLERANCE,
    );
}

fn moves_agree(rank: &Rank) {
    let own = numbers(rank.number, LEN);
    let gather: Act<'_> = &|comm, buffer, launch| comm.all_gather(buffer, launch);
    let (found, expected) = both(rank, &own, gather);
    assert_eq!(found, expected, "all-gather");
    for root in 0..rank.size {
        let broadcast: Act<'_> = &|comm, buffer, launch| comm.broadcast(buffer, root, launch);
        let (found, expected) = both(rank, &own, broadcast);
        assert_eq!(found, expected, "broadcast from {root}");
    }
    let largest: Act<'_> = &|comm, buffer, launch| comm.all_reduce(buffer, ReduceOp::Max, launch);
    let (found, expected) = both(rank, &own, largest);
    assert_eq!(found, expected, "maximum");
    let doubles: Vec<f64> = own.iter().take(64).map(|x| f64::from(*x)).collect();
    let (found, expected) = both(rank, &doubles, gather);
    assert_eq!(found, expected, "all-gather of f64");
    let bytes: Vec<u8> = (0..rank.size * 16).map(|i| (i * 7 + rank.number) as u8).collect();
    let (found, expected) = both(rank, &bytes, gather);
    assert_eq!(found, expected, "all-gather of bytes");
    // Even ranks send to the odd ones after them.
    let pass: Act<'_> = &|comm, buffer, launch| match comm.rank() % 2 {
        0 => comm.send(buffer, comm.rank() + 1, launch),
        _ => comm.recv(buffer, comm.rank() - 1, launch),
    };
    let (found, expected) = both(rank, &own, pass);
    assert_eq!(found, expected, "send and recv");
    let barrier: Act<'_> = &|comm, buffer, launch| comm.barrier(buffer, launch);
    both(rank, &own, barrier);
}

/// Ranks send each other parts of different lengths, and the last one nothing at all; the same both ways.
fn parts_of_any_length_agree(rank: &Rank) {
    let (me, size) = (rank.number, rank.size);
    let part = |from: usize, to: usize| {
        if from + 1 == size {
            0
        } else {
            (3 * from + 2 * to) % 4 * 5_001
        }
    };
    let [sent_counts, received_counts]: [Vec<usize>; 2] = [
        (0..size).map(|to| part(me, to)).collect(),
        (0..size).map(|from| part(from, me)).collect(),
    ];
    let own = numbers(me, sent_counts.iter().sum());
    let exchange = |device: &dyn Device, comm: &Communicator| {
        let sent = buffer(device, &own);
        device.upload(device.stream(), &sent, bytemuck::cast_slice(&own));
        let into = vec![0.0_f32; received_counts.iter().sum()];
        apply(device, comm, &into, &|comm, buffer, launch| {
            let (sent_counts, received_counts) = (sent_counts.clone(), received_counts.clone());
            let sent = sent.clone();
            comm.all_to_all(
                buffer,
                AllToAll {
                    sent,
                    sent_counts,
                    received_counts,
                },
                launch,
            )
        })
    };
    let found = exchange(rank.gpu.as_ref(), &rank.over_nccl);
    assert_eq!(
        found,
        exchange(rank.cpu.as_ref(), &rank.over_memory),
        "all-to-all"
    );
}

fn split(rank: &Rank, name: &str, members: &[usize]) -> Communicator {
    let subgroup = Subgroup::new(name, members);
    rank.over_nccl.split(&subgroup, Executor::Thread).unwrap()
}

/// A second group of the same ranks, and halves, used at once.
fn parts_agree(rank: &Rank) {
    let all: Vec<usize> = (0..rank.size).collect();
    let half = rank.size / 2;
    let first = rank.number / half * half;
    let members: Vec<usize> = (first..first + half).collect();
    let (beside, halves) = (split(rank, "beside", &all), split(rank, "halves", &members));
    let own = numbers(rank.number, LEN);
    let (left, right) = (buffer(rank.gpu.as_ref(), &own), buffer(rank.gpu.as_ref(), &own));
    let stream = rank.gpu.stream();
    rank.gpu.upload(stream, &left, bytemuck::cast_slice(&own));
    rank.gpu.upload(stream, &right, bytemuck::cast_slice(&own));
    let launch = || Launch::after(rank.gpu.record(stream), Traffic::Params, "beside");
    let sum = ReduceOp::Sum;
    let works = [
        beside.all_gather(&left, launch()),
        rank.over_nccl.all_reduce(&right, sum, launch()),
    ];
    for work in works {
        work.wait(Instant::now() + TIMEOUT).unwrap();
    }
    let small = apply(
        rank.gpu.as_ref(),
        &halves,
        &[1.0_f32; 8],
        &|comm, buffer, launch| comm.all_reduce(buffer, sum, launch),
    );
    assert_eq!(small, [half as f32; 8]);
    let expected = apply(
        rank.cpu.as_ref(),
        &rank.over_memory,
        &own,
        &|comm, buffer, launch| comm.all_reduce(buffer, sum, launch),
    );
    let found: Vec<f32> = from_bytes(&rank.gpu.download(stream, &right).unwrap());
    close("two groups at once", &found, &expected, F32_TOLERANCE);
    halves.shutdown();
    beside.shutdown();
}

#[test]
fn rank_of_operations() {
    let Some(rank) = Rank::of_process(TIMEOUT) else {
        return;
    };
    sums_agree(&rank);
    moves_agree(&rank);
    parts_of_any_length_agree(&rank);
    let before = (rank.over_nccl.wire_bytes(), rank.over_memory.wire_bytes());
    assert_eq!(before.0.grads, before.1.grads, "bytes on the wire");
    parts_agree(&rank);
    rank.over_nccl.shutdown();
    assert!(rank.cancel.cause().is_none());
}

/// The last rank stays away: the others name it, abort, and can end.
#[test]
fn rank_of_a_group_with_an_absentee() {
    let Some(rank) = Rank::of_process(ABSENCE) else {
        return;
    };
    let sum = ReduceOp::Sum;
    let all_reduce: Act<'_> = &|comm, buffer, launch| comm.all_reduce(buffer, sum, launch);
    apply(rank.gpu.as_ref(), &rank.over_nccl, &[1.0_f32; 64], all_reduce);
    let all: Vec<usize> = (0..rank.size).collect();
    let beside = split(&rank, "beside", &all);
    if rank.number + 1 < rank.size {
        let buffer = buffer(rank.gpu.as_ref(), &[1.0_f32; 64]);
        let work = rank
            .over_nccl
            .all_reduce(&buffer, sum, Launch::now(Traffic::Grads, "bucket 7"));
        let Err(WorkError::Failed(error)) = work.wait(Instant::now() + TIMEOUT) else {
            panic!("an operation cannot succeed without a rank");
        };
        assert_eq!(*late_ranks(&error.failure), [rank.size - 1], "{error}");
        assert!(
            error.to_string().contains("all-reduce #1 of `world` (bucket 7"),
            "{error}"
        );
        // The stream goes on once the operation is aborted.
        (rank.gpu).wait_event(rank.gpu.stream(), work.event(), Instant::now() + TIMEOUT);
        // So are operations of the process in other communicators, for the same reason.
        let elsewhere = failure_of(&beside.all_reduce(&buffer, sum, Launch::now(Traffic::Params, "layer 0")));
        assert!(matches!(elsewhere, Failure::GivenUp { .. }), "{elsewhere}");
        let words = elsewhere.to_string();
        assert!(
            words.starts_with("abandoned because of #1 of `world`: waited"),
            "{words}"
        );
    }
    end_as_a_failed_worker(&rank.over_memory);
}

fn failure_of(work: &Work) -> Failure {
    match work.wait(Instant::now() + TIMEOUT) {
        Err(WorkError::Failed(error)) => error.failure,
        other => panic!("expected a failure, got {other:?}"),
    }
}

fn late_ranks(failure: &Failure) -> &[usize] {
    match failure {
        Failure::TimedOut { waiting_for, .. } => waiting_for,
        other => panic!("expected a time-out, got {other}"),
    }
}

/// Ends the process without exit handlers, when all ranks have come here.
fn end_as_a_failed_worker(over_memory: &Communicator) -> ! {
    let cpu = CpuDevice::new(1).unwrap();
    apply(&cpu, over_memory, &[0_u8; 4], &|comm, buffer, launch| {
        comm.barrier(buffer, launch)
    });
    ddp_worker::libraries::exit_at_once(0);
}

/// The last rank does not set the group up, and all others name it; a device that is no GPU is refused at once.
#[test]
fn rank_of_a_set_up_with_an_absentee() {
    let Some(place) = Place::of_process() else {
        return;
    };
    let cpu: Arc<dyn Device> = Arc::new(CpuDevice::new(1).unwrap());
    let error = place.connect(&cpu, TIMEOUT).err().unwrap().to_string();
    assert!(error.starts_with("NCCL needs a GPU, the device is "), "{error}");
    if place.number + 1 < place.size {
        let failure = place.connect(&place.gpu, SHORT_ABSENCE).err().unwrap();
        assert_eq!(*late_ranks(&failure), [place.size - 1], "{failure}");
    }
    end_as_a_failed_worker(&place.over_memory);
}

/// The last rank is lost, which the launcher reports: nobody waits for a time-out.
#[test]
fn rank_of_an_ended_generation() {
    let Some(rank) = Rank::of_process(TIMEOUT) else {
        return;
    };
    if rank.number + 1 < rank.size {
        let buffer = buffer(rank.gpu.as_ref(), &[1.0_f32; 64]);
        let launch = |tag| Launch::now(Traffic::Grads, tag);
        let works = ["bucket 0", "bucket 1"]
            .map(|tag| rank.over_nccl.all_reduce(&buffer, ReduceOp::Sum, launch(tag)));
        rank.cancel.cancel("rank 2 died of SIGKILL");
        for work in &works {
            let over = Failure::GenerationOver("rank 2 died of SIGKILL".into());
            assert_eq!(failure_of(work), over);
        }
        rank.over_nccl.abandon();
        ddp_worker::libraries::exit_at_once(0);
    }
}

/// A collective does not wait for kernels that come after its input, nor they for it.
#[test]
fn rank_of_a_timeline() {
    let Some(rank) = Rank::of_process(TIMEOUT) else {
        return;
    };
    let buckets = timeline::backward(&rank);
    if rank.number == 0 {
        // The harness leaves its own line open.
        println!("\n{}", timeline::table(&buckets));
    }
    rank.over_nccl.shutdown();
    let (first, last) = (&buckets[0], &buckets[buckets.len() - 1]);
    assert!(
        first.collective.began < last.kernels.began,
        "{first:?} waited for {last:?}"
    );
    for bucket in &buckets {
        assert!(bucket.kernels.ended <= bucket.collective.ended, "{bucket:?}");
    }
}

#[test]
fn collectives_run_beside_kernels() {
    let Some(nccl) = nccl_and_gpu() else { return };
    let ended = run_ranks(&nccl, "rank_of_a_timeline", 2);
    assert!(ended.iter().all(std::process::ExitStatus::success), "{ended:?}");
}

#[test]
fn operations_of_2_and_4_ranks_equal_those_over_shared_memory() {
    let Some(nccl) = nccl_and_gpu() else { return };
    for size in [2, 4] {
        let ended = run_ranks(&nccl, "rank_of_operations", size);
        assert!(
            ended.iter().all(std::process::ExitStatus::success),
            "{size} ranks: {ended:?}"
        );
    }
}

#[test]
fn a_rank_that_stays_away_is_named_by_the_others() {
    let Some(nccl) = nccl_and_gpu() else { return };
    let started = Instant::now();
    let ended = run_ranks(&nccl, "rank_of_a_group_with_an_absentee", 4);
    assert!(ended.iter().all(std::process::ExitStatus::success), "{ended:?}");
    assert!(started.elapsed() < PATIENCE);
}

#[test]
fn what_goes_wrong_is_named_and_every_process_can_end() {
    let Some(nccl) = nccl_and_gpu() else { return };
    for (name, ranks) in [
        ("rank_of_a_set_up_with_an_absentee", 4),
        ("rank_of_an_ended_generation", 3),
    ] {
        let ended = run_ranks(&nccl, name, ranks);
        assert!(
            ended.iter().all(std::process::ExitStatus::success),
            "{name}: {ended:?}"
        );
    }
}
