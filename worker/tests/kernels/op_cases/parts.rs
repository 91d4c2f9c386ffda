//! Operations on what one rank of a tensor group holds: rows of the vocabulary, logits, rows of the stream, heads.

use ddp_worker::device::DType;
use ddp_worker::ops::{
    AddBiasResidual, CrossEntropyCombine, CrossEntropyPartial, Dropout, DropoutMask, EncoderForward,
    TokenBackward, VocabularyPart,
};

use super::numbers::{numbers, positive, tokens};
use super::{Case, Kind, Outcome, Size, Tensor};

const ACT: Kind = Kind::Act;
const GRAD: Kind = Kind::Grad;
const F32: Kind = Kind::Fixed(DType::F32);
const I32: Kind = Kind::Fixed(DType::I32);

pub(super) fn parts(size: Size) -> Vec<Case> {
    [
        embedding(size),
        cross_entropy(size),
        dropout(size),
        add_bias_residual(size),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn tensor(kind: Kind, seed: u64, len: usize, outcome: Outcome) -> Tensor {
    Tensor::new(kind, numbers(seed, len)).result(outcome)
}

/// The first part, one in the middle, the last, and one of a single token.
fn of_vocabulary(whole: usize) -> [VocabularyPart; 4] {
    let third = whole / 3;
    [(0, third), (third, third), (2 * third, whole - 2 * third), (1, 1)].map(|(first, held)| VocabularyPart {
        first,
        held,
        whole,
    })
}

fn embedding(size: Size) -> Vec<Case> {
    // Rows, positions, channels, vocabulary.
    let sizes: &[[usize; 4]] = match size {
        Size::Small => &[[14, 7, 24, 12], [150, 50, 5, 300], [1200, 400, 8, 70_000]],
        Size::Large => &[[8192, 1024, 768, 4099], [4096, 1024, 64, 50_257]],
    };
    let mut cases = Vec::new();
    for &[rows, positions, channels, vocab] in sizes {
        for part in of_vocabulary(vocab) {
            let name = format!("{rows} × {channels} by {part:?}");
            let ids = || Tensor::new(I32, tokens(1, rows, vocab));
            for has_positions in [true, false] {
                let tensors = vec![
                    ids(),
                    tensor(ACT, 2, part.held * channels, Outcome::Same),
                    tensor(ACT, 3, rows * channels, Outcome::Close),
                    tensor(ACT, 4, positions * channels, Outcome::Same),
                ];
                let name = format!("encoder forward of {name}, positions {has_positions}");
                cases.push(Case::new(name, tensors, move |b| EncoderForward {
                    tokens: b[0].clone(),
                    wte: b[1].clone(),
                    out: b[2].clone(),
                    wpe: has_positions.then(|| b[3].clone()),
                    positions,
                    part: Some(part),
                }));
            }
            for accumulate in [false, true] {
                let tensors = vec![
                    ids(),
                    tensor(ACT, 2, rows * channels, Outcome::Same),
                    tensor(GRAD, 3, part.held * channels, Outcome::Close),
                ];
                let name = format!("token backward of {name}, accumulate {accumulate}");
                cases.push(Case::new(name, tensors, move |b| TokenBackward {
                    tokens: b[0].clone(),
                    dout: b[1].clone(),
                    dwte: b[2].clone(),
                    accumulate,
                    part: Some(part),
                }));
            }
        }
    }
    cases
}

/// Targets of the first token, the last one, one in the middle; one is ignored.
fn targets(rows: usize, vocab: usize) -> Tensor {
    let mut ids = tokens(1, rows, vocab);
    ids[0] = vocab as f64 - 1.0;
    ids[1] = 0.0;
    ids[2] = (vocab / 2) as f64;
    ids[rows - 1] = -1.0;
    Tensor::new(I32, ids)
}

fn cross_entropy(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 2]] = match size {
        Size::Small => &[[11, 7], [9, 256], [5, 12_297], [4, 60_033]],
        Size::Large => &[[256, 50_257], [4096, 256]],
    };
    let mut cases = Vec::new();
    for &[rows, vocab] in sizes {
        for part in of_vocabulary(vocab) {
            let n = rows * part.held;
            let logits: Vec<f64> = numbers(2, n).iter().map(|x| 8.0 * x).collect();
            let tensors = vec![
                Tensor::new(ACT, logits.clone()),
                targets(rows, vocab),
                tensor(F32, 3, 3 * rows, Outcome::Close),
            ];
            let name = format!("cross entropy partial of {rows} rows by {part:?}");
            cases.push(Case::new(name, tensors, move |b| CrossEntropyPartial {
                logits: b[0].clone(),
                targets: b[1].clone(),
                statistics: b[2].clone(),
                part,
            }));
            for has_gradient in [false, true] {
                let outcome = if has_gradient {
                    Outcome::Close
                } else {
                    Outcome::Same
                };
                let tensors = vec![
                    Tensor::new(ACT, logits.clone()).result(outcome),
                    Tensor::new(F32, statistics(3, rows)),
                    targets(rows, vocab),
                    tensor(F32, 5, rows, Outcome::Close),
                    tensor(F32, 6, rows, Outcome::Same),
                ];
                let name =
                    format!("cross entropy combine of {rows} rows by {part:?}, gradient {has_gradient}");
                cases.push(Case::new(name, tensors, move |b| CrossEntropyCombine {
                    logits: b[0].clone(),
                    statistics: b[1].clone(),
                    targets: b[2].clone(),
                    losses: b[3].clone(),
                    dlosses: has_gradient.then(|| b[4].clone()),
                    part,
                }));
            }
        }
    }
    cases
}

