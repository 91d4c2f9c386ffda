//! What a tensor group does for blocks, on several ranks: exchanges of activations, and layers, an embedding and a loss
//! that are cut over the ranks and give the numbers of one.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::collective_world::{Rank, World, numbers};
use crate::train_support::deferred::DeferredDevice;
use ddp_worker::collective::{Executor, Failure, WireBytes, WorkError};
use ddp_worker::device::{Buffer, DeviceError, Element, Stream};
use ddp_worker::model::{Activation, ExchangeKind, TensorOps};
use ddp_worker::ops::{
    AddBiasResidual, CrossEntropy, CrossEntropyCombine, CrossEntropyPartial, EncoderForward, Fill,
    LinearDinp, LinearDweight, LinearForward, LinearShape, Op, TokenBackward, VocabularyPart, WeightLayout,
};
use ddp_worker::parallel::TensorGroup;

const WORLDS: [&[usize]; 6] = [&[1], &[2], &[3], &[4], &[1, 1], &[2, 2]];

/// A rank with its group and its compute stream.
struct Member {
    rank: Rank,
    group: TensorGroup,
    stream: Stream,
}

impl Member {
    fn new(rank: Rank) -> Self {
        let stream = rank.device.stream();
        let group = TensorGroup::new(rank.comm.clone(), (&rank.device, stream), false);
        Self { rank, group, stream }
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
        self.rank.device.enqueue(self.stream, op.into());
    }

    fn read(&self, buffer: &Buffer) -> Vec<f32> {
        self.rank.device.synchronize(self.stream).unwrap();
        crate::collective_world::read(buffer)
    }

    /// This rank's rows of the sum, in the memory of the whole.
    fn reduce_scatter_rows(&self, whole: &Activation) -> Activation {
        let kind = ExchangeKind::ReduceScatterRows;
        let exchange = self.group.start(kind, whole, "partial sums").unwrap();
        self.group.finish(exchange).unwrap();
        self.group.own_rows(whole).unwrap()
    }

    fn all_reduce(&self, buffer: &Buffer) {
        let shape = vec![buffer.len()];
        let x = Activation::borrowed(buffer.clone(), shape);
        self.group.all_reduce(&x, "partial sums").unwrap();
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
/// the formulas in `train/planning/estimate_tests.rs`.
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
            let reduced = member.group.wire_bytes();
            for _ in 0..4 {
                member.group.gather_rows(&x, "rows").unwrap();
                member.reduce_scatter_rows(&x);
            }
            member.read(x.buffer());
            [reduced, member.group.wire_bytes() - reduced]
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

/// Columns `own` of the rows of a matrix.
fn columns(matrix: &[f32], width: usize, own: &Range<usize>) -> Vec<f32> {
    let rows = matrix.chunks_exact(width);
    rows.flat_map(|row| row[own.clone()].to_vec()).collect()
}

fn small(seed: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| ((i * 37 + seed * 11) % 101) as f32 / 101.0 - 0.5)
        .collect()
}

fn assert_close(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let size = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let close = (found - expected).abs() <= 1e-5 * size;
        assert!(close, "{what}: element {i} is {found}, expected {expected}");
    }
}

const INPUTS: usize = 6;
const WIDE: usize = 24;

/// `out = x·up·down + bias + x`: a layer's two products, the first cut by columns, the second by rows. With `sequence`,
/// `x`, `out` and their gradients are this rank's rows of `[R, I]`.
struct TwoProducts<'a> {
    member: &'a Member,
    sequence: bool,
    /// Columns of `up` and rows of `down` that are this rank's.
    own: Range<usize>,
    up: Buffer,
    down: Buffer,
}

impl<'a> TwoProducts<'a> {
    fn new(member: &'a Member, sequence: bool) -> Self {
        let own = member.index() * WIDE / member.size()..(member.index() + 1) * WIDE / member.size();
        Self {
            sequence,
            up: member.with(&columns(&small(3, INPUTS * WIDE), WIDE, &own)),
            down: member.with(&small(4, WIDE * INPUTS)[own.start * INPUTS..own.end * INPUTS]),
            own,
            member,
        }
    }

    fn shape(&self, is_up: bool) -> LinearShape {
        let wide = self.own.len();
        let (inputs, outputs) = if is_up { (INPUTS, wide) } else { (wide, INPUTS) };
        LinearShape {
            rows: ROWS,
            inputs,
            outputs,
            layout: WeightLayout::InOut,
        }
    }

    fn stream(&self) -> Activation {
        Activation::borrowed(self.member.empty(ROWS * INPUTS), vec![ROWS, INPUTS])
    }

    /// All rows of what the ranks have of a stream, and what this rank has.
    fn gathered(&self, values: &[f32]) -> (Activation, Activation) {
        let whole = self.stream();
        if !self.sequence {
            crate::collective_world::fill(whole.buffer(), values);
            return (whole.clone(), whole);
        }
        let own = self.member.group.own_rows(&whole).unwrap();
        crate::collective_world::fill(
            own.buffer(),
            &values[own_rows(self.member.index(), self.member.size())],
        );
        self.member.group.gather_rows(&whole, "input").unwrap();
        (whole, own)
    }

