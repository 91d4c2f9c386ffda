//! Attention against the formula, written out.

use ddp_worker::device::DType;
use ddp_worker::ops::{AttentionForward, AttentionShape};

use crate::rig::{Rig, assert_close, numbers, numbers_f32, values};

/// Output `[T, C]` and lse `[H, T]` of one sample, `qkv` `[T, 3C]`.
fn naive(qkv: &[f64], positions: usize, heads: usize, channels: usize) -> (Vec<f64>, Vec<f64>) {
    let width = channels / heads;
    let at =
        |part: usize, t: usize, h: usize, i: usize| qkv[t * 3 * channels + part * channels + h * width + i];
    let (mut out, mut lse) = (vec![0.0; positions * channels], vec![0.0; heads * positions]);
    for h in 0..heads {
        for t in 0..positions {
            let score = |s: usize| {
                (0..width).map(|i| at(0, t, h, i) * at(1, s, h, i)).sum::<f64>() / (width as f64).sqrt()
            };
            let weights: Vec<f64> = (0..=t).map(|s| score(s).exp()).collect();
            let sum: f64 = weights.iter().sum();
            lse[h * positions + t] = sum.ln();
            for i in 0..width {
                let mixed: f64 = weights.iter().enumerate().map(|(s, w)| w * at(2, s, h, i)).sum();
                out[t * channels + h * width + i] = mixed / sum;
            }
        }
    }
    (out, lse)
}

#[test]
fn agrees_with_the_formula() {
    let rig = Rig::new();
    for (batch, positions, heads, channels) in [(1, 1, 1, 2), (2, 63, 3, 6), (1, 64, 2, 16), (2, 200, 2, 128)]
    {
        let shape = AttentionShape {
            batch,
            positions,
            heads,
            channels,
        };
        let qkv = numbers(3, batch * positions * 3 * channels);
        let (out, lse) = (
            rig.empty(DType::F64, batch * positions * channels),
            rig.empty(DType::F64, batch * heads * positions),
        );
        rig.run(AttentionForward {
            qkv: rig.buffer(&qkv),
            out: out.clone(),
            lse: lse.clone(),
            shape,
            dropout: None,
        });
        let (out, lse) = (values::<f64>(&out), values::<f64>(&lse));
        for sample in 0..batch {
            let qkv = &qkv[sample * positions * 3 * channels..][..positions * 3 * channels];
            let (expected, expected_lse) = naive(qkv, positions, heads, channels);
            for (i, expected) in expected.iter().enumerate() {
                assert_close(out[sample * positions * channels + i], *expected, 1e-11, "out");
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
    let shape = AttentionShape {
        batch: 1,
        positions: 80,
        heads: 1,
        channels: 4,
    };
    let qkv: Vec<f32> = numbers_f32(1, 80 * 12).iter().map(|x| 100.0 * x).collect();
    let (out, lse) = (rig.empty(DType::F32, 320), rig.empty(DType::F32, 80));
    rig.run(AttentionForward {
        qkv: rig.buffer(&qkv),
        out: out.clone(),
        lse,
        shape,
        dropout: None,
    });
    assert!(values::<f32>(&out).iter().all(|x| x.abs() <= 100.0));
}
