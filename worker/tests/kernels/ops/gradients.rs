//! Every operation's backward against finite differences, in f64.

use ddp_worker::config::RopeScaling;
use ddp_worker::device::{Buffer, DType};
use ddp_worker::ops::{
    AddBiasResidual, AttentionBackward, AttentionForward, AttentionShape, ColumnSum, CrossEntropy,
    CrossEntropyCombine, CrossEntropyPartial, Dropout, DropoutMask, EncoderForward, GeluBackward,
    GeluForward, LinearDinp, LinearDweight, LinearForward, LinearShape, NormBackward, NormForward,
    PositionBackward, Rotary, RotaryEmbedding, SwigluBackward, SwigluForward, TokenBackward, VocabularyPart,
    WeightLayout,
};

use super::rig::{Rig, assert_close, check_gradients, numbers, values};

fn buffers(rig: &Rig, inputs: &[Vec<f64>]) -> Vec<Buffer> {
    inputs.iter().map(|x| rig.buffer(x)).collect()
}

#[test]
fn linear() {
    for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
        let rig = Rig::new();
        let shape = LinearShape {
            rows: 5,
            inputs: 7,
            outputs: 3,
            layout,
        };
        let inputs = [numbers(1, 35), numbers(2, 21), numbers(3, 3), numbers(4, 15)];
        let forward = |inputs: &[Vec<f64>]| {
            let b = buffers(&rig, inputs);
            let out = rig.empty(DType::F64, 15);
            rig.run(LinearForward {
                inp: b[0].clone(),
                weight: b[1].clone(),
                bias: Some(b[2].clone()),
                residual: Some(b[3].clone()),
                out: out.clone(),
                shape,
            });
            values(&out)
        };
        let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
            let b = buffers(&rig, inputs);
            let dout = rig.buffer(dout);
            let [dinp, dweight, dbias] = [35, 21, 3].map(|n| rig.empty(DType::F64, n));
            rig.run(LinearDinp {
                dout: dout.clone(),
                weight: b[1].clone(),
                dinp: dinp.clone(),
                shape,
            });
            rig.run(LinearDweight {
                inp: b[0].clone(),
                dout: dout.clone(),
                dweight: dweight.clone(),
                accumulate: false,
                shape,
            });
            rig.run(ColumnSum {
                x: dout.clone(),
                out: dbias.clone(),
                accumulate: false,
            });
            [dinp, dweight, dbias, dout].iter().map(values).collect()
        };
        check_gradients(&inputs, forward, backward);
    }
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
fn gelu() {
    let rig = Rig::new();
    let inputs = [numbers(1, 67).iter().map(|x| 4.0 * x).collect::<Vec<_>>()];
    let forward = |inputs: &[Vec<f64>]| {
        let out = rig.empty(DType::F64, inputs[0].len());
        rig.run(GeluForward {
            inp: rig.buffer(&inputs[0]),
            out: out.clone(),
        });
        values(&out)
    };
    let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
        let (inp_out, dout_dinp) = (rig.buffer(&inputs[0]), rig.buffer(dout));
        rig.run(GeluBackward {
            inp_out: inp_out.clone(),
            dout_dinp: dout_dinp.clone(),
            makes_out: true,
        });
        assert_eq!(values::<f64>(&inp_out), forward(inputs), "the output once more");
        vec![values(&dout_dinp)]
    };
    check_gradients(&inputs, forward, backward);
}