    /// The sum of the ranks' partial products, of all rows or of its own.
    fn sum(&self, partial: &Activation) -> Activation {
        if self.sequence {
            return self.member.reduce_scatter_rows(partial);
        }
        self.member.group.all_reduce(partial, "output").unwrap();
        partial.clone()
    }

    fn add(&self, x: &Activation, bias: Option<Buffer>, residual: &Activation) -> Vec<f32> {
        self.member.run(AddBiasResidual {
            inp: x.buffer().clone(),
            bias,
            residual: Some(residual.buffer().clone()),
            out: x.buffer().clone(),
        });
        self.member.read(x.buffer())
    }

    /// The output; and for backward all rows of `x`, and what is between the products.
    fn forward(&self) -> (Vec<f32>, [Buffer; 2]) {
        let member = self.member;
        let (x, own_x) = self.gathered(&small(1, ROWS * INPUTS));
        let (between, partial) = (member.empty(ROWS * self.own.len()), self.stream());
        let product = |inp: &Buffer, weight: &Buffer, out: &Buffer, shape| {
            member.run(LinearForward {
                inp: inp.clone(),
                weight: weight.clone(),
                bias: None,
                residual: None,
                out: out.clone(),
                shape,
            });
        };
        product(x.buffer(), &self.up, &between, self.shape(true));
        product(&between, &self.down, partial.buffer(), self.shape(false));
        let out = self.sum(&partial);
        let out = self.add(&out, Some(member.with(&small(5, INPUTS))), &own_x);
        (out, [x.buffer().clone(), between])
    }

    /// Gradients of `x`, `up` and `down`.
    fn backward(&self, [x, between]: &[Buffer; 2]) -> [Vec<f32>; 3] {
        let member = self.member;
        let (dout, own_dout) = self.gathered(&small(2, ROWS * INPUTS));
        let (dbetween, partial) = (member.empty(between.len()), self.stream());
        let product = |dout: &Buffer, weight: &Buffer, dinp: &Buffer, shape| {
            member.run(LinearDinp {
                dout: dout.clone(),
                weight: weight.clone(),
                dinp: dinp.clone(),
                shape,
            });
        };
        product(dout.buffer(), &self.down, &dbetween, self.shape(false));
        product(&dbetween, &self.up, partial.buffer(), self.shape(true));
        let dweight = |inp: &Buffer, dout: &Buffer, shape| {
            let dweight = member.empty(self.up.len());
            member.run(LinearDweight {
                inp: inp.clone(),
                dout: dout.clone(),
                dweight: dweight.clone(),
                accumulate: false,
                shape,
            });
            member.read(&dweight)
        };
        let dup = dweight(x, &dbetween, self.shape(true));
        let ddown = dweight(between, dout.buffer(), self.shape(false));
        let dx = self.sum(&partial);
        [self.add(&dx, None, &own_dout), dup, ddown]
    }
}

/// Elements of the rows of one rank.
fn own_rows(index: usize, size: usize) -> Range<usize> {
    index * ROWS / size * INPUTS..(index + 1) * ROWS / size * INPUTS
}

/// The output of the layer, and the gradients of `x`, `up` and `down`.
fn both_ways(member: &Member, sequence: bool) -> [Vec<f32>; 4] {
    let layer = TwoProducts::new(member, sequence);
    let (out, kept) = layer.forward();
    let [dx, dup, ddown] = layer.backward(&kept);
    [out, dx, dup, ddown]
}

/// Megatron-LM's `test_mappings`, with the products that they are for.
#[test]
fn a_layer_cut_by_columns_and_rows_is_that_of_one_rank() {
    let alone = World::of(&[1]).run(Executor::Inline, |rank| both_ways(&Member::new(rank), false));
    let [out, dx, dup, ddown] = &alone[0];
    for nodes in [&[2][..], &[3], &[4], &[2, 2]] {
        for sequence in [false, true] {
            let what = format!("{nodes:?}, sequence parallelism {sequence}");
            let ranks =
                World::of(nodes).run(Executor::Thread, |rank| both_ways(&Member::new(rank), sequence));
            let size = ranks.len();
            for (index, [own_out, own_dx, own_dup, own_ddown]) in ranks.iter().enumerate() {
                let own = index * WIDE / size..(index + 1) * WIDE / size;
                let rows = if sequence {
                    own_rows(index, size)
                } else {
                    // All ranks have one sum.
                    assert_eq!(bits(own_out), bits(&ranks[0][0]), "{what}");
                    assert_eq!(bits(own_dx), bits(&ranks[0][1]), "{what}");
                    0..ROWS * INPUTS
                };
                assert_close(own_out, &out[rows.clone()], &what);
                assert_close(own_dx, &dx[rows], &what);
                assert_close(own_dup, &columns(dup, WIDE, &own), &what);
                assert_close(own_ddown, &ddown[own.start * INPUTS..own.end * INPUTS], &what);
            }
        }
    }
}

