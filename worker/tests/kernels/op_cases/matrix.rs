//! Matrix products.

use ddp_worker::ops::{LinearDinp, LinearDweight, LinearForward, LinearShape, WeightLayout};

use super::numbers::numbers;
use super::{Case, Kind, Outcome, Size, Tensor};

pub(super) fn tensor(kind: Kind, seed: u64, len: usize, outcome: Outcome) -> Tensor {
    Tensor::new(kind, numbers(seed, len)).result(outcome)
}

/// Linear layers in both layouts, with and without what is added.
pub(super) fn linear(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 3]] = match size {
        Size::Small => &[[3, 5, 7], [17, 64, 33], [64, 96, 128]],
        Size::Large => &[[512, 768, 2304], [256, 512, 5003]],
    };
    linear_of(sizes)
}

/// Of these rows, inputs and outputs.
pub(crate) fn linear_of(sizes: &[[usize; 3]]) -> Vec<Case> {
    let mut cases = Vec::new();
    for &[rows, inputs, outputs] in sizes {
        for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
            let shape = LinearShape {
                rows,
                inputs,
                outputs,
                layout,
            };
            let adds = [[true, true], [true, false], [false, true], [false, false]];
            cases.extend(adds.map(|adds| forward(shape, adds)));
            cases.push(dinp(shape));
            cases.extend([true, false].map(|accumulate| dweight(shape, accumulate)));
        }
    }
    cases
}

/// A product may be rounded to the storage before something is added to it.
fn sum_outcome(adds: bool) -> Outcome {
    if adds { Outcome::Products } else { Outcome::Close }
}

fn forward(shape: LinearShape, [has_bias, has_residual]: [bool; 2]) -> Case {
    let (rows, inputs, outputs) = (shape.rows, shape.inputs, shape.outputs);
    let tensors = vec![
        tensor(Kind::Act, 1, rows * inputs, Outcome::Same),
        tensor(Kind::Act, 2, inputs * outputs, Outcome::Same),
        tensor(Kind::Act, 3, outputs, Outcome::Same),
        tensor(Kind::Act, 4, rows * outputs, Outcome::Same),
        tensor(
            Kind::Act,
            5,
            rows * outputs,
            sum_outcome(has_bias || has_residual),
        ),
    ];
    let name = format!("linear forward of {shape:?}, bias {has_bias}, residual {has_residual}");
    Case::new(name, tensors, move |b| LinearForward {
        inp: b[0].clone(),
        weight: b[1].clone(),
        bias: has_bias.then(|| b[2].clone()),
        residual: has_residual.then(|| b[3].clone()),
        out: b[4].clone(),
        shape,
        exact: false,
    })
}

fn dinp(shape: LinearShape) -> Case {
    let (rows, inputs, outputs) = (shape.rows, shape.inputs, shape.outputs);
    let tensors = vec![
        tensor(Kind::Act, 1, rows * outputs, Outcome::Same),
        tensor(Kind::Act, 2, inputs * outputs, Outcome::Same),
        tensor(Kind::Act, 3, rows * inputs, Outcome::Close),
    ];
    Case::new(format!("linear dinp of {shape:?}"), tensors, move |b| {
        LinearDinp {
            dout: b[0].clone(),
            weight: b[1].clone(),
            dinp: b[2].clone(),
            shape,
        }
    })
}

fn dweight(shape: LinearShape, accumulate: bool) -> Case {
    let (rows, inputs, outputs) = (shape.rows, shape.inputs, shape.outputs);
    let tensors = vec![
        tensor(Kind::Act, 1, rows * inputs, Outcome::Same),
        tensor(Kind::Act, 2, rows * outputs, Outcome::Same),
        tensor(Kind::Grad, 3, inputs * outputs, sum_outcome(accumulate)),
    ];
    let name = format!("linear dweight of {shape:?}, accumulate {accumulate}");
    Case::new(name, tensors, move |b| LinearDweight {
        inp: b[0].clone(),
        dout: b[1].clone(),
        dweight: b[2].clone(),
        accumulate,
        shape,
    })
}
