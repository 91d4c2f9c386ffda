//! The state machine against a fake library: functions of the same signatures, whose kernels run on the streams of a
//! device that is a thread each. Ranks are threads ([`World`]). Errors, delays and hangs are injected (`failures`). Here:
//! what operations compute and count, on communicators and parts of them.

mod failures;
mod fake;
mod functions;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fake::{FakeDevice, FakeNative, FakeWorld, Fault, Log};
use functions::{functions, version};
use half::bf16;

use super::comm::Membership;
use super::library::Nccl;
use super::transport::NcclTransport;
use crate::collective::{
    Communicator, Executor, Failure, Launch, ReduceOp, Traffic, WireBytes, Work, WorkError,
};
use crate::device::{Arena, ArenaSpec, Buffer, DType, Device, Element, Stream};
use crate::model::ParamId;
use crate::ops::Fill;
use crate::parallel::{GradSpec, GradientLayout, LayoutConfig, Reducer, ReducerConfig};
use crate::session::{Cancel, MemoryStore};

const SUM: ReduceOp = ReduceOp::Sum;

/// No test waits longer for anything.
const PATIENCE: Duration = Duration::from_mins(10);

fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

fn nccl() -> Nccl {
    Nccl::with(functions(version), Path::new("fake")).unwrap()
}

/// Several ranks, and what is to go wrong with them.
struct World {
    fake: Arc<FakeWorld>,
    cancel: Cancel,
    timeout: Duration,
    size: usize,
    store: MemoryStore,
}

impl World {
    fn of(size: usize, faults: &[Fault]) -> Self {
        Self {
            fake: FakeWorld::new(faults),
            cancel: Cancel::new(),
            timeout: PATIENCE,
            size,
            store: MemoryStore::default(),
        }
    }