/// Nothing runs there before somebody waits for it: what reads a sum too early gets NaN, or an error with a name.
#[test]
fn a_device_that_puts_everything_off_gives_the_same_bits() {
    let deferred = |rank: Rank| {
        let device = Arc::new(DeferredDevice::new());
        Member::new(Rank { device, ..rank })
    };
    for executor in [Executor::Thread, Executor::Inline] {
        for sequence in [false, true] {
            let expected = World::of(&[3]).run(executor, |rank| both_ways(&Member::new(rank), sequence));
            let found = World::of(&[3]).run(executor, |rank| both_ways(&deferred(rank), sequence));
            assert!(found.iter().flatten().flatten().all(|x| x.is_finite()));
            assert_eq!(found, expected, "{executor:?}, sequence parallelism {sequence}");
        }
        let expected = World::of(&[3]).run(executor, |rank| embed_and_compare(&Member::new(rank)));
        let found = World::of(&[3]).run(executor, |rank| embed_and_compare(&deferred(rank)));
        assert_eq!(found, expected, "{executor:?}");
    }
}

const VOCAB: usize = 24;

/// Of the rows' logits, which become their gradients.
fn losses(member: &Member, logits: &Buffer, targets: Buffer, part: VocabularyPart) -> Buffer {
    let (size, losses) = (member.size(), member.empty(ROWS));
    let dlosses = Some(member.with(&small(8, ROWS)));
    if size == 1 {
        member.run(CrossEntropy {
            logits: logits.clone(),
            targets,
            losses: losses.clone(),
            dlosses,
        });
        return losses;
    }
    let statistics = Activation::borrowed(member.empty(size * ROWS * 3), vec![size, ROWS, 3]);
    member.run(CrossEntropyPartial {
        logits: logits.clone(),
        targets: targets.clone(),
        statistics: member.group.own_rows(&statistics).unwrap().buffer().clone(),
        part,
    });
    member.group.gather_rows(&statistics, "statistics").unwrap();
    member.run(CrossEntropyCombine {
        logits: logits.clone(),
        statistics: statistics.buffer().clone(),
        targets,
        losses: losses.clone(),
        dlosses,
        part,
    });
    losses
}

/// Embeds tokens, multiplies with the same table, and takes the loss: losses, and the gradient of the embedding's table.
fn embed_and_compare(member: &Member) -> [Vec<f32>; 2] {
    let (index, size) = (member.index(), member.size());
    let tokens: Vec<i32> = (0..ROWS as i32).map(|i| i * 5 % VOCAB as i32).collect();
    let target = |&token: &i32| {
        if token == 10 {
            -1
        } else {
            (token + 7) % VOCAB as i32
        }
    };
    let targets = member.with(&tokens.iter().map(target).collect::<Vec<i32>>());
    let tokens = member.with(&tokens);
    let part = VocabularyPart {
        first: index * VOCAB / size,
        held: VOCAB / size,
        whole: VOCAB,
    };
    let table = small(6, VOCAB * INPUTS);
    let table = member.with(&table[part.first * INPUTS..(part.first + part.held) * INPUTS]);
    let x = member.empty(ROWS * INPUTS);
    member.run(EncoderForward {
        tokens: tokens.clone(),
        wte: table.clone(),
        wpe: (index == 0).then(|| member.with(&small(7, ROWS * INPUTS))),
        out: x.clone(),
        positions: ROWS,
        part: Some(part),
    });
    member.all_reduce(&x);
    let shape = LinearShape {
        rows: ROWS,
        inputs: INPUTS,
        outputs: part.held,
        layout: WeightLayout::OutIn,
    };
    let logits = member.empty(ROWS * part.held);
    member.run(LinearForward {
        inp: x,
        weight: table.clone(),
        bias: None,
        residual: None,
        out: logits.clone(),
        shape,
    });
    let losses = losses(member, &logits, targets, part);
    let dx = member.empty(ROWS * INPUTS);
    member.run(LinearDinp {
        dout: logits,
        weight: table,
        dinp: dx.clone(),
        shape,
    });
    member.all_reduce(&dx);
    let dtable = member.empty(part.held * INPUTS);
    member.run(TokenBackward {
        tokens,
        dout: dx,
        dwte: dtable.clone(),
        accumulate: false,
        part: Some(part),
    });
    [member.read(&losses), member.read(&dtable)]
}

/// Megatron-LM's `test_vocab_parallel_cross_entropy`, with an embedding before it.
#[test]
fn an_embedding_and_a_loss_by_parts_of_the_vocabulary_are_those_of_one_rank() {
    let alone = World::of(&[1]).run(Executor::Inline, |rank| embed_and_compare(&Member::new(rank)));
    let [losses, dtable] = &alone[0];
    for nodes in [&[2][..], &[3], &[4], &[2, 2]] {
        let ranks = on_ranks(nodes, |member| embed_and_compare(&member));
        for (index, [found, own]) in ranks.iter().enumerate() {
            assert_eq!(
                bits(found),
                bits(&ranks[0][0]),
                "{nodes:?}: all ranks have one loss"
            );
            assert_close(found, losses, &format!("losses, {nodes:?}"));
            let held = VOCAB / ranks.len() * INPUTS;
            assert_close(own, &dtable[index * held..(index + 1) * held], "gradient");
        }
    }
}
