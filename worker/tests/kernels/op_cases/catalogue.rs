//! The operations that are compared, at sizes that meet every path of a kernel.

use std::ops::Range;
use std::sync::Arc;

use ddp_worker::device::{Buffer, DType};
use ddp_worker::ops::{
    CHUNK, Cast, ClipScale, ColumnSum, CrossEntropy, Dropout, DropoutMask, EncoderForward, Fill,
    GeluBackward, GeluForward, LossSum, NormBackward, NormForward, PositionBackward, Rates, Runs,
    SquaredNorm, SwigluBackward, SwigluForward, TokenBackward, Update, UpdateRule, Updates,
};
use ddp_worker::optim;

use super::attention::{attention, decode, rotary};
use super::experts::experts;
use super::matrix::linear;
use super::numbers::{numbers, positive, tokens};
use super::parts::parts;
use super::{Case, Kind, Outcome, Tensor};

const ACT: Kind = Kind::Act;
const GRAD: Kind = Kind::Grad;
const F32: Kind = Kind::Fixed(DType::F32);
const F64: Kind = Kind::Fixed(DType::F64);
const I32: Kind = Kind::Fixed(DType::I32);

/// How much a device can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// Whatever takes another path, as small as it goes.
    Small,
    /// As in training.
    Large,
}

