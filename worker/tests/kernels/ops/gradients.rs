//! Every operation's backward against finite differences, in f64.

use ddp_worker::device::{Buffer, DType};
use ddp_worker::ops::{
    AttentionBackward, AttentionForward, AttentionShape, ColumnSum, CrossEntropy, DropoutMask,
    EncoderForward, LinearDweight, LinearForward, LinearShape, NormBackward, NormForward, PositionBackward,
    TokenBackward, WeightLayout,
};

use super::rig::{Rig, assert_close, check_gradients, numbers, values};

fn buffers(rig: &Rig, inputs: &[Vec<f64>]) -> Vec<Buffer> {
    inputs.iter().map(|x| rig.buffer(x)).collect()
}

/// Larger than a tile in both directions, against sums written out.
#[test]
fn linear_over_several_tiles_is_a_sum_of_products() {
    let (rows, inputs, outputs) = (530, 70, 330);
    let (x, w) = (numbers(1, rows * inputs), numbers(2, inputs * outputs));
    let rig = Rig::new();
    for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
        let out = rig.empty(DType::F64, rows * outputs);
        rig.run(LinearForward {
            inp: rig.buffer(&x),
            weight: rig.buffer(&w),
            bias: None,
            residual: None,
            out: out.clone(),
            exact: false,
            shape: LinearShape {
                rows,
                inputs,
                outputs,
                layout,
            },
        });
        let out = values::<f64>(&out);
        for (r, o) in [(0, 0), (255, 63), (256, 64), (529, 329), (300, 200)] {
            let weight = |i: usize| match layout {
                WeightLayout::InOut => w[i * outputs + o],
                WeightLayout::OutIn => w[o * inputs + i],
            };
            let expected: f64 = (0..inputs).map(|i| x[r * inputs + i] * weight(i)).sum();
            assert_close(
                out[r * outputs + o],
                expected,
                1e-12,
                &format!("({r}, {o}) {layout:?}"),
            );
        }
    }
}

#[test]
fn accumulation_adds_to_what_is_there() {
    let rig = Rig::new();
    let shape = LinearShape {
        rows: 4,
        inputs: 3,
        outputs: 2,
        layout: WeightLayout::InOut,
    };
    let (inp, dout) = (rig.buffer(&numbers(1, 12)), rig.buffer(&numbers(2, 8)));
    let run = |start: f64, accumulate| {
        let (dweight, dbias) = (rig.buffer(&[start; 6]), rig.buffer(&[start; 2]));
        rig.run(LinearDweight {
            inp: inp.clone(),
            dout: dout.clone(),
            dweight: dweight.clone(),
            accumulate,
            shape,
        });
        rig.run(ColumnSum {
            x: dout.clone(),
            out: dbias.clone(),
            accumulate,
        });
        [values::<f64>(&dweight), values(&dbias)].concat()
    };
    for (fresh, added) in run(7.0, false).iter().zip(run(7.0, true)) {
        assert_close(added, fresh + 7.0, 1e-14, "accumulated");
    }
}

/// Layer normalisation, and without a bias that by the root mean square.
#[test]
fn layernorm_and_rmsnorm() {
    // More rows than one part of the work has, and channels that do not fill the lanes. ε that is seen.
    let (rows, channels, epsilon) = (35, 5, 0.1);
    let rig = Rig::new();
    for has_bias in [true, false] {
        let mut inputs = vec![numbers(1, rows * channels), numbers(2, channels)];
        inputs.extend(has_bias.then(|| numbers(3, channels)));
        let forward = |inputs: &[Vec<f64>]| {
            let b = buffers(&rig, inputs);
            let out = rig.empty(DType::F64, rows * channels);
            rig.run(NormForward {
                inp: b[0].clone(),
                weight: b[1].clone(),
                bias: b.get(2).cloned(),
                out: out.clone(),
                epsilon,
            });
            values(&out)
        };
        let run_backward = |inputs: &[Vec<f64>], dout: &[f64], start: f64, accumulate| {
            let b = buffers(&rig, inputs);
            let gradients: Vec<_> = inputs.iter().map(|x| rig.buffer(&vec![start; x.len()])).collect();
            rig.run(NormBackward {
                dout: rig.buffer(dout),
                inp: b[0].clone(),
                weight: b[1].clone(),
                dinp: gradients[0].clone(),
                dweight: gradients[1].clone(),
                dbias: gradients.get(2).cloned(),
                epsilon,
                accumulate_dinp: accumulate,
                accumulate_dweight: accumulate,
                accumulate_dbias: accumulate,
            });
            gradients.iter().map(values).collect::<Vec<Vec<f64>>>()
        };
        check_gradients(&inputs, forward, |inputs, dout| {
            run_backward(inputs, dout, 7.0, false)
        });
        let dout = numbers(4, rows * channels);
        let fresh = run_backward(&inputs, &dout, 7.0, false).concat();
        let added = run_backward(&inputs, &dout, 3.0, true).concat();
        for (fresh, added) in fresh.iter().zip(added) {
            assert_close(added, fresh + 3.0, 1e-14, "accumulated");
        }
    }
}

#[test]
fn attention() {
    attention_gradients(2, None);
}

#[test]
fn attention_with_dropout() {
    attention_gradients(2, Some(DropoutMask::new(3, 1, 1, 17, 0.3)));
}

