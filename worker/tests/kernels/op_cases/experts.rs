//! Operations of a layer of experts: routers, orders of rows, rows that are gathered and added, grouped products.

use ddp_worker::device::DType;
use ddp_worker::ops::{
    CombineBackward, GroupedDweight, GroupedLinear, IndexRows, RouteBackward, RouteForward, Router,
    RouterScore, SortByExpert, WeightLayout,
};

use super::matrix::tensor;
use super::numbers::{numbers, tokens};
use super::{Case, Kind, Outcome, Size, Tensor};

const ACT: Kind = Kind::Act;
const GRAD: Kind = Kind::Grad;
const F32: Kind = Kind::Fixed(DType::F32);
const I32: Kind = Kind::Fixed(DType::I32);

pub(super) fn experts(size: Size) -> Vec<Case> {
    let of_all = [
        routers(size),
        orders(size),
        gathers(size),
        combines(size),
        products(size),
    ];
    of_all.into_iter().flatten().collect()
}

fn integers(values: impl IntoIterator<Item = usize>) -> Tensor {
    Tensor::new(I32, values.into_iter().map(|x| x as f64).collect())
}

/// Results of which nothing is read.
fn results(kind: Kind, len: usize, outcome: Outcome) -> Tensor {
    tensor(kind, 9, len, outcome)
}

fn routers(size: Size) -> Vec<Case> {
    // Rows, experts, choices.
    let sizes: &[[usize; 3]] = match size {
        Size::Small => &[[5, 3, 1], [70, 8, 2], [9, 40, 6], [3, 1, 1]],
        Size::Large => &[[8192, 64, 8], [4096, 256, 8]],
    };
    let mut cases = Vec::new();
    for &[rows, experts, top_k] in sizes {
        for (score, normalized) in [
            (RouterScore::Softmax, true),
            (RouterScore::Sigmoid, true),
            (RouterScore::Softmax, false),
        ] {
            let router = Router {
                experts,
                top_k,
                score,
                // One weight alone would be 1, and have no gradient.
                normalized: normalized && top_k > 1,
            };
            let logits: Vec<f64> = numbers(1, rows * experts).iter().map(|x| 3.0 * x).collect();
            for extra in [false, true] {
                let name = format!("of {rows} rows by {router:?}, capacity or z-loss {extra}");
                let forward = vec![
                    Tensor::new(ACT, logits.clone()),
                    results(I32, rows * top_k, Outcome::Close),
                    results(F32, rows * top_k, Outcome::Close),
                    results(F32, 3 * experts + 1, Outcome::Close),
                ];
                cases.push(Case::new(format!("route forward {name}"), forward, move |b| {
                    RouteForward {
                        logits: b[0].clone(),
                        experts: b[1].clone(),
                        weights: b[2].clone(),
                        statistics: b[3].clone(),
                        capacity: if extra { rows / 3 } else { usize::MAX },
                        router,
                    }
                }));
                let chosen = (0..rows * top_k).map(|slot| (slot / top_k * 7 + slot % top_k) % experts);
                let backward = vec![
                    Tensor::new(ACT, logits.clone()).result(Outcome::Close),
                    integers(chosen),
                    tensor(F32, 3, rows * top_k, Outcome::Same),
                    Tensor::new(F32, tokens(4, experts, 9)),
                ];
                cases.push(Case::new(format!("route backward {name}"), backward, move |b| {
                    RouteBackward {
                        logits_dlogits: b[0].clone(),
                        experts: b[1].clone(),
                        dweights: b[2].clone(),
                        load: b[3].clone(),
                        balance: 0.01,
                        z: if extra { 0.03 } else { 0.0 },
                        router,
                    }
                }));
            }
        }
    }
    cases
}

fn orders(size: Size) -> Vec<Case> {
    // Rows, choices, experts of which the last ones are rare.
    let sizes: &[[usize; 3]] = match size {
        Size::Small => &[[1, 1, 1], [150, 2, 5], [300, 3, 300]],
        Size::Large => &[[8192, 8, 64]],
    };
    let mut cases = Vec::new();
    for &[rows, top_k, experts] in sizes {
        let slots = rows * top_k;
        for capacity in [usize::MAX, 0, slots / experts] {
            let room = match capacity {
                usize::MAX => slots + 3,
                _ => slots.min(experts * capacity),
            };
            let tensors = vec![
                Tensor::new(I32, tokens(1, slots, experts)),
                results(I32, experts, Outcome::Exact),
                results(I32, experts + 1, Outcome::Exact),
                results(I32, room, Outcome::Exact),
                results(I32, slots, Outcome::Exact),
            ];
            let name = format!("sort {rows} × {top_k} by {experts} experts, capacity {capacity}");
            cases.push(Case::new(name, tensors, move |b| SortByExpert {
                experts: b[0].clone(),
                capacity,
                counts: b[1].clone(),
                offsets: b[2].clone(),
                slots: b[3].clone(),
                rows: b[4].clone(),
            }));
        }
    }
    cases
}

/// `count` indices. Each below `end` comes at most once; every fifth, and those behind `end`, are −1.
fn indices(count: usize, end: usize) -> Tensor {
    let index = |i: usize| {
        if i % 5 == 4 || i >= end {
            -1.0
        } else {
            ((7 * i + 3) % end) as f64
        }
    };
    assert!(!end.is_multiple_of(7), "each once");
    Tensor::new(I32, (0..count).map(index).collect())
}

