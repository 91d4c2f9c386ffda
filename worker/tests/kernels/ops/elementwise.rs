//! Operations without a gradient of their own, and refusals.

use std::ops::Range;

use ddp_worker::device::DType;
use ddp_worker::ops::{
    CHUNK, Cast, ClipScale, CrossEntropy, EncoderForward, Fill, LinearForward, LinearShape, LossSum, Rates,
    Runs, SquaredNorm, Update, Updates, WeightLayout,
};
use ddp_worker::optim::adamw;
use half::bf16;

use super::rig::{Rig, assert_close, numbers_f32, values};

#[test]
fn what_is_spared_does_not_decay() {
    let (n, rig) = (100, Rig::new());
    let updated = |spared: &[Range<usize>], weight_decay, range: Range<usize>| {
        let [param, m] = [1, 2].map(|seed| rig.buffer(&numbers_f32(seed, n)));
        let all = Update {
            rule: adamw([0.9, 0.999], 1e-8),
            runs: Runs::sparing(n, spared, Rates::new(0.1, weight_decay)),
            param: param.clone(),
            copy: None,
            grad: rig.buffer(&numbers_f32(3, n)),
            slots: vec![m, rig.buffer(&vec![0.5_f32; n])],
            scale: rig.buffer(&[1.0_f32]),
            step: 1,
        };
        rig.run(all.slice(&range));
        values::<f32>(&param)
    };
    let [start, plain, decayed] = [
        numbers_f32(1, n),
        updated(&[], 0.0, 0..n),
        updated(&[], 0.1, 0..n),
    ];
    let spared = [0..3, 10..20, 95..n];
    // All of it, and a part that begins and ends within what is spared.
    for range in [0..n, 2..15] {
        let found = updated(&spared, 0.1, range.clone());
        for i in 0..n {
            let expected = match spared.iter().any(|spared| spared.contains(&i)) {
                _ if !range.contains(&i) => start[i],
                true => plain[i],
                false => decayed[i],
            };
            assert_eq!(found[i], expected, "element {i} of {range:?}");
        }
    }
}

