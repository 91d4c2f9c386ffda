//! Synchronised batch normalisation: the numbers of one rank that has all rows.

use std::ops::Range;

use crate::collective_world::{Rank, World, read};
use ddp_worker::collective::Executor;
use ddp_worker::device::{ArenaSpec, Buffer, Compute, DType};
use ddp_worker::ops::{BatchNormBackwardSums, BatchNormForward};
use ddp_worker::parallel::SyncBatchNorm;

const CHANNELS: usize = 5;
const ROWS: usize = 12;
const WEIGHT: [f64; CHANNELS] = [1.0, 0.5, -2.0, 3.0, 1.5];
const BIAS: [f64; CHANNELS] = [0.0, 1.0, 2.0, 3.0, 4.0];

/// Rows of the input, some columns of it far from zero.
fn inputs(rows: Range<usize>) -> Vec<f64> {
    let number = |i: usize| (i * 31 % 23) as f64 / 7.0 + 40.0 * (i % CHANNELS) as f64;
    (rows.start * CHANNELS..rows.end * CHANNELS).map(number).collect()
}

/// Rows of the output's gradient.
fn douts(rows: Range<usize>) -> Vec<f64> {
    let number = |i: usize| (i * 13 % 29) as f64 / 9.0 - 1.5;
    (rows.start * CHANNELS..rows.end * CHANNELS).map(number).collect()
}

/// What a rank gets for its rows.
#[derive(Clone, Debug, Default)]
struct Results {
    out: Vec<f64>,
    dinp: Vec<f64>,
    dweight: Vec<f64>,
    dbias: Vec<f64>,
    sums: Vec<f64>,
}

fn buffer(rank: &Rank, values: &[f64]) -> Buffer {
    rank.arena(false, values).whole()
}

fn empty(rank: &Rank, len: usize) -> Buffer {
    rank.device
        .alloc(&ArenaSpec::private("test", DType::F64, len))
        .unwrap()
        .whole()
}

/// Forward and backward of the rows of one rank; the gradient of the weight on top of ones.
fn normalise(rank: &Rank, inputs: &[f64], douts: &[f64]) -> Results {
    let compute = Compute::new(rank.device.clone());
    let norm = SyncBatchNorm {
        comm: &rank.comm,
        compute: &compute,
    };
    let (inp, weight) = (buffer(rank, inputs), buffer(rank, &WEIGHT));
    let [out, dinp] = [(); 2].map(|()| empty(rank, inputs.len()));
    let sums = empty(rank, 2 * CHANNELS + 1);
    let forward = BatchNormForward {
        inp: inp.clone(),
        sums: sums.clone(),
        weight: weight.clone(),
        bias: buffer(rank, &BIAS),
        out: out.clone(),
    };
    norm.forward(forward).unwrap();
    let [dweight, dbias] = [(); 2].map(|()| buffer(rank, &[1.0; CHANNELS]));
    let backward = BatchNormBackwardSums {
        dout: buffer(rank, douts),
        inp,
        sums: sums.clone(),
        dsums: empty(rank, 2 * CHANNELS),
        dweight: dweight.clone(),
        dbias: dbias.clone(),
        accumulate_dweight: true,
        accumulate_dbias: false,
    };
    norm.backward(backward, weight, dinp.clone()).unwrap();
    compute.synchronize().unwrap();
    Results {
        out: read(&out),
        dinp: read(&dinp),
        dweight: read::<f64>(&dweight).iter().map(|x| x - 1.0).collect(),
        dbias: read(&dbias),
        sums: read(&sums),
    }
}

/// All rows, cut over the ranks; gradients of the parameters summed over them.
fn over(shares: &[usize]) -> Results {
    let results = World::of(&[shares.len()]).run(Executor::Thread, |rank| {
        let start: usize = shares[..rank.rank()].iter().sum();
        let rows = start..start + shares[rank.rank()];
        normalise(&rank, &inputs(rows.clone()), &douts(rows))
    });
    let mut all = Results {
        dweight: vec![0.0; CHANNELS],
        dbias: vec![0.0; CHANNELS],
        sums: results[0].sums.clone(),
        ..Results::default()
    };
    for result in results {
        assert_eq!(all.sums, result.sums, "all ranks have the same bits");
        all.out.extend(result.out);
        all.dinp.extend(result.dinp);
        for (sums, own) in [(&mut all.dweight, result.dweight), (&mut all.dbias, result.dbias)] {
            sums.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
        }
    }
    all
}

fn assert_close(one: &[f64], other: &[f64], what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for (i, (one, other)) in one.iter().zip(other).enumerate() {
        assert!((one - other).abs() < 1e-9, "{what} {i}: {one} {other}");
    }
}

#[test]
fn rows_of_several_ranks_are_normalised_as_those_of_one() {
    let alone = over(&[ROWS]);
    assert_eq!(alone.sums[2 * CHANNELS], ROWS as f64);
    for shares in [&[6, 6][..], &[11, 1], &[3, 3, 3, 3], &[5, 0, 1, 6]] {
        let found = over(shares);
        let what = |name: &str| format!("{name}, {shares:?}");
        assert_close(&alone.out, &found.out, &what("out"));
        assert_close(&alone.dinp, &found.dinp, &what("dinp"));
        assert_close(&alone.dweight, &found.dweight, &what("dweight"));
        assert_close(&alone.dbias, &found.dbias, &what("dbias"));
    }
}

#[test]
fn columns_have_the_mean_of_the_bias_and_the_deviation_of_the_weight() {
    let out = over(&[4, 8]).out;
    for c in 0..CHANNELS {
        let column: Vec<f64> = out.iter().skip(c).step_by(CHANNELS).copied().collect();
        let mean = column.iter().sum::<f64>() / ROWS as f64;
        let squares = column.iter().map(|x| (x - mean) * (x - mean));
        let deviation = (squares.sum::<f64>() / ROWS as f64).sqrt();
        assert!((mean - BIAS[c]).abs() < 1e-9, "column {c}: mean {mean}");
        assert!(
            (deviation - WEIGHT[c].abs()).abs() < 1e-4,
            "column {c}: deviation {deviation}"
        );
    }
}

/// `Σ dout · out` is what the gradients are of.
#[test]
fn the_gradient_is_that_of_small_changes() {
    const STEP: f64 = 1e-5;
    let (inputs, douts) = (inputs(0..ROWS), douts(0..ROWS));
    let run = |inputs: &[f64]| {
        let mut results = World::of(&[1]).run(Executor::Inline, |rank| normalise(&rank, inputs, &douts));
        let result = results.remove(0);
        let loss: f64 = result.out.iter().zip(&douts).map(|(out, dout)| out * dout).sum();
        (loss, result)
    };
    let (_, results) = run(&inputs);
    for at in [0, 7, 23, 41, 59] {
        let changed = |by: f64| {
            let mut inputs = inputs.clone();
            inputs[at] += by;
            run(&inputs).0
        };
        let slope = (changed(STEP) - changed(-STEP)) / (2.0 * STEP);
        let error = (slope - results.dinp[at]).abs();
        assert!(
            error < 1e-6 * slope.abs().max(1.0),
            "element {at}: {slope} {}",
            results.dinp[at]
        );
    }
}