fn gathers(size: Size) -> Vec<Case> {
    // Rows, indices of one, rows that are read, indices of one of them, channels.
    let sizes: &[[usize; 5]] = match size {
        Size::Small => &[[40, 1, 10, 3, 24], [30, 2, 61, 1, 5], [3, 3, 2, 1, 400]],
        Size::Large => &[[16_384, 1, 8191, 2, 1024], [8192, 2, 16_384, 1, 1024]],
    };
    let mut cases = Vec::new();
    for &[rows, top_k, sources, per, channels] in sizes {
        for (weighted, accumulate) in [(false, false), (true, false), (true, true)] {
            let tensors = vec![
                tensor(ACT, 1, sources * channels, Outcome::Same),
                indices(rows * top_k, sources * per),
                tensor(F32, 3, rows * top_k, Outcome::Same),
                tensor(ACT, 5, rows * channels, Outcome::Close),
            ];
            let name = format!(
                "index {rows} × {channels} of {sources}, weights {weighted}, accumulate {accumulate}"
            );
            cases.push(Case::new(name, tensors, move |b| IndexRows {
                inp: b[0].clone(),
                index: Some(b[1].clone()),
                per,
                weights: weighted.then(|| b[2].clone()),
                out: b[3].clone(),
                widths: [channels; 2],
                accumulate,
            }));
        }
        // The last columns of longer rows, by indices and as they are.
        for (widths, is_indexed, accumulate) in [
            ([3 * channels, channels], false, false),
            ([channels, 2 * channels], false, true),
            ([2 * channels, channels], true, false),
        ] {
            let read = if is_indexed { sources * per } else { rows };
            let tensors = vec![
                tensor(ACT, 1, read * widths[0], Outcome::Same),
                indices(rows, sources * per),
                tensor(ACT, 5, rows * widths[1], Outcome::Close),
            ];
            let name = format!("columns of {rows} rows of {widths:?}, indices {is_indexed}");
            cases.push(Case::new(name, tensors, move |b| IndexRows {
                inp: b[0].clone(),
                index: is_indexed.then(|| b[1].clone()),
                per: 1,
                weights: None,
                out: b[2].clone(),
                widths,
                accumulate,
            }));
        }
    }
    cases
}

fn combines(size: Size) -> Vec<Case> {
    // Tokens, choices, rows, channels.
    let sizes: &[[usize; 4]] = match size {
        Size::Small => &[[31, 2, 50, 24], [5, 1, 9, 401], [4, 4, 16, 3]],
        Size::Large => &[[8191, 2, 16_384, 1024]],
    };
    let case = |&[rows, top_k, moved, channels]: &[usize; 4]| {
        let slots = rows * top_k;
        let tensors = vec![
            tensor(ACT, 1, rows * channels, Outcome::Same),
            indices(moved, slots),
            tensor(F32, 3, slots, Outcome::Same),
            tensor(ACT, 4, moved * channels, Outcome::Close),
            results(F32, slots, Outcome::Close),
        ];
        let name = format!("combine backward of {moved} × {channels} for {rows} × {top_k}");
        Case::new(name, tensors, move |b| CombineBackward {
            dout: b[0].clone(),
            slots: b[1].clone(),
            weights: b[2].clone(),
            inp_dinp: b[3].clone(),
            dweights: b[4].clone(),
            channels,
        })
    };
    sizes.iter().map(case).collect()
}

/// Rows of each expert, among them none and one, and rows behind the last.
fn products(size: Size) -> Vec<Case> {
    let sizes: &[(&[usize], [usize; 2])] = match size {
        Size::Small => &[
            (&[3, 0, 70, 1, 9], [5, 7]),
            (&[0, 130], [70, 96]),
            (&[0, 0], [8, 8]),
        ],
        Size::Large => &[(&[1000, 24, 0, 3072, 513], [768, 1030])],
    };
    let mut cases = Vec::new();
    for &(groups, features) in sizes {
        let [inputs, outputs] = features;
        let ends = groups.iter().scan(0, |end, rows| {
            *end += rows;
            Some(*end)
        });
        let offsets: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let (rows, weights) = (offsets[groups.len()] + 6, groups.len() * inputs * outputs);
        for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
            let tensors = vec![
                tensor(ACT, 1, rows * inputs, Outcome::Same),
                tensor(ACT, 2, weights, Outcome::Same),
                integers(offsets.iter().copied()),
                tensor(ACT, 3, rows * outputs, Outcome::Products),
            ];
            let name = format!("grouped linear of {groups:?} rows, {features:?}, {layout:?}");
            cases.push(Case::new(name, tensors, move |b| GroupedLinear {
                inp: b[0].clone(),
                weight: b[1].clone(),
                offsets: b[2].clone(),
                out: b[3].clone(),
                features,
                layout,
            }));
        }
        for accumulate in [false, true] {
            let tensors = vec![
                tensor(ACT, 1, rows * inputs, Outcome::Same),
                tensor(ACT, 2, rows * outputs, Outcome::Same),
                integers(offsets.iter().copied()),
                tensor(GRAD, 3, weights, Outcome::Products),
            ];
            let name = format!("grouped dweight of {groups:?} rows, {features:?}, accumulate {accumulate}");
            cases.push(Case::new(name, tensors, move |b| GroupedDweight {
                lhs: b[0].clone(),
                rhs: b[1].clone(),
                offsets: b[2].clone(),
                out: b[3].clone(),
                features,
                accumulate,
            }));
        }
    }
    cases
}
