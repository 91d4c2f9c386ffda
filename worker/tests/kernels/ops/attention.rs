//! Attention against the formula, written out; over a cache against attention over everything at once; rotations.

use ddp_worker::device::{Buffer, DType};
use ddp_worker::ops::{
    AttentionBackward, AttentionDecode, AttentionForward, AttentionMerge, AttentionShape, DropoutMask,
    HeadsView, Rotary, RotaryEmbedding,
};

use super::rig::{Rig, assert_close, numbers, numbers_f32, values};

/// Output `[T, H·D]` and lse `[H, T]` of one sample, `qkv` `[T, (H + 2·KV)·D]`.
fn naive(qkv: &[f64], shape: AttentionShape) -> (Vec<f64>, Vec<f64>) {
    let (positions, heads, size) = (shape.positions, shape.heads, shape.head_size);
    let row = |t: usize| &qkv[t * shape.qkv_channels()..][..shape.qkv_channels()];
    let head_at = |t: usize, head: usize| &row(t)[head * size..][..size];
    let (mut out, mut lse) = (vec![0.0; positions * heads * size], vec![0.0; heads * positions]);
    for h in 0..heads {
        let kv_head = h / (heads / shape.kv_heads);
        let key = |t: usize| head_at(t, heads + kv_head);
        let value = |t: usize| head_at(t, heads + shape.kv_heads + kv_head);
        for t in 0..positions {
            let score = |s: usize| {
                let products = head_at(t, h).iter().zip(key(s)).map(|(q, k)| q * k);
                products.sum::<f64>() / (size as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=t).map(|s| score(s).exp()).collect();
            let sum: f64 = weights.iter().sum();
            lse[h * positions + t] = sum.ln();
            for i in 0..size {
                let mixed: f64 = weights.iter().enumerate().map(|(s, w)| w * value(s)[i]).sum();
                out[(t * heads + h) * size + i] = mixed / sum;
            }
        }
    }
    (out, lse)
}

/// Output and lse of attention on the device.
fn forward(rig: &Rig, qkv: &Buffer, shape: AttentionShape) -> [Buffer; 2] {
    let stat = if qkv.dtype() == DType::F64 {
        DType::F64
    } else {
        DType::F32
    };
    let out = rig.empty(qkv.dtype(), shape.rows() * shape.channels());
    let lse = rig.empty(stat, shape.rows() * shape.heads);
    rig.run(AttentionForward {
        qkv: shape.views(qkv),
        out: out.clone(),
        lse: lse.clone(),
        shape,
        dropout: None,
    });
    [out, lse]
}

const fn shape([batch, positions, heads, kv_heads, head_size]: [usize; 5]) -> AttentionShape {
    AttentionShape {
        batch,
        positions,
        heads,
        kv_heads,
        head_size,
    }
}

#[test]
fn agrees_with_the_formula() {
    let rig = Rig::new();
    let sizes = [
        [1, 1, 1, 1, 2],
        [2, 63, 3, 3, 2],
        [1, 64, 2, 2, 8],
        [2, 200, 2, 2, 64],
        [1, 200, 1, 1, 128],
        [1, 130, 2, 1, 1],
        // Heads that share keys and values, and channels that are not a multiple of anything.
        [2, 70, 6, 3, 5],
        [1, 65, 4, 1, 16],
    ];
    for shape in sizes.map(shape) {
        let AttentionShape { positions, heads, .. } = shape;
        let qkv = numbers(3, shape.rows() * shape.qkv_channels());
        let [out, lse] = forward(&rig, &rig.buffer(&qkv), shape).map(|buffer| values::<f64>(&buffer));
        for sample in 0..shape.batch {
            let of_sample = positions * shape.qkv_channels();
            let (expected, expected_lse) = naive(&qkv[sample * of_sample..][..of_sample], shape);
            for (i, expected) in expected.iter().enumerate() {
                let at = sample * positions * shape.channels() + i;
                assert_close(out[at], *expected, 1e-11, "out");
            }
            for (i, expected) in expected_lse.iter().enumerate() {
                assert_close(lse[sample * heads * positions + i], *expected, 1e-11, "lse");
            }
        }
    }
}

/// Scores of some thousands: only differences from the row's maximum are exponentiated.
#[test]
fn large_scores_do_not_overflow() {
    let rig = Rig::new();
    let qkv: Vec<f32> = numbers_f32(1, 80 * 12).iter().map(|x| 100.0 * x).collect();
    let [out, _] = forward(&rig, &rig.buffer(&qkv), shape([1, 80, 1, 1, 4]));
    assert!(values::<f32>(&out).iter().all(|x| x.abs() <= 100.0));
}

/// Rows of `x`, `[batch, T, width]`, from position `from` to `to` of each sample.
fn stretch<T: Clone>(x: &[T], [batch, width, from, to]: [usize; 4]) -> Vec<T> {
    let samples = x.chunks(x.len() / batch);
    samples
        .flat_map(|sample| sample[from * width..to * width].to_vec())
        .collect()
}

/// The queries in two calls over all keys: the rows of one call bit by bit; the gradients of keys and values add up.
#[test]
fn queries_of_a_stretch_have_the_bits_of_all() {
    let (rig, dropout) = (Rig::new(), Some(DropoutMask::new(3, 1, 1, 17, 0.3)));
    let shape = shape([2, 200, 4, 2, 16]);
    let (batch, heads, channels, wide) = (2, 4, shape.channels(), shape.qkv_channels());
    let (qkv, dout) = (
        numbers_f32(7, shape.rows() * wide),
        numbers_f32(8, shape.rows() * channels),
    );
    // Output, lse, gradients of queries, and of keys and values, of the queries from one position to another.
    let call = |from: usize, to: usize| {
        let of_call = AttentionShape {
            positions: to - from,
            ..shape
        };
        let queries = |buffer: Buffer| HeadsView {
            buffer,
            stride: wide,
            offset: 0,
            first_position: from,
        };
        let (all, own) = (
            rig.buffer(&qkv),
            rig.buffer(&stretch(&qkv, [batch, wide, from, to])),
        );
        let [_, k, v] = shape.views(&all);
        let inputs = [queries(own.clone()), k, v];
        let out = rig.empty(DType::F32, of_call.rows() * channels);
        let lse = rig.empty(DType::F32, of_call.rows() * heads);
        rig.run(AttentionForward {
            qkv: inputs.clone(),
            out: out.clone(),
            lse: lse.clone(),
            shape: of_call,
            dropout,
        });
        let (dq, dkv) = (rig.empty(DType::F32, own.len()), rig.empty(DType::F32, all.len()));
        let [_, dk, dv] = shape.views(&dkv);
        rig.run(AttentionBackward {
            forward: AttentionForward {
                qkv: inputs,
                out: out.clone(),
                lse: lse.clone(),
                shape: of_call,
                dropout,
            },
            dout: rig.buffer(&stretch(&dout, [batch, channels, from, to])),
            dqkv: [queries(dq.clone()), dk, dv],
            accumulate: false,
        });
        [out, lse, dq, dkv].map(|buffer| values::<f32>(&buffer))
    };
    let whole = call(0, 200);
    // Whole tiles of queries before the cut.
    let parts = [(0, 128), (128, 200)].map(|(from, to)| (from, to, call(from, to)));
    for (from, to, part) in &parts {
        for (i, samples, width) in [(0, batch, channels), (1, batch * heads, 1), (2, batch, wide)] {
            let expected = stretch(&whole[i], [samples, width, *from, *to]);
            assert_eq!(part[i], expected, "result {i} of the queries {from}..{to}");
        }
    }
    for (i, expected) in whole[3].iter().enumerate() {
        let sum: f32 = parts.iter().map(|(.., part)| part[3][i]).sum();
        // Of the order of 1 and below; the terms are added in another order.
        assert!((sum - expected).abs() < 1e-5, "{i}: {sum}, {expected}");
    }
}

/// Forward, and what backward makes of `dout`.
fn gradients_of(rig: &Rig, forward: &AttentionForward, dout: &[f64]) -> Buffer {
    rig.run(forward.clone());
    let shape = forward.shape;
    let dqkv = rig.empty(DType::F64, shape.rows() * shape.qkv_channels());
    rig.run(AttentionBackward {
        forward: forward.clone(),
        dout: rig.buffer(dout),
        dqkv: shape.views(&dqkv),
        accumulate: false,
    });
    dqkv
}

/// Queries, keys and values of three stretches: forward joins what the stretches of keys up to a query's own give, backward
/// adds up their shares of the gradients.
#[test]
fn stretches_of_keys_add_up_to_all() {
    const LENGTH: usize = 33;
    let (rig, dropout) = (Rig::new(), Some(DropoutMask::new(3, 1, 1, 17, 0.3)));
    let all = shape([2, 3 * LENGTH, 4, 2, 6]);
    let one = AttentionShape {
        positions: LENGTH,
        ..all
    };
    let (channels, wide) = (all.channels(), all.qkv_channels());
    let (qkv, dout) = (numbers(7, all.rows() * wide), numbers(8, all.rows() * channels));
    let attention = |shape: AttentionShape, qkv: [HeadsView; 3]| AttentionForward {
        qkv,
        out: rig.empty(DType::F64, shape.rows() * channels),
        lse: rig.empty(DType::F64, shape.rows() * shape.heads),
        shape,
        dropout,
    };
    let whole = attention(all, all.views(&rig.buffer(&qkv)));
    let dqkv = gradients_of(&rig, &whole, &dout);
    let expected = [(values::<f64>(&whole.out), channels), (values(&dqkv), wide)];

    let cut = |x: &[f64], width: usize, i: usize| stretch(x, [2, width, i * LENGTH, (i + 1) * LENGTH]);
    let views = |buffer: &Buffer, i: usize| {
        let first_position = i * LENGTH;
        one.views(buffer).map(|view| HeadsView {
            first_position,
            ..view
        })
    };
    let inputs = [0, 1, 2].map(|i| rig.buffer(&cut(&qkv, wide, i)));
    let gradients = [0, 1, 2].map(|_| rig.buffer(&vec![0.0; one.rows() * wide]));
    let pair = |buffers: &[Buffer; 3], queries: usize, keys: usize| {
        let ([q, ..], [_, k, v]) = (views(&buffers[queries], queries), views(&buffers[keys], keys));
        [q, k, v]
    };
    let outs = [0, 1, 2].map(|queries| {
        let joined = attention(one, pair(&inputs, queries, queries));
        rig.run(joined.clone());
        for keys in 0..queries {
            let part = attention(one, pair(&inputs, queries, keys));
            rig.run(part.clone());
            rig.run(AttentionMerge {
                part: part.out,
                part_lse: part.lse,
                out: joined.out.clone(),
                lse: joined.lse.clone(),
                shape: one,
            });
        }
        let dout = rig.buffer(&cut(&dout, channels, queries));
        for keys in 0..=queries {
            rig.run(AttentionBackward {
                forward: AttentionForward {
                    qkv: pair(&inputs, queries, keys),
                    ..joined.clone()
                },
                dout: dout.clone(),
                dqkv: pair(&gradients, queries, keys),
                accumulate: true,
            });
        }
        joined.out
    });
    for (found, (expected, width)) in [&outs, &gradients].into_iter().zip(&expected) {
        for (i, found) in found.iter().enumerate() {
            for (found, expected) in values::<f64>(found).iter().zip(cut(expected, *width, i)) {
                assert_close(*found, expected, 1e-12, &format!("stretch {i}, rows of {width}"));
            }
        }
    }
}

/// A cache with room for 100 positions, and what came of every position when they were decoded in steps.
fn decoded(rig: &Rig, qkv: &[f64], shape: AttentionShape, steps: &[usize]) -> Vec<f64> {
    const ROOM: usize = 100;
    let cache = || rig.buffer(&vec![f64::NAN; shape.batch * ROOM * shape.kv_channels()]);
    let (keys, values_of_cache) = (cache(), cache());
    let mut all = vec![0.0; shape.rows() * shape.channels()];
    let mut first_position = 0;
    for &positions in steps {
        let range = |sample: usize, channels: usize| {
            let first = (sample * shape.positions + first_position) * channels;
            first..first + positions * channels
        };
        let new: Vec<f64> = (0..shape.batch)
            .flat_map(|sample| &qkv[range(sample, shape.qkv_channels())])
            .copied()
            .collect();
        let of_step = AttentionShape { positions, ..shape };
        let out = rig.empty(DType::F64, of_step.rows() * shape.channels());
        rig.run(AttentionDecode {
            qkv: rig.buffer(&new),
            keys: keys.clone(),
            values: values_of_cache.clone(),
            out: out.clone(),
            shape: of_step,
            first_position,
        });
        let out = values::<f64>(&out);
        for (sample, out) in out.chunks(positions * shape.channels()).enumerate() {
            all[range(sample, shape.channels())].copy_from_slice(out);
        }
        first_position += positions;
    }
    all
}

#[test]
fn decoding_in_steps_is_attention_over_everything() {
    let rig = Rig::new();
    for shape in [shape([2, 90, 4, 2, 6]), shape([1, 90, 3, 3, 5])] {
        let qkv = numbers(5, shape.rows() * shape.qkv_channels());
        let [out, _] = forward(&rig, &rig.buffer(&qkv), shape);
        let expected = values::<f64>(&out);
        assert_eq!(
            decoded(&rig, &qkv, shape, &[90]),
            expected,
            "all at once: the same bits"
        );
        for steps in [&[70, 1, 1, 1, 17][..], &[1; 90], &[3, 80, 7]] {
            let found = decoded(&rig, &qkv, shape, steps);
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(*found, *expected, 1e-12, &format!("steps of {steps:?}"));
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let rig = Rig::new();
    let buffer = |len| rig.empty(DType::F32, len);
    let refused = |shape: AttentionShape, first_position, room: usize| {
        let rows = shape.rows();
        let error = rig.try_run(AttentionDecode {
            qkv: buffer(rows * shape.qkv_channels()),
            keys: buffer(shape.batch * room * shape.kv_channels()),
            values: buffer(shape.batch * room * shape.kv_channels()),
            out: buffer(rows * shape.channels()),
            shape,
            first_position,
        });
        error.unwrap_err().to_string()
    };
    let words = refused(shape([2, 3, 4, 2, 8]), 6, 8);
    let expected = "operation `attention_decode`: the cache has room for 8 positions, position 8 follows";
    assert_eq!(words, expected);
    let words = refused(shape([2, 3, 4, 3, 8]), 0, 8);
    let expected = "operation `attention_decode`: 4 heads cannot share 3 heads of keys and values evenly";
    assert_eq!(words, expected);
    let words = refused(shape([2, 3, 4, 4, 0]), 0, 8);
    assert!(words.contains("sizes must be at least 1"), "{words}");
}

const LLAMA: RotaryEmbedding = RotaryEmbedding {
    base: 10_000.0,
    scaling: None,
};

fn rotated(rig: &Rig, x: &[f64], shape: AttentionShape, first_position: usize) -> Vec<f64> {
    let qkv = rig.buffer(x);
    rig.run(Rotary {
        qkv: qkv.clone(),
        shape,
        embedding: LLAMA,
        first_position,
        backward: false,
    });
    values(&qkv)
}

/// Pairs `(i, i + D/2)` of queries and keys; values stay. The formula with the library's functions.
#[test]
fn rotations_are_those_of_the_formula() {
    let (rig, shape) = (Rig::new(), shape([2, 20, 3, 1, 10]));
    let x = numbers(1, shape.rows() * shape.qkv_channels());
    for (first, tolerance) in [(1000, 1e-11), (123_456, 1e-9)] {
        let found = rotated(&rig, &x, shape, first);
        let rows = x
            .chunks(shape.qkv_channels())
            .zip(found.chunks(shape.qkv_channels()));
        for (row, (before, after)) in rows.enumerate() {
            let position = (first + row % 20) as f64;
            for (head, (before, after)) in before.chunks(10).zip(after.chunks(10)).enumerate() {
                if head == 4 {
                    assert_eq!(before, after, "values");
                    continue;
                }
                for i in 0..5 {
                    let angle = position * 10_000.0_f64.powf(-2.0 * i as f64 / 10.0);
                    let (sin, cos) = angle.sin_cos();
                    let expected = [
                        before[i] * cos - before[i + 5] * sin,
                        before[i + 5] * cos + before[i] * sin,
                    ];
                    assert!(
                        (after[i] - expected[0]).abs() < tolerance,
                        "row {row}, head {head}, {i}"
                    );
                    assert!(
                        (after[i + 5] - expected[1]).abs() < tolerance,
                        "row {row}, head {head}, {i}"
                    );
                }
            }
        }
    }
}