/// Everything that is compared.
pub(crate) fn catalogue(size: Size) -> Vec<Case> {
    [
        elementwise(size),
        dropout(size),
        optimizer(size),
        encoder(size),
        norm(size, true),
        norm(size, false),
        swiglu(size),
        column_sum(size),
        cross_entropy(size),
        linear(size),
        attention(size),
        decode(size),
        rotary(size),
        parts(size),
        experts(size),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn input(kind: Kind, seed: u64, len: usize) -> Tensor {
    Tensor::new(kind, numbers(seed, len))
}

fn close(kind: Kind, seed: u64, len: usize) -> Tensor {
    input(kind, seed, len).result(Outcome::Close)
}

fn exact(kind: Kind, seed: u64, len: usize) -> Tensor {
    input(kind, seed, len).result(Outcome::Exact)
}

/// Small lengths: less than a pack, a few blocks and a rest.
fn lengths(size: Size) -> &'static [usize] {
    match size {
        Size::Small => &[1, 7, 5003],
        Size::Large => &[8_388_616 + 3],
    }
}

fn elementwise(size: Size) -> Vec<Case> {
    let mut cases = Vec::new();
    for &n in lengths(size) {
        let wide = |seed| Tensor::new(ACT, numbers(seed, n).iter().map(|x| 12.0 * x).collect());
        let forward = vec![wide(1), close(ACT, 2, n)];
        let backward = vec![wide(1).result(Outcome::Close), close(ACT, 2, n)];
        cases.push(Case::new(format!("gelu forward of {n}"), forward, |b| {
            GeluForward {
                inp: b[0].clone(),
                out: b[1].clone(),
            }
        }));
        cases.push(Case::new(format!("gelu backward of {n}"), backward, |b| {
            GeluBackward {
                inp_out: b[0].clone(),
                dout_dinp: b[1].clone(),
                makes_out: true,
            }
        }));
        for (from, to) in [(ACT, GRAD), (GRAD, ACT), (F32, Kind::Fixed(DType::Bf16))] {
            let tensors = vec![input(from, 1, n), exact(to, 2, n)];
            cases.push(Case::new(format!("cast of {n}"), tensors, |b| Cast {
                x: b[0].clone(),
                out: b[1].clone(),
            }));
        }
        for kind in [ACT, F32, F64] {
            let tensors = vec![exact(kind, 1, n)];
            cases.push(Case::new(format!("fill of {n}"), tensors, |b| Fill {
                out: b[0].clone(),
                value: 1.5,
            }));
        }
    }
    let unaligned = size == Size::Small;
    let odd = if unaligned {
        elementwise_shifted()
    } else {
        Vec::new()
    };
    cases.into_iter().chain(odd).collect()
}

/// Arenas are cut anywhere.
fn elementwise_shifted() -> Vec<Case> {
    let n = 601;
    let gelu = Case::new(
        format!("gelu forward of {n}"),
        vec![input(ACT, 1, n), close(ACT, 2, n)],
        |b| GeluForward {
            inp: b[0].clone(),
            out: b[1].clone(),
        },
    );
    let fill = Case::new(format!("fill of {n}"), vec![exact(ACT, 1, n)], |b| Fill {
        out: b[0].clone(),
        value: -0.75,
    });
    vec![
        gelu.shifted(3),
        fill.shifted(5),
        adamw(n, true, 1.0, vec![2..3, 7..100]).shifted(1),
    ]
}

/// With and without a residual; channels that are loaded eight at once, and others.
fn dropout(size: Size) -> Vec<Case> {
    let channels: &[usize] = match size {
        Size::Small => &[16, 13],
        Size::Large => &[768],
    };
    let mut cases = Vec::new();
    for &channels in channels {
        for has_residual in [false, true] {
            let (samples, positions) = (2, 19);
            let n = samples * positions * channels;
            let name = format!("dropout of {channels} channels, residual {has_residual}");
            let tensors = vec![input(ACT, 1, n), input(ACT, 2, n), close(ACT, 3, n)];
            cases.push(Case::new(name, tensors, move |b| Dropout {
                inp: b[0].clone(),
                residual: has_residual.then(|| b[1].clone()),
                out: b[2].clone(),
                mask: DropoutMask::new(9, 4, 2, (1 << 33) - 1, 0.3),
                positions,
                channels,
            }));
        }
    }
    cases
}

fn adamw(n: usize, copy: bool, factor: f64, spared: Vec<Range<usize>>) -> Case {
    update(optim::adamw([0.9, 0.95], 1e-8), n, copy, factor, spared)
}

fn update(rule: Arc<UpdateRule>, n: usize, copy: bool, factor: f64, spared: Vec<Range<usize>>) -> Case {
    let mut tensors = vec![
        close(F32, 1, n),
        input(GRAD, 2, n),
        Tensor::new(F32, vec![factor]),
    ];
    // Second moments are positive.
    let slots = [numbers(3, n), positive(4, n)].map(|values| Tensor::new(F32, values).result(Outcome::Close));
    tensors.extend(slots.into_iter().take(rule.slots.len()));
    if copy {
        tensors.push(close(Kind::Fixed(DType::Bf16), 5, n));
    }
    let (kind, ranges) = (rule.name, spared.len());
    let name = format!("{kind} of {n}, factor {factor}, {ranges} ranges spared");
    Case::new(name, tensors, move |b| {
        let (slots, copy) = b[3..].split_at(rule.slots.len());
        Update {
            runs: Runs::sparing(n, &spared, Rates::new(1e-2, 0.1)),
            rule: rule.clone(),
            param: b[0].clone(),
            grad: b[1].clone(),
            scale: b[2].clone(),
            slots: slots.to_vec(),
            copy: copy.first().cloned(),
            step: 3,
        }
    })
}

/// An update whose bias corrections are on the device, and not those of its step.
fn with_bias_corrections(mut case: Case) -> Case {
    case.tensors[2].values.extend([7.5, 2.25]);
    case.name += ", with bias corrections";
    case
}

/// Every rule that has kernels, with every number of slots.
pub(crate) fn rules() -> Vec<Arc<UpdateRule>> {
    vec![
        optim::adamw([0.9, 0.95], 1e-8),
        optim::lion([0.9, 0.99]),
        optim::sgd(0.9, false),
        optim::sgd(0.0, false),
        optim::muon_momentum(0.95, true),
        optim::muon_blend(0.5, 2.0),
        optim::muon_descend(),
    ]
}

fn optimizer(size: Size) -> Vec<Case> {
    let mut cases = Vec::new();
    for &n in lengths(size) {
        cases.push(adamw(n, false, 0.5, vec![]));
        cases.push(adamw(n, true, 1.0, vec![]));
        cases.push(with_bias_corrections(adamw(n, false, 0.5, vec![])));
        for rule in rules() {
            cases.push(update(rule.clone(), n, true, 0.5, vec![0..n / 3, n / 2..n]));
            cases.push(with_bias_corrections(update(rule, n, false, 0.5, vec![])));
        }
    }
    // By packs and one by one, at both ends, and more than one launch is told of.
    let spared = [
        vec![0..16, 512..1536, 3200..5003],
        vec![1..2, 9..1003],
        (0..300).map(|i| 16 * i..16 * i + 8).collect(),
    ];
    cases.extend(spared.map(|spared| adamw(5003, true, 1.0, spared)));
    let lengths = match size {
        Size::Small => vec![5, CHUNK, 9 * CHUNK + 100],
        Size::Large => vec![500 * CHUNK + 8],
    };
    for n in lengths {
        let tensors = vec![input(GRAD, 1, n), exact(F64, 2, n.div_ceil(CHUNK))];
        cases.push(Case::new(format!("squared norm of {n}"), tensors, |b| {
            SquaredNorm {
                x: b[0].clone(),
                partials: b[1].clone(),
            }
        }));
    }
    cases.extend(clip_scale());
    cases
}

/// Updates are counted and their bias corrections computed, or neither where the step is skipped: because a number is not
/// finite, or because an earlier step was skipped, which left NaN as the factor.
fn clip_scale_and_count() -> Vec<Case> {
    let mut cases = Vec::new();
    for before in [0, 1, 6, 1_000_000, i32::MAX] {
        for (witness, factor) in [(1.0, 0.25), (f64::NAN, 0.25), (1.0, f64::NAN)] {
            let tensors = vec![
                Tensor::new(F64, positive(1, 3)),
                Tensor::new(F64, vec![witness]),
                close(F32, 2, 1),
                Tensor::new(F32, vec![factor, 0.5, 0.5]).result(Outcome::Close),
                Tensor::new(I32, vec![f64::from(before)]).result(Outcome::Exact),
            ];
            let name = format!("clip scale after {before} updates, factor {factor}, witness {witness}");
            cases.push(Case::new(name, tensors, |b| ClipScale {
                partials: b[0].clone(),
                order: None,
                witnesses: Some(b[1].clone()),
                max_norm: Some(0.5),
                norm: b[2].clone(),
                scale: b[3].clone(),
                updates: Some(Updates {
                    count: b[4].clone(),
                    betas: [0.9, 0.999],
                }),
            }));
        }
    }
    cases
}

fn clip_scale() -> Vec<Case> {
    let mut cases = clip_scale_and_count();
    for (count, max_norm) in [(3, Some(0.5)), (1700, Some(1e9)), (1700, None)] {
        for witness in [1.0, f64::NAN, f64::INFINITY] {
            // Every fifth chunk has no sum.
            let places = (0..count).rev();
            let order = places.map(|i: usize| if i.is_multiple_of(5) { -1.0 } else { i as f64 });
            let tensors = vec![
                Tensor::new(F64, positive(1, count)),
                Tensor::new(I32, order.collect()),
                Tensor::new(F64, vec![0.5, witness]),
                close(F32, 2, 1),
                close(F32, 3, 1),
            ];
            let name = format!("clip scale of {count} sums, bound {max_norm:?}, witness {witness}");
            let op = move |ordered: bool| {
                move |b: &[Buffer]| ClipScale {
                    partials: b[0].clone(),
                    order: ordered.then(|| b[1].clone()),
                    witnesses: ordered.then(|| b[2].clone()),
                    max_norm,
                    norm: b[3].clone(),
                    scale: b[4].clone(),
                    updates: None,
                }
            };
            cases.push(Case::new(format!("{name}, in order"), tensors.clone(), op(true)));
            cases.push(Case::new(name, tensors, op(false)));
        }
    }
    let mut infinite = vec![0.25; 40];
    infinite[7] = f64::INFINITY;
    let tensors = vec![Tensor::new(F64, infinite), close(F32, 2, 1), close(F32, 3, 1)];
    cases.push(Case::new(
        "clip scale of an infinite norm".to_owned(),
        tensors,
        |b| ClipScale {
            partials: b[0].clone(),
            order: None,
            witnesses: None,
            max_norm: Some(1.0),
            norm: b[1].clone(),
            scale: b[2].clone(),
            updates: None,
        },
    ));
    cases
}

fn encoder(size: Size) -> Vec<Case> {
    // Samples, positions, known positions, channels, vocabulary.
    let sizes: &[[usize; 5]] = match size {
        Size::Small => &[[2, 7, 9, 24, 11], [3, 50, 50, 5, 300], [3, 400, 400, 8, 70_000]],
        // A vocabulary or rows as wide as in training, not both: the host compares in f64.
        Size::Large => &[
            [8, 1024, 1024, 768, 4099],
            [4, 1024, 1024, 64, 50_257],
            [4, 1024, 1024, 1600, 256],
        ],
    };
    let mut cases = Vec::new();
    for &[batch, positions, known, channels, vocab] in sizes {
        let rows = batch * positions;
        let name = format!("{batch} × {positions} × {channels} of {vocab} tokens");
        let ids = || Tensor::new(I32, tokens(1, rows, vocab));
        for has_positions in [true, false] {
            let tensors = vec![
                ids(),
                input(ACT, 2, vocab * channels),
                close(ACT, 3, rows * channels),
                input(ACT, 4, known * channels),
            ];
            let case = Case::new(format!("encoder forward of {name}"), tensors, move |b| {
                EncoderForward {
                    tokens: b[0].clone(),
                    wte: b[1].clone(),
                    out: b[2].clone(),
                    wpe: has_positions.then(|| b[3].clone()),
                    positions,
                    part: None,
                }
            });
            cases.push(case);
        }
        for accumulate in [false, true] {
            let tensors = vec![
                ids(),
                input(ACT, 2, rows * channels),
                close(GRAD, 3, vocab * channels),
            ];
            let case = Case::new(format!("token backward of {name}"), tensors, move |b| {
                TokenBackward {
                    tokens: b[0].clone(),
                    dout: b[1].clone(),
                    dwte: b[2].clone(),
                    accumulate,
                    part: None,
                }
            });
            cases.push(case);
            // One stretch of positions, or two without the first ones.
            for second in [None, Some(positions + 1)] {
                let rows = rows * (1 + usize::from(second.is_some()));
                let known = known + second.unwrap_or(0);
                let tensors = vec![input(ACT, 1, rows * channels), close(GRAD, 2, known * channels)];
                let case = Case::new(
                    format!("position backward of {name}, {second:?}"),
                    tensors,
                    move |b| PositionBackward {
                        dout: b[0].clone(),
                        dwpe: b[1].clone(),
                        accumulate,
                        first: usize::from(second.is_some()),
                        second,
                        positions,
                        channels,
                    },
                );
                cases.push(case);
            }
        }
    }
    cases
}

/// Layer normalisation, and without a bias that by the root mean square.
fn norm(size: Size, has_bias: bool) -> Vec<Case> {
    let sizes: &[[usize; 2]] = match size {
        Size::Small => &[[5, 33], [67, 64], [9, 768], [3, 1600], [2, 1101]],
        Size::Large => &[[8192, 768], [1000, 1600], [4099, 4096], [77, 12_288]],
    };
    let (kind, epsilon) = if has_bias {
        ("layernorm", 1e-5)
    } else {
        ("rmsnorm", 1e-2)
    };
    let mut cases = Vec::new();
    for &[rows, channels] in sizes {
        let n = rows * channels;
        let forward = vec![
            input(ACT, 1, n),
            input(ACT, 2, channels),
            input(ACT, 3, channels),
            close(ACT, 4, n),
        ];
        let name = format!("{kind} forward of {rows} × {channels}");
        cases.push(Case::new(name, forward, move |b| NormForward {
            inp: b[0].clone(),
            weight: b[1].clone(),
            bias: has_bias.then(|| b[2].clone()),
            out: b[3].clone(),
            epsilon,
        }));
        for accumulate in [false, true] {
            let mut backward = vec![
                input(ACT, 1, n),
                input(ACT, 2, n),
                input(ACT, 3, channels),
                close(ACT, 4, n),
                close(GRAD, 5, channels),
            ];
            backward.extend(has_bias.then(|| close(GRAD, 6, channels)));
            let name = format!("{kind} backward of {rows} × {channels}");
            cases.push(Case::new(name, backward, move |b| NormBackward {
                dout: b[0].clone(),
                inp: b[1].clone(),
                weight: b[2].clone(),
                dinp: b[3].clone(),
                dweight: b[4].clone(),
                dbias: has_bias.then(|| b[5].clone()),
                epsilon,
                accumulate_dinp: accumulate,
                accumulate_dweight: accumulate == has_bias,
                accumulate_dbias: !accumulate,
            }));
        }
    }
    cases
}

/// Gates from which the sigmoid is 0 or 1, too; channels that are loaded eight at once, and others.
fn swiglu(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 2]] = match size {
        Size::Small => &[[1, 8], [9, 600], [7, 13]],
        Size::Large => &[[4096, 5632], [1023, 14_336], [5, 8191]],
    };
    let mut cases = Vec::new();
    for &[rows, channels] in sizes {
        let n = rows * channels;
        let name = format!("{rows} × {channels}");
        let wide = || Tensor::new(ACT, numbers(1, 2 * n).iter().map(|x| 24.0 * x).collect());
        let forward = vec![wide(), close(ACT, 2, n)];
        cases.push(Case::new(
            format!("swiglu forward of {name}"),
            forward,
            move |b| SwigluForward {
                inp: b[0].clone(),
                out: b[1].clone(),
                channels,
            },
        ));
        let backward = || {
            let tensors = vec![wide().result(Outcome::Close), close(ACT, 2, n)];
            Case::new(format!("swiglu backward of {name}"), tensors, move |b| {
                SwigluBackward {
                    inp_dinp: b[0].clone(),
                    dout_out: b[1].clone(),
                    channels,
                }
            })
        };
        cases.push(backward());
        if (rows, channels) == (9, 600) {
            cases.push(backward().shifted(3));
        }
    }
    cases
}

