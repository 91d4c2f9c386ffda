//! Operations on bf16 storage against the same operations in f64.
//!
//! Both get the same numbers, exactly representable in bf16, so all that may differ is the arithmetic in f32 and one
//! rounding at each store. bf16 has 8 significant bits: rounding to nearest moves a number by at most 2⁻⁸ of itself.
//! Sums of a few thousand products of numbers near 1 are within 10⁻⁴ in f32. A second rounding anywhere (of an
//! intermediate, of a partial sum) would break the bound for some of the elements.

use ddp_worker::config::ModelKind;
use ddp_worker::device::{Buffer, CpuDevice, DType, Isa};
use ddp_worker::model::build;
use ddp_worker::ops::{CHUNK, ColumnSum, Rates, Runs, SquaredNorm, Update};
use ddp_worker::optim::adamw;
use half::bf16;

use crate::op_cases::matrix::linear_of;
use crate::op_cases::{Bench, Case, Size, Types, catalogue};

use super::rig::{Rank, Rig, config, numbers, numbers_f32, values, wide_values};

#[test]
fn every_operation_is_that_in_f64_rounded_once() {
    let cpu = CpuDevice::new(1).unwrap();
    let bench = Bench::new(&cpu);
    // Beyond a tile and a widened block in every dimension, one after the other.
    let long = linear_of(&[[3, 1100, 40], [1030, 20, 70], [4, 30, 4200], [530, 65, 66]]);
    for case in catalogue(Size::Small)
        .into_iter()
        .chain(long)
        .map(Case::rounded_once)
    {
        for types in Types::ALL {
            case.check(&bench, types).unwrap();
        }
    }
}

#[test]
fn an_update_by_bf16_gradients_is_one_by_their_numbers_and_the_copy_is_the_master_rounded() {
    let rig = Rig::new();
    let n = 40_001;
    let narrow: Vec<bf16> = numbers(1, n).into_iter().map(bf16::from_f64).collect();
    let wide: Vec<f32> = narrow.iter().copied().map(f32::from).collect();
    let update = |grad: Buffer, copy: Option<Buffer>| {
        let param = rig.buffer(&numbers_f32(2, n));
        let (m, v) = (rig.buffer(&vec![0.1_f32; n]), rig.buffer(&vec![0.2_f32; n]));
        rig.run(Update {
            rule: adamw([0.9, 0.95], 1e-8),
            runs: Runs::uniform(param.clone().len(), Rates::new(1e-2, 0.1)),
            param: param.clone(),
            copy,
            grad,
            slots: vec![m.clone(), v.clone()],
            scale: rig.buffer(&[0.7_f32]),
            step: 3,
        });
        [param, m, v].map(|b| values::<f32>(&b))
    };
    let copy = rig.empty(DType::Bf16, n);
    let found = update(rig.buffer(&narrow), Some(copy.clone()));
    assert_eq!(found, update(rig.buffer(&wide), None));
    let rounded: Vec<bf16> = found[0].iter().copied().map(bf16::from_f32).collect();
    assert_eq!(values::<bf16>(&copy), rounded);
}

#[test]
fn the_norm_of_bf16_gradients_is_that_of_their_numbers() {
    let rig = Rig::new();
    let narrow: Vec<bf16> = numbers(1, CHUNK + 77).into_iter().map(bf16::from_f64).collect();
    let wide: Vec<f32> = narrow.iter().copied().map(f32::from).collect();
    let norm = |x: Buffer| {
        let partials = rig.empty(DType::F64, 2);
        rig.run(SquaredNorm {
            x,
            partials: partials.clone(),
        });
        values::<f64>(&partials)
    };
    assert_eq!(norm(rig.buffer(&narrow)), norm(rig.buffer(&wide)));
}

#[test]
fn a_gradient_of_a_type_that_does_not_go_with_the_activations_is_refused() {
    let rig = Rig::new();
    let sum = |x, out| {
        rig.try_run(ColumnSum {
            x: rig.empty(x, 4),
            out: rig.empty(out, 4),
            accumulate: false,
        })
    };
    assert!(sum(DType::Bf16, DType::F32).is_ok());
    let error = sum(DType::F32, DType::Bf16).unwrap_err();
    assert_eq!(error.to_string(), "`test` holds bf16, expected f32");
    let error = sum(DType::I32, DType::I32).unwrap_err();
    assert_eq!(
        error.to_string(),
        "operation `column_sum`: takes f32, bf16 or f64, not i32"
    );
}

/// Losses and gradients of a whole network in bf16, beside f64 ones.
#[test]
fn a_network_in_bf16_has_the_gradients_of_one_in_f64_to_its_precision() {
    for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
        let run = |act, grad| {
            let model = build(&config(kind), 201).unwrap();
            let mut rank = Rank::with_grads(Rig::with(1, Isa::detect()), model, (act, grad), [1, 4, 6]);
            let loss = rank.step(0);
            (loss, wide_values(&rank.grads.whole()))
        };
        let (exact_loss, exact) = run(DType::F64, DType::F64);
        for grad in [DType::Bf16, DType::F32] {
            let (loss, found) = run(DType::Bf16, grad);
            assert!(
                (loss - exact_loss).abs() < 2e-3 * exact_loss,
                "{loss} and {exact_loss}"
            );
            let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
            let error = norm(&mut found.iter().zip(&exact).map(|(f, e)| f - e));
            let size = norm(&mut exact.iter().copied());
            // About ten roundings of 2⁻⁸ at most lie on the way of each, in no preferred direction.
            assert!(error < 0.02 * size, "{kind:?}, {grad}: off by {}", error / size);
        }
    }
}