#[test]
fn norms_are_by_chunks_and_clip() {
    let rig = Rig::new();
    let x = numbers_f32(1, 2 * CHUNK + 100);
    let partials = rig.empty(DType::F64, 3);
    rig.run(SquaredNorm {
        x: rig.buffer(&x),
        partials: partials.clone(),
    });
    let expected: Vec<f64> = x
        .chunks(CHUNK)
        .map(|c| c.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
        .collect();
    for (found, expected) in values::<f64>(&partials).iter().zip(&expected) {
        assert_close(*found, *expected, 1e-13, "partial");
    }
    let norm = expected.iter().sum::<f64>().sqrt();
    let (found, scale) = (rig.empty(DType::F32, 1), rig.empty(DType::F32, 1));
    for (max_norm, expected) in [(Some(1.0), 1.0 / norm), (Some(1e9), 1.0), (None, 1.0)] {
        let (partials, norm, scale) = (partials.clone(), found.clone(), scale.clone());
        rig.run(ClipScale {
            partials,
            order: None,
            witnesses: None,
            max_norm,
            norm,
            scale: scale.clone(),
            updates: None,
        });
        assert_close(f64::from(values::<f32>(&scale)[0]), expected, 1e-6, "factor");
    }
    assert_close(f64::from(values::<f32>(&found)[0]), norm, 1e-6, "norm");
}

#[test]
fn partial_norms_are_summed_in_the_order_of_the_chunks() {
    let rig = Rig::new();
    // In another order the small ones would be lost.
    let partials = rig.buffer(&[1e20_f64, 0.0, -1e20, 9.0]);
    let order = rig.buffer(&[0_i32, 2, -1, 3]);
    let [norm, scale] = [(); 2].map(|()| rig.empty(DType::F32, 1));
    let clip = |order| ClipScale {
        partials: partials.clone(),
        order,
        witnesses: None,
        max_norm: Some(1.5),
        norm: norm.clone(),
        scale: scale.clone(),
        updates: None,
    };
    rig.run(clip(Some(order)));
    assert_eq!((values::<f32>(&norm)[0], values::<f32>(&scale)[0]), (3.0, 0.5));
    let error = rig
        .try_run(clip(Some(rig.buffer(&[4_i32]))))
        .unwrap_err()
        .to_string();
    assert_eq!(error, "operation `clip_scale`: `order` names partial 4 of 4");
}

#[test]
fn a_step_with_a_number_that_is_not_finite_is_skipped() {
    let rig = Rig::new();
    let nan = f64::NAN;
    for (partials, witnesses, skipped) in [
        ([4.0, 5.0], [1.0, 2.0], false),
        ([4.0, nan], [1.0, 2.0], true),
        ([f64::INFINITY, 5.0], [1.0, 2.0], true),
        // Finite in f64, but no f32.
        ([1e200, 5.0], [1.0, 2.0], true),
        ([4.0, 5.0], [1.0, nan], true),
    ] {
        let [norm, scale] = [(); 2].map(|()| rig.empty(DType::F32, 1));
        rig.run(ClipScale {
            partials: rig.buffer(&partials),
            order: None,
            witnesses: Some(rig.buffer(&witnesses)),
            max_norm: Some(1.0),
            norm,
            scale: scale.clone(),
            updates: None,
        });
        let [param, m, v] = [1.0_f32, 2.0, 3.0].map(|value| rig.buffer(&[value; 3]));
        let copy = rig.buffer(&[bf16::ONE; 3]);
        rig.run(Update {
            rule: adamw([0.9, 0.95], 1e-8),
            runs: Runs::uniform(param.clone().len(), Rates::new(0.1, 0.1)),
            param: param.clone(),
            copy: Some(copy.clone()),
            grad: rig.buffer(&[0.5_f32; 3]),
            slots: vec![m.clone(), v.clone()],
            scale,
            step: 1,
        });
        let kept = [(&param, 1.0), (&m, 2.0), (&v, 3.0)].map(|(x, was)| values::<f32>(x)[2] == was);
        assert_eq!(kept, [skipped; 3], "{partials:?} {witnesses:?}");
        assert_eq!(values::<bf16>(&copy)[2] == bf16::ONE, skipped);
    }
}

/// As PyTorch under a `GradScaler`: a step that is skipped is no step of AdamW.
#[test]
fn a_skipped_step_is_no_update_for_the_bias_corrections() {
    let rig = Rig::new();
    let [norm, scale] = [1, 3].map(|len| rig.empty(DType::F32, len));
    let count = rig.buffer(&[0_i32]);
    let [param, m, v] = [1.0_f32, 0.0, 0.0].map(|value| rig.buffer(&[value]));
    // The host has seen what was skipped.
    let release = || scale.host_mut::<f32>().unwrap()[0] = 1.0;
    let step = |number, witness: f64| {
        rig.run(ClipScale {
            partials: rig.buffer(&[1.0_f64]),
            order: None,
            witnesses: Some(rig.buffer(&[witness])),
            max_norm: None,
            norm: norm.clone(),
            scale: scale.clone(),
            updates: Some(Updates {
                count: count.clone(),
                betas: [0.9, 0.95],
            }),
        });
        rig.run(Update {
            rule: adamw([0.9, 0.95], 0.0),
            runs: Runs::uniform(param.clone().len(), Rates::new(0.125, 0.0)),
            param: param.clone(),
            copy: None,
            grad: rig.buffer(&[0.5_f32]),
            slots: vec![m.clone(), v.clone()],
            scale: scale.clone(),
            step: number,
        });
        (values::<i32>(&count)[0], values::<f32>(&param)[0])
    };
    release();
    assert_eq!(step(1, f64::NAN), (0, 1.0));
    assert_eq!(
        step(2, 0.0),
        (0, 1.0),
        "the host has not seen that the step before was skipped"
    );
    release();
    // By the same gradient each update is lr · g/|g|.
    for (number, witness, updates) in [(2, 0.0, 1), (3, 0.0, 2), (4, f64::NAN, 2), (5, 0.0, 3)] {
        let (found, param) = step(number, witness);
        release();
        assert_eq!(found, updates, "step {number}");
        let expected = 1.0 - 0.125 * f64::from(updates);
        assert_close(f64::from(param), expected, 1e-6, &format!("step {number}"));
    }
}

#[test]
fn losses_are_summed_in_f64() {
    let rig = Rig::new();
    let total = rig.empty(DType::F64, 1);
    for (accumulate, expected) in [(false, 16_777_217.5), (true, 33_554_435.0)] {
        rig.run(LossSum {
            losses: rig.buffer(&[16_777_216.0_f32, 0.5, 1.0]),
            total: total.clone(),
            accumulate,
        });
        assert_eq!(values::<f64>(&total)[0], expected);
    }
}

#[test]
fn bf16_arenas_round_trip() {
    let rig = Rig::new();
    let x = numbers_f32(1, 70_000);
    let [narrow, wide] = [rig.empty(DType::Bf16, x.len()), rig.empty(DType::F32, x.len())];
    rig.run(Cast {
        x: rig.buffer(&x),
        out: narrow.clone(),
    });
    rig.run(Cast {
        x: narrow.clone(),
        out: wide.clone(),
    });
    let wide = values::<f32>(&wide);
    for (i, (&x, &wide)) in x.iter().zip(&wide).enumerate() {
        assert_eq!(wide, bf16::from_f32(x).to_f32(), "element {i}");
    }
    // What bf16 can hold comes back as it was.
    let [again, last] = [rig.empty(DType::Bf16, x.len()), rig.empty(DType::F32, x.len())];
    rig.run(Cast {
        x: rig.buffer(&wide),
        out: again.clone(),
    });
    rig.run(Cast {
        x: again,
        out: last.clone(),
    });
    assert_eq!(values::<f32>(&last), wide);
}

/// REFERENCE: 1 2 3 4 are 80 3f, 00 40, 40 40, 80 40.
#[test]
fn bf16_bytes_are_little_endian_upper_halves() {
    let rig = Rig::new();
    let narrow = rig.empty(DType::Bf16, 4);
    rig.run(Cast {
        x: rig.buffer(&[1.0_f32, 2.0, 3.0, 4.0]),
        out: narrow.clone(),
    });
    assert_eq!(
        narrow.host_bytes().unwrap()[..],
        [0x80, 0x3f, 0x00, 0x40, 0x40, 0x40, 0x80, 0x40]
    );
}

#[test]
fn fill_and_scale() {
    let rig = Rig::new();
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        let out = rig.empty(dtype, 3);
        rig.run(Fill {
            out: out.clone(),
            value: 1.5,
        });
        let wide = match dtype {
            DType::F32 => values::<f32>(&out).into_iter().map(f64::from).collect(),
            DType::Bf16 => values::<bf16>(&out).into_iter().map(f64::from).collect(),
            _ => values::<f64>(&out),
        };
        assert_eq!(wide, [1.5; 3]);
    }
    assert!(
        rig.try_run(Fill {
            out: rig.empty(DType::I32, 3),
            value: 1.0
        })
        .is_err()
    );
}

