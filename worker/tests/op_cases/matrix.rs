//! Matrix products and attention.

use ddp_worker::device::DType;
use ddp_worker::ops::{
    AttentionBackward, AttentionForward, AttentionShape, DropoutMask, GeluBackward, GeluForward, LinearDinp,
    LinearDweight, LinearForward, LinearGeluBackward, LinearGeluForward, LinearShape, WeightLayout,
};

use super::numbers::numbers;
use super::{Case, Kind, Outcome, Size, Tensor};

const F32: Kind = Kind::Fixed(DType::F32);

fn tensor(kind: Kind, seed: u64, len: usize, outcome: Outcome) -> Tensor {
    Tensor::new(kind, numbers(seed, len)).result(outcome)
}

/// Linear layers in both layouts, with and without what is added.
pub(super) fn linear(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 3]] = match size {
        Size::Small => &[[3, 5, 7], [17, 64, 33], [64, 96, 128]],
        Size::Large => &[[512, 768, 2304], [256, 512, 5003]],
    };
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
            cases.extend([gelu_forward(shape), gelu_backward(shape)]);
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

/// The GELU may begin with a product that was not rounded to the storage.
fn gelu_forward(shape: LinearShape) -> Case {
    let (rows, inputs, outputs) = (shape.rows, shape.inputs, shape.outputs);
    let tensors = vec![
        tensor(Kind::Act, 1, rows * inputs, Outcome::Same),
        tensor(Kind::Act, 2, inputs * outputs, Outcome::Same),
        tensor(Kind::Act, 3, outputs, Outcome::Same),
        tensor(Kind::Act, 4, rows * outputs, Outcome::Products),
        tensor(Kind::Act, 5, rows * outputs, Outcome::Products),
    ];
    let name = format!("linear and gelu forward of {shape:?}");
    Case::new(name, tensors, move |b| LinearGeluForward {
        linear: LinearForward {
            inp: b[0].clone(),
            weight: b[1].clone(),
            bias: Some(b[2].clone()),
            residual: None,
            out: b[3].clone(),
            shape,
        },
        gelu: GeluForward {
            inp: b[3].clone(),
            out: b[4].clone(),
        },
    })
}

fn gelu_backward(shape: LinearShape) -> Case {
    let (rows, inputs, outputs) = (shape.rows, shape.inputs, shape.outputs);
    let tensors = vec![
        tensor(Kind::Act, 1, rows * outputs, Outcome::Same),
        tensor(Kind::Act, 2, inputs * outputs, Outcome::Same),
        tensor(Kind::Act, 3, rows * inputs, Outcome::Products),
        tensor(Kind::Act, 4, rows * inputs, Outcome::Products),
    ];
    let name = format!("linear and gelu backward of {shape:?}");
    Case::new(name, tensors, move |b| LinearGeluBackward {
        linear: LinearDinp {
            dout: b[0].clone(),
            weight: b[1].clone(),
            dinp: b[3].clone(),
            shape,
        },
        gelu: GeluBackward {
            inp_out: b[2].clone(),
            dout_dinp: b[3].clone(),
        },
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

/// Attention: by the plain kernels in all types, and in bf16 by those with a name of their own on tensor cores.
pub(super) fn attention(size: Size) -> Vec<Case> {
    // Samples, positions, heads, channels of a head.
    let plain: &[[usize; 4]] = match size {
        Size::Small => &[[2, 1, 1, 8], [1, 77, 2, 48], [2, 70, 3, 5], [1, 33, 1, 144]],
        Size::Large => &[[1, 1000, 2, 80]],
    };
    let flash: &[[usize; 4]] = match size {
        Size::Small => &[[1, 70, 1, 64], [1, 1, 2, 64], [1, 33, 1, 32], [1, 40, 1, 128]],
        Size::Large => &[
            [2, 77, 3, 64],
            [1, 1000, 2, 64],
            [2, 1024, 2, 64],
            [1, 1025, 2, 32],
            [2, 513, 2, 128],
        ],
    };
    let mut cases = Vec::new();
    for (name, sizes) in [("attention", plain), ("flash attention", flash)] {
        for &[batch, positions, heads, width] in sizes {
            let shape = AttentionShape {
                batch,
                positions,
                heads,
                channels: heads * width,
            };
            // Compiled kernels are what takes time: masks for one width of the plain ones.
            let is_dropped = positions > 1 && (name == "flash attention" || heads == 3);
            for rate in [Some(0.0), is_dropped.then_some(0.25)].into_iter().flatten() {
                cases.extend([
                    attention_forward(name, shape, rate),
                    attention_backward(name, shape, rate),
                ]);
            }
        }
    }
    cases
}

/// Elements of `[B, T, C]`.
fn elements(shape: AttentionShape) -> usize {
    shape.batch * shape.positions * shape.channels
}

/// Of samples whose numbers do not all fit 32 bits, and of heads from the third on.
fn mask(rate: f32) -> Option<DropoutMask> {
    (rate > 0.0).then(|| DropoutMask::new(9, [4, 1], (1 << 32) - 1, rate).of_part(2))
}

fn attention_forward(name: &str, shape: AttentionShape, rate: f32) -> Case {
    let n = elements(shape);
    let queries = shape.batch * shape.heads * shape.positions;
    let qkv = numbers(1, 3 * n).iter().map(|x| 3.0 * x).collect();
    let tensors = vec![
        Tensor::new(Kind::Act, qkv),
        tensor(Kind::Act, 2, n, Outcome::Products),
        tensor(F32, 3, queries, Outcome::Products),
    ];
    Case::new(
        format!("{name} forward of {shape:?}, dropout {rate}"),
        tensors,
        move |b| AttentionForward {
            qkv: b[0].clone(),
            out: b[1].clone(),
            lse: b[2].clone(),
            shape,
            dropout: mask(rate),
        },
    )
}

fn attention_backward(name: &str, shape: AttentionShape, rate: f32) -> Case {
    let n = elements(shape);
    let queries = shape.batch * shape.heads * shape.positions;
    // About what forward leaves of so many keys.
    let lse = (0..queries).map(|query| ((query % shape.positions + 1) as f64).ln() + 0.2);
    let tensors = vec![
        tensor(Kind::Act, 1, 3 * n, Outcome::Same),
        tensor(Kind::Act, 2, n, Outcome::Same),
        Tensor::new(F32, lse.collect()),
        tensor(Kind::Act, 4, n, Outcome::Same),
        tensor(Kind::Act, 5, 3 * n, Outcome::Products),
    ];
    Case::new(
        format!("{name} backward of {shape:?}, dropout {rate}"),
        tensors,
        move |b| AttentionBackward {
            qkv: b[0].clone(),
            out: b[1].clone(),
            lse: b[2].clone(),
            dout: b[3].clone(),
            dqkv: b[4].clone(),
            shape,
            dropout: mask(rate),
        },
    )
}