fn column_sum(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 2]] = match size {
        Size::Small => &[[1, 8], [1, 5003], [200, 40], [70, 33], [9, 600]],
        Size::Large => &[[8192, 768], [8192, 3072], [4099, 2304], [1, 7_077_888]],
    };
    let mut cases = Vec::new();
    for &[rows, columns] in sizes {
        for accumulate in [false, true] {
            let tensors = vec![input(ACT, 1, rows * columns), close(GRAD, 2, columns)];
            let name = format!("column sum of {rows} × {columns}");
            let case = || {
                Case::new(name.clone(), tensors.clone(), move |b| ColumnSum {
                    x: b[0].clone(),
                    out: b[1].clone(),
                    accumulate,
                })
            };
            cases.push(case());
            if (rows, columns) == (1, 5003) {
                cases.push(case().shifted(3));
            }
        }
    }
    cases
}

fn cross_entropy(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 2]] = match size {
        Size::Small => &[[11, 7], [9, 256], [5, 4099], [3, 20_011]],
        Size::Large => &[[256, 50_257], [256, 50_304], [4096, 256]],
    };
    let mut cases = Vec::new();
    for &[rows, vocab] in sizes {
        let name = format!("{rows} × {vocab}");
        let mut ids = tokens(1, rows, vocab);
        ids[0] = vocab as f64 - 1.0;
        ids[rows / 2] = -1.0;
        let logits: Vec<f64> = numbers(2, rows * vocab).iter().map(|x| 8.0 * x).collect();
        let logits = Tensor::new(ACT, logits);
        let losses = [Tensor::new(I32, ids), close(F32, 3, rows)];
        let alone = [vec![logits.clone()], losses.to_vec()].concat();
        let with_gradient = [
            vec![logits.result(Outcome::Close)],
            losses.to_vec(),
            vec![input(F32, 4, rows)],
        ];
        let gradient = format!("cross entropy and gradient of {name}");
        for (name, tensors) in [
            (format!("cross entropy of {name}"), alone),
            (gradient, with_gradient.concat()),
        ] {
            cases.push(Case::new(name, tensors, |b| CrossEntropy {
                logits: b[0].clone(),
                targets: b[1].clone(),
                losses: b[2].clone(),
                dlosses: b.get(3).cloned(),
            }));
        }
    }
    for accumulate in [false, true] {
        let tensors = vec![input(F32, 1, 5003), close(F64, 2, 1)];
        cases.push(Case::new("loss sum of 5003".to_owned(), tensors, move |b| {
            LossSum {
                losses: b[0].clone(),
                total: b[1].clone(),
                accumulate,
            }
        }));
    }
    cases
}