#[test]
fn not_a_number_comes_through() {
    let rig = Rig::new();
    let mut logits = numbers_f32(1, 3 * 40);
    logits[45] = f32::NAN;
    logits[90] = f32::INFINITY;
    for dlosses in [None, Some(rig.buffer(&[1.0_f32; 3]))] {
        let (logits, losses) = (rig.buffer(&logits), rig.empty(DType::F32, 3));
        rig.run(CrossEntropy {
            logits,
            targets: rig.buffer::<i32>(&[0, 0, 0]),
            losses: losses.clone(),
            dlosses,
        });
        let losses = values::<f32>(&losses);
        assert!(
            losses[0].is_finite() && !losses[1].is_finite() && !losses[2].is_finite(),
            "{losses:?}"
        );
    }
}

#[test]
fn bad_sizes_and_tokens_are_named() {
    let rig = Rig::new();
    let f32s = |n| rig.empty(DType::F32, n);
    let shape = LinearShape {
        rows: 2,
        inputs: 3,
        outputs: 4,
        layout: WeightLayout::InOut,
    };
    let (inp, weight, out) = (f32s(6), f32s(11), f32s(8));
    let linear = LinearForward {
        inp,
        weight,
        bias: None,
        residual: None,
        out,
        exact: false,
        shape,
    };
    let error = rig.try_run(linear).unwrap_err();
    assert_eq!(
        error.to_string(),
        "operation `linear_forward`: `weight` has 11 elements, expected 12"
    );

    let token = |token: i32| {
        let tokens = rig.buffer(&[0, token]);
        let encoder = EncoderForward {
            tokens,
            wte: f32s(20),
            wpe: None,
            out: f32s(4),
            positions: 2,
            part: None,
        };
        rig.try_run(encoder).unwrap_err().to_string()
    };
    assert_eq!(
        token(10),
        "operation `encoder_forward`: `tokens[1]` is 10, expected less than 10"
    );
    assert_eq!(
        token(-1),
        "operation `encoder_forward`: `tokens[1]` is -1, expected at least 0"
    );

    let targets = rig.buffer(&[-1, 5]);
    let entropy = CrossEntropy {
        logits: f32s(10),
        targets,
        losses: f32s(2),
        dlosses: None,
    };
    let error = rig.try_run(entropy).unwrap_err();
    assert_eq!(
        error.to_string(),
        "operation `cross_entropy`: `targets[1]` is 5, expected less than 5"
    );
}