#[test]
fn swiglu() {
    let (rows, channels) = (7, 11);
    let rig = Rig::new();
    let inputs = [numbers(1, rows * 2 * channels)
        .iter()
        .map(|x| 4.0 * x)
        .collect::<Vec<_>>()];
    let forward = |inputs: &[Vec<f64>]| {
        let out = rig.empty(DType::F64, rows * channels);
        rig.run(SwigluForward {
            inp: rig.buffer(&inputs[0]),
            out: out.clone(),
            channels,
        });
        values(&out)
    };
    let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
        let (inp_dinp, dout_out) = (rig.buffer(&inputs[0]), rig.buffer(dout));
        rig.run(SwigluBackward {
            inp_dinp: inp_dinp.clone(),
            dout_out: dout_out.clone(),
            channels,
        });
        assert_eq!(values::<f64>(&dout_out), forward(inputs), "the output once more");
        vec![values(&inp_dinp)]
    };
    check_gradients(&inputs, forward, backward);
    for (row, out) in inputs[0]
        .chunks(2 * channels)
        .zip(forward(&inputs).chunks(channels))
    {
        for (i, out) in out.iter().enumerate() {
            let (gate, up) = (row[i], row[channels + i]);
            assert_close(
                *out,
                gate / (1.0 + (-gate).exp()) * up,
                1e-14,
                "gate first, then up",
            );
        }
    }
}

#[test]
fn rotary() {
    let shape = AttentionShape {
        batch: 2,
        positions: 5,
        heads: 4,
        kv_heads: 2,
        head_size: 6,
    };
    let embedding = RotaryEmbedding {
        base: 50.0,
        scaling: Some(RopeScaling {
            factor: 4.0,
            low_freq_factor: 1.0,
            high_freq_factor: 2.0,
            original_positions: 40,
        }),
    };
    let rig = Rig::new();
    let inputs = [numbers(1, shape.rows() * shape.qkv_channels())];
    let forward = |inputs: &[Vec<f64>]| {
        let qkv = rig.buffer(&inputs[0]);
        rig.run(Rotary {
            qkv: qkv.clone(),
            shape,
            embedding,
            first_position: 3,
            backward: false,
        });
        values(&qkv)
    };
    let backward = |_: &[Vec<f64>], dout: &[f64]| {
        let dqkv = rig.buffer(dout);
        rig.run(Rotary {
            qkv: dqkv.clone(),
            shape,
            embedding,
            first_position: 3,
            backward: true,
        });
        vec![values(&dqkv)]
    };
    check_gradients(&inputs, forward, backward);
}

#[test]
fn attention() {
    attention_gradients(2, None);
}

#[test]
fn attention_with_dropout() {
    attention_gradients(2, Some(DropoutMask::new(3, [1, 1], 17, 0.3)));
}

#[test]
fn attention_whose_heads_share_keys_and_values() {
    attention_gradients(1, Some(DropoutMask::new(3, [1, 1], 17, 0.3)));
}

#[test]
fn dropout() {
    let (positions, channels) = (7, 10);
    let rig = Rig::new();
    let inputs = [numbers(1, 3 * 70), numbers(2, 3 * 70)];
    let run = |inp: &[f64], residual: Option<&[f64]>| {
        let out = rig.empty(DType::F64, inp.len());
        rig.run(Dropout {
            inp: rig.buffer(inp),
            residual: residual.map(|residual| rig.buffer(residual)),
            out: out.clone(),
            mask: DropoutMask::new(5, [2, 3], 11, 0.4),
            positions,
            channels,
        });
        values(&out)
    };
    check_gradients(
        &inputs,
        |inputs| run(&inputs[0], Some(&inputs[1])),
        |_, dout| vec![run(dout, None), dout.to_vec()],
    );
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
            qkv: qkv.clone(),
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
            qkv,
            out,
            lse,
            dout: rig.buffer(dout),
            dqkv: dqkv.clone(),
            shape,
            dropout,
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
            positions,
            channels,
        });
        grads.iter().map(values).collect()
    };
    check_gradients(&inputs, forward, backward);
}