    fn within(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    fn connect(&self, rank: usize, device: &Arc<FakeDevice>) -> Result<NcclTransport, Failure> {
        self.fake.enter();
        let world = Membership {
            name: "world".into(),
            rank,
            members: (0..self.size).collect(),
            timeout: self.timeout,
            cancel: self.cancel.clone(),
        };
        let (store, shared): (_, Arc<dyn Device>) = (Arc::new(self.store.clone()), device.clone());
        let native = Arc::new(FakeNative(device.clone()));
        NcclTransport::connect_on(&nccl(), &shared, native, (store, world))
    }

    /// Runs `body` on ranks `0..present` and returns what each returned.
    fn run_some<R: Send>(&self, present: usize, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        let body = &body;
        std::thread::scope(|scope| {
            let rank = |rank| {
                move || {
                    let device = FakeDevice::new();
                    let transport = self.connect(rank, &device).expect("the ranks connect");
                    body(self.rank(transport, device))
                }
            };
            let threads: Vec<_> = (0..present).map(|r| scope.spawn(rank(r))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }

    fn run<R: Send>(&self, body: impl Fn(Rank) -> R + Sync) -> Vec<R> {
        self.run_some(self.size, body)
    }

    fn rank(&self, transport: NcclTransport, device: Arc<FakeDevice>) -> Rank {
        let comm = Communicator::new(
            "world",
            Box::new(transport),
            Executor::Inline,
            self.timeout,
            &self.cancel,
        );
        let shared: Arc<dyn Device> = device;
        Rank {
            compute: shared.stream(),
            device: shared,
            comm,
        }
    }
}

/// One rank at work.
struct Rank {
    comm: Communicator,
    device: Arc<dyn Device>,
    compute: Stream,
}

impl Rank {
    fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// An arena with these elements.
    fn arena<T: Element>(&self, elements: &[T]) -> Arena {
        let spec = ArenaSpec::private("test", T::DTYPE, elements.len());
        let arena = self.device.alloc(&spec).unwrap();
        arena.whole().host_mut::<T>().unwrap().copy_from_slice(elements);
        arena
    }
}

fn read<T: Element>(buffer: &Buffer) -> Vec<T> {
    buffer.host::<T>().unwrap().to_vec()
}

fn launch(tag: &str) -> Launch {
    Launch::now(Traffic::Grads, tag)
}

fn done(work: &Work) {
    work.wait(deadline()).expect("the operation succeeds");
}

/// The error of an operation, in words and as a failure.
fn failure(work: &Work) -> (String, Failure) {
    match work.wait(deadline()) {
        Err(WorkError::Failed(error)) => (error.to_string(), error.failure),
        other => panic!("expected a failure, got {other:?}"),
    }
}

#[test]
fn golden_values() {
    let gathered = World::of(2, &[]).run(|rank| {
        let arena = rank.arena(&match rank.rank() {
            0 => [1.0_f32, 2.0, 0.0, 0.0],
            _ => [0.0, 0.0, 3.0, 4.0],
        });
        done(&rank.comm.all_gather(&arena.whole(), launch("golden")));
        let sum = rank.arena(&[[1.0_f32, 2.0], [3.0, 4.0]][rank.rank()]);
        done(&rank.comm.all_reduce(&sum.whole(), SUM, launch("golden")));
        (read::<f32>(&arena.whole()), read::<f32>(&sum.whole()))
    });
    assert_eq!(gathered, vec![(vec![1.0, 2.0, 3.0, 4.0], vec![4.0, 6.0]); 2]);
}

#[test]
fn every_type_with_a_fraction_has_sums() {
    let world = World::of(3, &[]);
    let results = world.run(|rank| {
        let own = (rank.rank() + 1) as f32;
        let single = rank.arena(&[own; 6]);
        done(&rank.comm.all_reduce(&single.whole(), SUM, launch("f32")));
        let double = rank.arena(&[f64::from(own); 6]);
        done(&rank.comm.all_reduce(&double.whole(), SUM, launch("f64")));
        let half = rank.arena(&[bf16::from_f32(own); 6]);
        let work = rank.comm.reduce_scatter(&half.whole(), SUM, launch("bf16"));
        done(&work);
        let mine = half.slice(2 * rank.rank()..2 * rank.rank() + 2);
        rank.comm.shutdown();
        (
            read::<f32>(&single.whole())[5],
            read::<f64>(&double.whole())[5],
            read::<bf16>(&mine)[1].to_f32(),
        )
    });
    assert_eq!(results, [(6.0, 6.0, 6.0); 3]);
    assert_eq!(world.fake.log().violations, Vec::<String>::new());
}

/// Gathers a slice a rank and takes the largest, of elements of one type.
fn gather_and_take_the_largest<T: Element>(rank: &Rank, [zero, one]: [T; 2]) {
    let own = |me| if me == rank.rank() { one } else { zero };
    let slices = rank.arena(&[own(0), own(0), own(1), own(1)]);
    done(&rank.comm.all_gather(&slices.whole(), launch("gather")));
    let largest = rank.arena(&[own(0), own(1), own(0)]);
    done(
        &rank
            .comm
            .all_reduce(&largest.whole(), ReduceOp::Max, launch("largest")),
    );
    for arena in [slices, largest] {
        let bytes = arena.whole().host_bytes().unwrap().to_vec();
        assert_eq!(bytes, bytemuck::bytes_of(&one).repeat(arena.whole().len()));
    }
}

#[test]
fn every_type_of_element_goes_by_its_number_in_nccls_header() {
    let world = World::of(2, &[]);
    world.run(|rank| {
        gather_and_take_the_largest(&rank, [0_u8, 1]);
        gather_and_take_the_largest(&rank, [0_i32, 1]);
        gather_and_take_the_largest(&rank, [0.0_f32, 1.0]);
        gather_and_take_the_largest(&rank, [0.0_f64, 1.0]);
        gather_and_take_the_largest(&rank, [bf16::ZERO, bf16::ONE]);
    });
    // `ncclUint8`, `ncclInt32`, `ncclFloat32`, `ncclFloat64`, `ncclBfloat16`.
    let numbers = [1, 2, 7, 8, 9];
    let expected = numbers.map(|number| {
        [
            ("ncclAllGather".to_owned(), number, 2),
            ("ncclAllReduce".to_owned(), number, 3),
        ]
    });
    assert_eq!(world.fake.asked(), expected.concat());
}

#[test]
fn every_operation_moves_its_elements_and_counts_its_bytes() {
    let world = World::of(4, &[]);
    let wire = world.run(|rank| {
        let (comm, me) = (&rank.comm, rank.rank());
        let slices = rank.arena(&[me as i32; 8]);
        done(&comm.all_gather(&slices.whole(), launch("gather")));
        assert_eq!(read::<i32>(&slices.whole()), [0, 0, 1, 1, 2, 2, 3, 3]);
        let largest = rank.arena(&[me as u8, 7 - me as u8, 1]);
        done(&comm.all_reduce(&largest.whole(), ReduceOp::Max, launch("largest")));
        assert_eq!(read::<u8>(&largest.whole()), [3, 7, 1]);
        for root in 0..4 {
            let from = rank.arena(&[me as f64; 3]);
            let launch = Launch::now(Traffic::Params, "initial");
            done(&comm.broadcast(&from.whole(), root, launch));
            assert_eq!(read::<f64>(&from.whole()), [root as f64; 3]);
        }
        let nothing = rank.arena::<f32>(&[]);
        done(&comm.barrier(&nothing.whole(), launch("barrier")));
        let token = rank.arena(&[me as f32]);
        let (next, before) = ((me + 1) % 4, (me + 3) % 4);
        let from_before = rank.arena(&[0.0_f32]);
        let other = || Launch::now(Traffic::Other, "ring");
        // On one stream a message waits for its receiver: the even ranks send first.
        let works = if me % 2 == 0 {
            [
                comm.send(&token.whole(), next, other()),
                comm.recv(&from_before.whole(), before, other()),
            ]
        } else {
            [
                comm.recv(&from_before.whole(), before, other()),
                comm.send(&token.whole(), next, other()),
            ]
        };
        works.iter().for_each(done);
        assert_eq!(read::<f32>(&from_before.whole()), [before as f32]);
        comm.wire_bytes()
    });
    for (rank, wire) in wire.into_iter().enumerate() {
        // 3/4 of 32 bytes gathered; of 3 bytes the first three ranks own one each.
        let grads = 24 + if rank < 3 { 2 * 3 } else { 0 };
        let expected = WireBytes {
            grads,
            params: 3 * 24,
            other: 4,
            ..WireBytes::default()
        };
        assert_eq!(wire, expected, "rank {rank}");
    }
}

#[test]
fn impossible_operations_are_refused_and_the_group_is_not_given_up() {
    let world = World::of(2, &[]);
    world.run(|rank| {
        let odd = rank.arena(&[1.0_f32; 3]);
        let work = rank.comm.all_gather(&odd.whole(), launch("odd"));
        let error = work.wait(deadline()).unwrap_err().to_string();
        assert!(
            error.contains("3 elements cannot be split into 2 equal slices"),
            "{error}"
        );
        // A refusal is a mistake of this program: all ranks make it, and the queue goes no further.
        let later = rank.comm.all_reduce(&odd.whole(), SUM, launch("later"));
        let error = later.wait(deadline()).unwrap_err().to_string();
        assert!(error.contains("an earlier operation failed"), "{error}");
    });
    assert_eq!(world.fake.log().aborted, 0);
}

/// Four ranks as a square: the groups of this rank's column and row.
fn two_by_two(rank: &Rank) -> [Communicator; 2] {
    let me = rank.rank();
    [("dp", [me % 2, me % 2 + 2]), ("tp", [me / 2 * 2, me / 2 * 2 + 1])]
        .map(|(name, members)| rank.comm.split(name, &members, Executor::Thread).unwrap())
}

#[test]
fn parts_are_communicators_of_their_own_and_a_part_of_one_needs_no_library() {
    let world = World::of(4, &[]);
    world.run(|rank| {
        let [dp, tp] = &two_by_two(&rank);
        let rows = rank.arena(&[1.0_f32 + rank.rank() as f32; 5]);
        let columns = rank.arena(&[10.0_f32 * (1 + rank.rank()) as f32; 5]);
        // Both in flight at once, in different streams.
        let works = [
            dp.all_reduce(&rows.whole(), SUM, launch("dp")),
            tp.all_reduce(&columns.whole(), SUM, launch("tp")),
        ];
        works.iter().for_each(done);
        assert_eq!(read::<f32>(&rows.whole()), [[4.0, 6.0][rank.rank() % 2]; 5]);
        assert_eq!(read::<f32>(&columns.whole()), [[30.0, 70.0][rank.rank() / 2]; 5]);
        assert_eq!(dp.members(), [[0, 2], [1, 3]][rank.rank() % 2]);
        let alone = rank
            .comm
            .split("alone", &[rank.rank()], Executor::Thread)
            .unwrap();
        let own = rank.arena(&[3.0_f32]);
        done(&alone.all_reduce(&own.whole(), ReduceOp::Sum, launch("alone")));
        assert_eq!(read::<f32>(&own.whole()), [3.0]);
        for comm in [dp, tp, &alone, &rank.comm] {
            comm.shutdown();
        }
    });
    let expected = Log {
        made: 12,
        destroyed: 12,
        ..Log::default()
    };
    assert_eq!(world.fake.log(), expected);
}

/// Whoever made them need not know them any more.
#[test]
fn parts_are_left_with_the_whole() {
    let world = World::of(4, &[]);
    world.run(|rank| {
        let [_dp, tp] = two_by_two(&rank);
        let gathering = tp.split("parameters", &[0, 1], Executor::Thread).unwrap();
        let arena = rank.arena(&[1.0_f32; 4]);
        done(&gathering.all_reduce(&arena.whole(), SUM, launch("layer")));
        rank.comm.shutdown();
        // Once is enough.
        rank.comm.shutdown();
    });
    let expected = Log {
        made: 16,
        destroyed: 16,
        ..Log::default()
    };
    assert_eq!(world.fake.log(), expected);
}

#[test]
fn a_part_must_be_ascending_and_have_this_rank() {
    World::of(2, &[]).run(|rank| {
        let wrong = if rank.rank() == 0 { [1, 0] } else { [0, 2] };
        let error = rank.comm.split("wrong", &wrong, Executor::Thread).err().unwrap();
        assert!(
            error
                .to_string()
                .contains("are not ascending ranks of this group"),
            "{error}"
        );
    });
}

/// The reducer does not know on what its communicator runs: gradients are still to be computed when they are
/// reported, and are averaged behind the events of their stream.
#[test]
fn gradients_are_summed_over_ranks_while_they_are_computed() {
    let specs = || vec![GradSpec::new("a", &[5000]), GradSpec::new("b", &[300])];
    let config = LayoutConfig {
        first_bucket_bytes: 4096,
        bucket_bytes: 16_384,
        dtype: DType::F32,
        ..LayoutConfig::new(4)
    };
    let order = [ParamId(1), ParamId(0)];
    let layout = Arc::new(GradientLayout::new(specs(), &order, &config).unwrap());
    let world = World::of(4, &[]);
    let sums = world.run(|rank| {
        let config = ReducerConfig::default();
        let mut reducer = Reducer::new(&rank.comm, &rank.device, layout.clone(), config).unwrap();
        let mut last = Vec::new();
        for round in 1..=3 {
            let mut step = reducer.step(1).unwrap();
            for id in order {
                let out = step.slot(id).unwrap().buffer;
                let value = (round * (rank.rank() + id.0)) as f64;
                rank.device.enqueue(rank.compute, Fill { out, value }.into());
                step.ready(id, rank.device.record(rank.compute)).unwrap();
            }
            let reduced = step.finish(deadline()).unwrap();
            last = (0..2)
                .map(|id| reduced.grad::<f32>(ParamId(id)).unwrap()[17])
                .collect();
        }
        rank.comm.shutdown();
        last
    });
    assert_eq!(sums, vec![vec![18.0, 30.0]; 4]);
    assert_eq!(world.fake.log().violations, Vec::<String>::new());
}