#[test]
fn attention_whose_heads_share_keys_and_values() {
    attention_gradients(1, Some(DropoutMask::new(3, 1, 1, 17, 0.3)));
}

fn attention_gradients(kv_heads: usize, dropout: Option<DropoutMask>) {
    // Two tiles of queries, the second one short.
    let shape = AttentionShape {
        batch: 2,
        positions: 67,
        heads: 2,
        kv_heads,
        head_size: 3,
    };
    let (rows, channels) = (shape.rows(), shape.channels());
    let rig = Rig::new();
    let inputs = [numbers(1, rows * shape.qkv_channels())
        .iter()
        .map(|x| 2.0 * x)
        .collect::<Vec<_>>()];
    let run_forward = |qkv: &[f64]| {
        let (out, lse) = (
            rig.empty(DType::F64, rows * channels),
            rig.empty(DType::F64, rows * 2),
        );
        let qkv = rig.buffer(qkv);
        rig.run(AttentionForward {
            qkv: shape.views(&qkv),
            out: out.clone(),
            lse: lse.clone(),
            shape,
            dropout,
        });
        [qkv, out, lse]
    };
    let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
        let [qkv, out, lse] = run_forward(&inputs[0]);
        let dqkv = rig.empty(DType::F64, rows * shape.qkv_channels());
        rig.run(AttentionBackward {
            forward: AttentionForward {
                qkv: shape.views(&qkv),
                out,
                lse,
                shape,
                dropout,
            },
            dout: rig.buffer(dout),
            dqkv: shape.views(&dqkv),
            accumulate: false,
        });
        vec![values(&dqkv)]
    };
    check_gradients(&inputs, |inputs| values(&run_forward(&inputs[0])[1]), backward);
}

#[test]
fn cross_entropy() {
    let (rows, vocab) = (18, 5);
    let rig = Rig::new();
    // Every seventh target is ignored.
    let targets: Vec<i32> = (0..rows as i32)
        .map(|i| if i % 7 == 3 { -1 } else { i % 5 })
        .collect();
    let inputs = [numbers(1, rows * vocab)
        .iter()
        .map(|x| 3.0 * x)
        .collect::<Vec<_>>()];
    let run = |logits: &[f64], dlosses: Option<&[f64]>| {
        let (logits, losses) = (rig.buffer(logits), rig.empty(DType::F64, rows));
        rig.run(CrossEntropy {
            logits: logits.clone(),
            targets: rig.buffer(&targets),
            losses: losses.clone(),
            dlosses: dlosses.map(|factors| rig.buffer(factors)),
        });
        [values(&logits), values(&losses)]
    };
    let [logits, losses] = run(&inputs[0], None);
    assert_eq!(logits, inputs[0], "only read");
    assert!(
        targets
            .iter()
            .zip(&losses)
            .all(|(&t, &loss)| (t < 0) == (loss == 0.0))
    );
    let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
        let [dlogits, with_gradient] = run(&inputs[0], Some(dout));
        assert_eq!(with_gradient, losses, "the same loss in training and validation");
        vec![dlogits]
    };
    let forward = |inputs: &[Vec<f64>]| {
        let [_, losses] = run(&inputs[0], None);
        losses
    };
    check_gradients(&inputs, forward, backward);
}

/// By hand: two samples of the positions 1, 2 and 4, 5, on a rank that has these of them.
#[test]
fn positions_of_two_stretches() {
    let rig = Rig::new();
    let dwpe = rig.buffer(&[9.0; 7]);
    let mut backward = PositionBackward {
        dout: rig.buffer(&[1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0]),
        dwpe: dwpe.clone(),
        accumulate: false,
        first: 1,
        second: Some(4),
        positions: 2,
        channels: 1,
    };
    rig.run(backward.clone());
    assert_eq!(values::<f64>(&dwpe), [0.0, 11.0, 22.0, 0.0, 33.0, 44.0, 0.0]);
    (backward.accumulate, backward.second) = (true, Some(6));
    rig.try_run(backward).unwrap_err();
}

#[test]
fn embeddings() {
    // More channels than one part of the work has; a token that repeats, a position that is not reached.
    let (batch, positions, channels, vocab) = (2, 3, 70, 4);
    let rig = Rig::new();
    let tokens = rig.buffer::<i32>(&[1, 3, 1, 0, 1, 3]);
    let inputs = [
        numbers(1, vocab * channels),
        numbers(2, (positions + 1) * channels),
    ];
    let forward = |inputs: &[Vec<f64>]| {
        let b = buffers(&rig, inputs);
        let out = rig.empty(DType::F64, batch * positions * channels);
        rig.run(EncoderForward {
            tokens: tokens.clone(),
            wte: b[0].clone(),
            wpe: Some(b[1].clone()),
            out: out.clone(),
            positions,
            part: None,
        });
        values(&out)
    };
    let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
        // What is there must be overwritten.
        let grads = buffers(&rig, inputs);
        let dout = rig.buffer(dout);
        let (tokens, dwte, dwpe) = (tokens.clone(), grads[0].clone(), grads[1].clone());
        rig.run(TokenBackward {
            tokens,
            dout: dout.clone(),
            dwte,
            accumulate: false,
            part: None,
        });
        rig.run(PositionBackward {
            dout,
            dwpe,
            accumulate: false,
            first: 0,
            second: None,
            positions,
            channels,
        });
        grads.iter().map(values).collect()
    };
    check_gradients(&inputs, forward, backward);
}