/// Three ranks hold a part of the logits each.
#[test]
fn vocabulary_parallel_cross_entropy() {
    let (rows, whole) = (6, 7);
    let parts = [(0, 2), (2, 1), (3, 4)].map(|(first, held)| VocabularyPart { first, held, whole });
    let rig = Rig::new();
    let targets = rig.buffer::<i32>(&[0, 6, -1, 2, 3, 1]);
    let inputs = parts.map(|part| numbers(1 + part.first as u64, rows * part.held));
    let run = |logits: &[Vec<f64>], dlosses: Option<&[f64]>| {
        let logits = buffers(&rig, logits);
        let statistics = rig.empty(DType::F64, parts.len() * rows * 3);
        for (rank, part) in parts.into_iter().enumerate() {
            rig.run(CrossEntropyPartial {
                logits: logits[rank].clone(),
                targets: targets.clone(),
                statistics: statistics.slice(3 * rows * rank..3 * rows * (rank + 1)),
                part,
            });
        }
        let losses = rig.empty(DType::F64, rows);
        for (rank, part) in parts.into_iter().enumerate() {
            rig.run(CrossEntropyCombine {
                logits: logits[rank].clone(),
                statistics: statistics.clone(),
                targets: targets.clone(),
                losses: losses.clone(),
                dlosses: dlosses.map(|factors| rig.buffer(factors)),
                part,
            });
        }
        (values(&losses), logits.iter().map(values).collect())
    };
    check_gradients(
        &inputs,
        |inputs| run(inputs, None).0,
        |inputs, dout| run(inputs, Some(dout)).1,
    );
}

/// Two ranks look up the tokens that they hold, and their results are added.
#[test]
fn vocabulary_parallel_embedding() {
    let (rows, channels, whole) = (6, 3, 5);
    let parts = [(0, 2), (2, 3)].map(|(first, held)| VocabularyPart { first, held, whole });
    let rig = Rig::new();
    let tokens = rig.buffer::<i32>(&[1, 3, 1, 0, 4, 3]);
    let inputs = parts.map(|part| numbers(1 + part.first as u64, part.held * channels));
    let forward = |inputs: &[Vec<f64>]| {
        let of_rank = |(part, wte): (VocabularyPart, &Vec<f64>)| {
            let out = rig.empty(DType::F64, rows * channels);
            rig.run(EncoderForward {
                tokens: tokens.clone(),
                wte: rig.buffer(wte),
                wpe: None,
                out: out.clone(),
                positions: rows,
                part: Some(part),
            });
            values::<f64>(&out)
        };
        let ranks = parts.into_iter().zip(inputs).map(of_rank);
        let sum = ranks.reduce(|sum, own| sum.iter().zip(own).map(|(a, b)| a + b).collect());
        sum.unwrap()
    };
    let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
        let of_rank = |(part, wte): (VocabularyPart, &Vec<f64>)| {
            // What is there must be overwritten.
            let dwte = rig.buffer(wte);
            rig.run(TokenBackward {
                tokens: tokens.clone(),
                dout: rig.buffer(dout),
                dwte: dwte.clone(),
                accumulate: false,
                part: Some(part),
            });
            values(&dwte)
        };
        parts.into_iter().zip(inputs).map(of_rank).collect()
    };
    check_gradients(&inputs, forward, backward);
}

#[test]
fn add_bias_residual() {
    let (rows, columns) = (7, 5);
    let rig = Rig::new();
    let inputs = [
        numbers(1, rows * columns),
        numbers(2, columns),
        numbers(3, rows * columns),
    ];
    let forward = |inputs: &[Vec<f64>]| {
        let b = buffers(&rig, inputs);
        rig.run(AddBiasResidual {
            inp: b[0].clone(),
            bias: Some(b[1].clone()),
            residual: Some(b[2].clone()),
            out: b[0].clone(),
        });
        values(&b[0])
    };
    let backward = |_: &[Vec<f64>], dout: &[f64]| {
        let (x, dbias) = (rig.buffer(dout), rig.empty(DType::F64, columns));
        rig.run(ColumnSum {
            x,
            out: dbias.clone(),
            accumulate: false,
        });
        vec![dout.to_vec(), values(&dbias), dout.to_vec()]
    };
    check_gradients(&inputs, forward, backward);
}
