//! What a tensor group does for blocks, on several ranks: exchanges of activations.

use std::sync::Barrier;
use std::time::Duration;

use crate::collective_world::{Rank, World, numbers};
use ddp_worker::collective::{Executor, Failure, Subgroup, WireBytes, WorkError};
use ddp_worker::device::{Buffer, Compute, DeviceError, Element};
use ddp_worker::model::{Activation, ExchangeKind, ExpertOps, GroupOps};
use ddp_worker::ops::{AddBiasResidual, Fill, Op};
use ddp_worker::parallel::RankGroup;

const WORLDS: [&[usize]; 6] = [&[1], &[2], &[3], &[4], &[1, 1], &[2, 2]];

/// A rank with its group and its compute stream.
struct Member {
    rank: Rank,
    group: RankGroup,
    compute: Compute,
}

impl Member {
    fn new(rank: Rank) -> Self {
        let compute = Compute::new(rank.device.clone());
        let group = RankGroup::new(rank.comm.clone(), &compute, false);
        Self { rank, group, compute }
    }

    fn index(&self) -> usize {
        self.group.index()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn with<T: Element>(&self, values: &[T]) -> Buffer {
        self.rank.arena(false, values).whole()
    }

    /// Nobody may read it before it is written.
    fn empty(&self, len: usize) -> Buffer {
        self.with(&vec![f32::NAN; len])
    }

    fn run(&self, op: impl Into<Op>) {
        self.compute.enqueue(op);
    }

    fn read(&self, buffer: &Buffer) -> Vec<f32> {
        self.compute.synchronize().unwrap();
        crate::collective_world::read(buffer)
    }

    /// This rank's rows of the sum, in the memory of the whole.
    fn reduce_scatter_rows(&self, whole: &Activation) -> Activation {
        let kind = ExchangeKind::ReduceScatterRows;
        let exchange = self.group.start(kind, whole, "partial sums").unwrap();
        self.group.finish(exchange).unwrap();
        self.group.own_rows(whole).unwrap()
    }
}

/// Runs `body` on every rank, with an executor of its own and without.
fn on_ranks<R: Send>(nodes: &[usize], body: impl Fn(Member) -> R + Sync) -> Vec<R> {
    World::of(nodes).run(Executor::Inline, |rank| body(Member::new(rank)));
    World::of(nodes).run(Executor::Thread, |rank| body(Member::new(rank)))
}

const ROWS: usize = 12;
const CHANNELS: usize = 5;

fn activation(buffer: &Buffer) -> Activation {
    Activation::borrowed(buffer.clone(), vec![2, ROWS / 2, CHANNELS])
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

/// Of all ranks, added in their order. On several nodes those of a node are added first.
fn sum_of(nodes: &[usize], len: usize) -> Vec<f32> {
    let add = |mut sum: Vec<f32>, own: Vec<f32>| {
        sum.iter_mut().zip(own).for_each(|(sum, x)| *sum += x);
        sum
    };
    let mut first = 0;
    let of_nodes = nodes.iter().map(|&ranks| {
        let members = first..first + ranks;
        first += ranks;
        members.map(|rank| numbers(rank, len)).reduce(add).unwrap()
    });
    of_nodes.collect::<Vec<_>>().into_iter().reduce(add).unwrap()
}

#[test]
fn rows_are_summed_scattered_and_gathered_in_rank_order() {
    for nodes in WORLDS {
        let expected = sum_of(nodes, ROWS * CHANNELS);
        on_ranks(nodes, |member| {
            let (group, index, own) = (&member.group, member.index(), ROWS / member.size());
            let values = numbers(index, ROWS * CHANNELS);
            let sum = member.with(&values);
            group.all_reduce(&activation(&sum), "sum").unwrap();
            assert_eq!(bits(&member.read(&sum)), bits(&expected), "{nodes:?}");

            let whole = activation(&member.with(&values));
            let rows = member.reduce_scatter_rows(&whole);
            assert_eq!(rows.shape(), [own, CHANNELS]);
            let elements = index * own * CHANNELS..(index + 1) * own * CHANNELS;
            assert_eq!(bits(&member.read(rows.buffer())), bits(&expected[elements]));

            // What the other rows hold now does not matter.
            group.gather_rows(&whole, "rows").unwrap();
            assert_eq!(bits(&member.read(whole.buffer())), bits(&expected));
        });
    }
}

#[test]
fn statistics_of_all_parts_are_gathered_in_rank_order() {
    let rows = 7;
    on_ranks(&[3], |member| {
        let of_rank = |rank| numbers(rank, rows * 3);
        let table = member.empty(3 * rows * 3);
        let table = Activation::borrowed(table, vec![3, rows, 3]);
        let own = member.group.own_rows(&table).unwrap();
        assert_eq!(own.shape(), [rows, 3]);
        crate::collective_world::fill(own.buffer(), &of_rank(member.index()));
        member.group.gather_rows(&table, "statistics").unwrap();
        let expected: Vec<f32> = (0..3).flat_map(of_rank).collect();
        assert_eq!(member.read(table.buffer()), expected);
    });
}

/// An all-reduce is 2(t−1)/t·A, and so are a gather and a reduction of own rows together. Which of them a layer needs is held to
/// the formulas in `plan/estimate_tests.rs`.
#[test]
fn a_ranks_bytes_are_those_of_the_formulas() {
    for ranks in [1, 2, 4] {
        let (t, a) = (ranks as u64, (4 * ROWS * CHANNELS) as u64);
        let counted = World::of(&[ranks]).run(Executor::Thread, |rank| {
            let member = Member::new(rank);
            let x = activation(&member.with(&[1.0_f32; ROWS * CHANNELS]));
            for _ in 0..4 {
                member.group.all_reduce(&x, "sum").unwrap();
            }
            member.read(x.buffer());
            let reduced = member.rank.comm.wire_bytes();
            for _ in 0..4 {
                member.group.gather_rows(&x, "rows").unwrap();
                member.reduce_scatter_rows(&x);
            }
            member.read(x.buffer());
            [reduced, member.rank.comm.wire_bytes() - reduced]
        });
        let expected = WireBytes {
            activations: 8 * (t - 1) * a / t,
            ..WireBytes::default()
        };
        assert_eq!(counted, vec![[expected; 2]; ranks], "{ranks} ranks");
    }
}

#[test]
fn what_is_computed_meanwhile_does_not_wait() {
    on_ranks(&[2], |member| {
        let (x, other) = (member.with(&[1.0_f32; 6]), member.empty(4));
        let shaped = Activation::borrowed(x.clone(), vec![2, 3]);
        let exchange = (member.group.start(ExchangeKind::AllReduce, &shaped, "sum")).unwrap();
        member.run(Fill {
            out: other.clone(),
            value: 7.0,
        });
        member.group.finish(exchange).unwrap();
        // Behind the sum.
        member.run(AddBiasResidual {
            inp: x.clone(),
            bias: Some(member.with(&[1.0_f32, 2.0, 3.0])),
            residual: None,
            out: x.clone(),
        });
        assert_eq!(member.read(&x), [3.0, 4.0, 5.0, 3.0, 4.0, 5.0]);
        assert_eq!(member.read(&other), [7.0; 4]);
        let times = member.group.tracker().take_times();
        assert!(times.comm > Duration::ZERO, "{times:?}");
    });
}

/// A rank and its ring, over links that carry operations out as `executor` says.
fn on_ring(rank: Rank, executor: Executor) -> Member {
    let mut member = Member::new(rank);
    let ranks: Vec<usize> = (0..member.size()).collect();
    let link = |name| {
        let links = Subgroup::new(name, ranks.clone());
        member.rank.comm.split(&links, executor).unwrap()
    };
    let links = [link("even"), link("odd")];
    member.group = RankGroup::new(member.rank.comm.clone(), &member.compute, false).with_ring(Some(links));
    member
}

/// Even where each operation ends before the call returns: then the neighbours must not all send first.
#[test]
fn what_goes_round_a_ring_comes_from_every_rank_in_turn() {
    for (executor, nodes) in [Executor::Inline, Executor::Thread]
        .into_iter()
        .flat_map(|executor| [&[2][..], &[3], &[4], &[5], &[2, 2]].map(|nodes| (executor, nodes)))
    {
        World::of(nodes).run(executor, |rank| {
            let member = on_ring(rank, executor);
            let (index, size) = (member.index(), member.size());
            let mut here = activation(&member.with(&numbers(index, ROWS * CHANNELS)));
            for step in 1..size {
                let received = activation(&member.empty(ROWS * CHANNELS));
                let exchanges = member.group.pass_on([&here, &received], "keys").unwrap();
                for exchange in exchanges {
                    member.group.finish(exchange).unwrap();
                }
                here = received;
                let expected = numbers((index + size - step) % size, ROWS * CHANNELS);
                assert_eq!(
                    bits(&member.read(here.buffer())),
                    bits(&expected),
                    "{nodes:?} {executor:?}"
                );
            }
        });
    }
}

/// The odd ranks begin only when the even ones have returned from the call.
#[test]
fn what_goes_round_a_ring_does_not_wait_for_the_next_rank() {
    let begun = Barrier::new(4);
    World::of(&[4]).run(Executor::Thread, |rank| {
        let member = on_ring(rank, Executor::Thread);
        let index = member.index();
        let [sent, received] =
            [index as f32, f32::NAN].map(|x| Activation::borrowed(member.with(&[x]), vec![1, 1]));
        let is_odd = index % 2 == 1;
        if is_odd {
            begun.wait();
        }
        let exchanges = member.group.pass_on([&sent, &received], "keys").unwrap();
        if !is_odd {
            begun.wait();
        }
        // What is sent can be read meanwhile.
        assert_eq!(member.read(sent.buffer()), [index as f32]);
        for exchange in exchanges {
            member.group.finish(exchange).unwrap();
        }
        assert_eq!(member.read(received.buffer()), [((index + 3) % 4) as f32]);
    });
}

#[test]
fn a_rank_that_leaves_a_ring_is_named_by_its_neighbours() {
    let world = World::of(&[3]);
    let failures = world.run(Executor::Thread, |rank| {
        let member = on_ring(rank, Executor::Thread);
        if member.index() == 1 {
            return None;
        }
        let [x, y] = [1, 2].map(|i| activation(&member.with(&numbers(i, ROWS * CHANNELS))));
        let exchanges = member.group.pass_on([&x, &y], "keys and values").unwrap();
        let outcome: Result<(), DeviceError> = exchanges
            .into_iter()
            .try_for_each(|exchange| member.group.finish(exchange).map(drop));
        outcome.unwrap_err();
        member.group.tracker().failure()
    });
    for (index, failure) in [0, 2].map(|index| (index, &failures[index])) {
        let Some(WorkError::Failed(error)) = failure else {
            panic!("{failure:?}");
        };
        assert_eq!(error.lost_rank(), Some(1), "rank {index}: {error}");
        assert!(error.to_string().contains("keys and values"), "{error}");
    }
}

#[test]
fn rows_that_the_ranks_cannot_share_are_refused_before_anything_moves() {
    let errors = World::of(&[3]).run(Executor::Thread, |rank| {
        let member = Member::new(rank);
        let x = Activation::borrowed(member.with(&[1.0_f32; 40]), vec![2, 4, 5]);
        let start = |kind| member.group.start(kind, &x, "rows").unwrap_err();
        let error = start(ExchangeKind::GatherRows);
        assert_eq!(error, start(ExchangeKind::ReduceScatterRows));
        assert_eq!(error, member.group.own_rows(&x).unwrap_err());
        // All elements are summed, however many rows there are.
        member.group.all_reduce(&x, "sum").unwrap();
        assert_eq!(member.read(x.buffer()), [3.0; 40]);
        assert_eq!(member.group.tracker().failure(), None);
        error
    });
    insta::assert_snapshot!(errors[2], @r"
    operation `rows of a tensor group`: 8 rows are not 3 equal parts
      hint: under sequence parallelism the positions of a micro-batch must be a multiple of the tensor group's ranks
    ");
}

/// Its rows would not fit into the memory for them.
#[test]
fn a_rank_that_wants_to_send_too_many_rows_to_experts_is_named() {
    let answers = on_ranks(&[2], |member| {
        let counts = if member.index() == 1 { [9, 1] } else { [2, 2] };
        let [counts, received] =
            [counts, [0, 0]].map(|rows: [i32; 2]| Activation::borrowed(member.with(&rows), vec![2, 1]));
        let counts = member.group.count([&counts, &received], [4, 4]);
        counts
            .map(|[_, received]| received)
            .map_err(|error| error.to_string())
    });
    assert_eq!(answers[1], Ok(vec![2, 1]));
    insta::assert_snapshot!(answers[0].as_ref().unwrap_err(), @"rank 1 wants to send [9] rows for experts, expected 4 at most");
}

#[test]
fn the_group_keeps_why_an_exchange_failed() {
    let world = World::of(&[2]);
    let failures = world.run(Executor::Thread, |rank| {
        let member = Member::new(rank);
        if member.index() == 1 {
            world.cancel.cancel("rank 1 has failed");
            return None;
        }
        let x = activation(&member.with(&[1.0_f32; ROWS * CHANNELS]));
        let error = member.group.all_reduce(&x, "output of attention").unwrap_err();
        assert!(matches!(error, DeviceError::Upstream(_)), "{error}");
        // Nothing more is started.
        let again = member
            .group
            .start(ExchangeKind::AllReduce, &x, "sum")
            .unwrap_err();
        assert_eq!(again, error);
        member.group.tracker().failure()
    });
    let [Some(WorkError::Failed(error)), None] = &failures[..] else {
        panic!("{failures:?}");
    };
    assert!(matches!(error.failure, Failure::GenerationOver(_)), "{error}");
    assert!(error.to_string().contains("output of attention"), "{error}");
}