/// What so many parts may have: maxima, sums of at least one, and logits of targets.
fn statistics(parts: usize, rows: usize) -> Vec<f64> {
    let all = numbers(7, parts * rows)
        .into_iter()
        .zip(positive(8, parts * rows));
    let each = all.map(|(x, sum)| [8.0 + x, 1.0 + 30.0 * sum, x]);
    each.flatten().collect()
}

/// Rows of the stream that begin and end within a sample.
fn dropout(size: Size) -> Vec<Case> {
    let (positions, rows) = (19, 23);
    let channels: &[usize] = match size {
        Size::Small => &[16, 13],
        Size::Large => &[768],
    };
    let cases = channels.iter().map(|&channels| {
        let n = rows * channels;
        let tensors = vec![
            tensor(ACT, 1, n, Outcome::Same),
            tensor(ACT, 2, n, Outcome::Same),
            tensor(ACT, 3, n, Outcome::Close),
        ];
        let name = format!("dropout of rows 30..53, {channels} channels");
        Case::new(name, tensors, move |b| Dropout {
            inp: b[0].clone(),
            residual: Some(b[1].clone()),
            out: b[2].clone(),
            mask: DropoutMask::new(9, 4, 2, (1 << 33) - 1, 0.3).of_part(30),
            positions,
            channels,
        })
    });
    cases.collect()
}

/// All that may be absent; columns that are loaded eight at once, and others; in place.
fn add_bias_residual(size: Size) -> Vec<Case> {
    let sizes: &[[usize; 2]] = match size {
        Size::Small => &[[5, 33], [67, 64], [3, 1600]],
        Size::Large => &[[8192, 768], [4099, 1001]],
    };
    let mut cases = Vec::new();
    for &[rows, columns] in sizes {
        for [has_bias, has_residual, in_place] in (0..8).map(|i| [1, 2, 4].map(|bit| i & bit != 0)) {
            let n = rows * columns;
            let tensors = vec![
                tensor(ACT, 1, n, if in_place { Outcome::Close } else { Outcome::Same }),
                tensor(ACT, 2, columns, Outcome::Same),
                tensor(ACT, 3, n, Outcome::Same),
                tensor(ACT, 4, n, if in_place { Outcome::Same } else { Outcome::Close }),
            ];
            let name = format!(
                "add bias {has_bias}, residual {has_residual} to {rows} × {columns}, in place {in_place}"
            );
            let case = Case::new(name, tensors, move |b| AddBiasResidual {
                inp: b[0].clone(),
                bias: has_bias.then(|| b[1].clone()),
                residual: has_residual.then(|| b[2].clone()),
                out: b[if in_place { 0 } else { 3 }].clone(),
            });
            cases.push(case);
        }
    }
    cases
}
