//! A layer of experts: gradients against finite differences, the order of rows, and bits that do not depend on how rows
//! are divided among ranks.

use ddp_worker::device::{Buffer, DType, Isa};
use ddp_worker::ops::{
    CombineBackward, GroupedDweight, GroupedLinear, IndexRows, MergedOrder, RouteBackward, RouteForward,
    Router, RouterScore, SortByExpert, WeightLayout, inverse,
};
use half::bf16;

use super::rig::{Rig, check_gradients, numbers, numbers_f32, values, wide_values};

/// Experts, weights and statistics.
fn route(rig: &Rig, router: Router, logits: &[f64]) -> [Buffer; 3] {
    let slots = logits.len() / router.experts * router.top_k;
    let [experts, weights, statistics] = [
        (DType::I32, slots),
        (DType::F64, slots),
        (DType::F64, 3 * router.experts + 1),
    ]
    .map(|(dtype, len)| rig.empty(dtype, len));
    rig.run(RouteForward {
        logits: rig.buffer(logits),
        experts: experts.clone(),
        weights: weights.clone(),
        statistics: statistics.clone(),
        capacity: 1,
        router,
    });
    [experts, weights, statistics]
}

#[test]
fn the_router_with_both_auxiliary_losses() {
    let (rows, experts, top_k) = (9, 5, 2);
    let rig = Rig::new();
    let inputs = [numbers(1, rows * experts)
        .iter()
        .map(|x| 2.0 * x)
        .collect::<Vec<_>>()];
    let load = numbers(2, experts);
    for score in [RouterScore::Softmax, RouterScore::Sigmoid] {
        for normalized in [true, false] {
            let router = Router {
                experts,
                top_k,
                score,
                normalized,
            };
            // The weights, `Σ load · probability` and `Σ lse²`.
            let forward = |inputs: &[Vec<f64>]| {
                let [_, weights, statistics] = route(&rig, router, &inputs[0]);
                let (mut out, statistics) = (values::<f64>(&weights), values::<f64>(&statistics));
                let probabilities = statistics[experts..].iter().zip(&load);
                out.push(probabilities.map(|(probability, load)| load * probability).sum());
                out.push(statistics[2 * experts]);
                out
            };
            let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
                let [chosen, ..] = route(&rig, router, &inputs[0]);
                let logits = rig.buffer(&inputs[0]);
                let (dweights, auxiliary) = dout.split_at(rows * top_k);
                rig.run(RouteBackward {
                    logits_dlogits: logits.clone(),
                    experts: chosen,
                    dweights: rig.buffer(dweights),
                    load: rig.buffer(&load),
                    balance: auxiliary[0] as f32,
                    z: auxiliary[1] as f32,
                    router,
                });
                vec![values(&logits)]
            };
            check_gradients(&inputs, forward, backward);
        }
    }
}

/// By hand: probabilities 0.5, 0.25, 0.25 of the first token, thirds of the second one.
#[test]
fn equal_scores_go_to_the_lowest_expert() {
    let rig = Rig::new();
    let router = Router {
        experts: 3,
        top_k: 2,
        score: RouterScore::Softmax,
        normalized: true,
    };
    let logits = [2.0_f64.ln(), 0.0, 0.0, 1.0, 1.0, 1.0];
    let close = |found: &Buffer, expected: &[f64]| {
        let found = values::<f64>(found);
        assert!(
            found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12),
            "{found:?}"
        );
    };
    let [experts, weights, statistics] = route(&rig, router, &logits);
    assert_eq!(values::<i32>(&experts), [0, 1, 0, 1]);
    close(&weights, &[2.0 / 3.0, 1.0 / 3.0, 0.5, 0.5]);
    let lse = [4.0_f64.ln(), 1.0 + 3.0_f64.ln()].map(|lse| lse * lse);
    let [first, other] = [0.5 + 1.0 / 3.0, 0.25 + 1.0 / 3.0];
    close(
        &statistics,
        &[2.0, 2.0, 0.0, first, other, other, lse[0] + lse[1], 1.0, 1.0, 0.0],
    );
    // Scores that are no numbers still choose different experts.
    let [experts, ..] = route(&rig, router, &[f64::NAN; 3]);
    assert_eq!(values::<i32>(&experts), [0, 1]);
}

/// Offsets, the slot of each row, the row of each slot.
fn sort(rig: &Rig, experts: &[i32], count: usize, capacity: usize) -> [Vec<i32>; 3] {
    let room = experts.len().min(capacity.saturating_mul(count));
    let [counts, offsets, slots, rows] =
        [count, count + 1, room, experts.len()].map(|len| rig.empty(DType::I32, len));
    rig.run(SortByExpert {
        experts: rig.buffer(experts),
        capacity,
        counts: counts.clone(),
        offsets: offsets.clone(),
        slots: slots.clone(),
        rows: rows.clone(),
    });
    let offsets = values::<i32>(&offsets);
    let between: Vec<i32> = offsets.windows(2).map(|pair| pair[1] - pair[0]).collect();
    assert_eq!(values::<i32>(&counts), between);
    [offsets, values(&slots), values(&rows)]
}

#[test]
fn slots_are_sorted_stably_and_those_beyond_the_capacity_are_dropped() {
    let rig = Rig::new();
    let experts = [2, 0, 2, 3, 0, 2];
    let [offsets, slots, rows] = sort(&rig, &experts, 4, usize::MAX);
    assert_eq!(offsets, [0, 2, 2, 5, 6]);
    assert_eq!(slots, [1, 4, 0, 2, 5, 3]);
    assert_eq!(rows, [2, 0, 3, 5, 1, 4]);
    let [offsets, slots, rows] = sort(&rig, &experts, 4, 1);
    assert_eq!(offsets, [0, 1, 1, 2, 3]);
    assert_eq!(slots, [1, 0, 3, -1]);
    assert_eq!(rows, [1, 0, -1, 2, -1, -1]);
}

/// What an expert's rank gets of three ranks is in the order of one rank that has all tokens.
#[test]
fn rows_of_several_ranks_are_in_the_order_of_one() {
    let (rig, count, each) = (Rig::new(), 6, 40);
    let experts: Vec<i32> = numbers(1, 3 * each)
        .iter()
        .map(|x| (x * x * 6.0) as i32)
        .collect();
    let [offsets, slots, _] = sort(&rig, &experts, count, usize::MAX);
    // The last three experts are on one rank.
    let held = 3;
    let sorted: Vec<_> = experts
        .chunks(each)
        .map(|experts| sort(&rig, experts, count, usize::MAX))
        .collect();
    let (mut counts, mut received) = (Vec::new(), Vec::new());
    for (rank, [offsets, slots, _]) in sorted.iter().enumerate() {
        counts.extend(offsets[held..].windows(2).map(|pair| pair[1] - pair[0]));
        let sent = &slots[offsets[held] as usize..];
        received.extend(sent.iter().map(|slot| slot + (rank * each) as i32));
    }
    let order = MergedOrder::new(&counts, held);
    let first = offsets[held];
    assert_eq!(
        order.offsets,
        offsets[held..].iter().map(|row| row - first).collect::<Vec<_>>()
    );
    let merged: Vec<i32> = order.received.iter().map(|&row| received[row as usize]).collect();
    assert_eq!(merged, slots[first as usize..]);
    let back: Vec<i32> = inverse(&order.received)
        .iter()
        .map(|&row| order.received[row as usize])
        .collect();
    assert_eq!(back, (0..received.len() as i32).collect::<Vec<_>>());
    assert_eq!(MergedOrder::new(&[0; 6], held).offsets, [0; 4]);
}

/// To the experts and back, with a dropped slot and a row that does not exist.
#[test]
fn rows_to_the_experts_and_back() {
    let (rig, channels, top_k) = (Rig::new(), 3, 2);
    let (slots, rows) = ([1, 4, 0, 2, 5, -1], [2, 0, 3, -1, 1, 4]);
    let gather = |inp: &[f64], index: &[i32], per: usize, weights: Option<&[f64]>| {
        let top_k = if per == 1 { top_k } else { 1 };
        let out = rig.empty(DType::F64, index.len() / top_k * channels);
        rig.run(IndexRows {
            inp: rig.buffer(inp),
            index: Some(rig.buffer(index)),
            per,
            weights: weights.map(|weights| rig.buffer(weights)),
            out: out.clone(),
            widths: [channels; 2],
            accumulate: false,
        });
        values::<f64>(&out)
    };
    let to_experts = |inputs: &[Vec<f64>]| gather(&inputs[0], &slots, top_k, None);
    check_gradients(&[numbers(1, 3 * channels)], to_experts, |_, dout| {
        vec![gather(dout, &rows, 1, None)]
    });
    let back = |inputs: &[Vec<f64>]| gather(&inputs[0], &rows, 1, Some(&inputs[1]));
    check_gradients(
        &[numbers(2, 6 * channels), numbers(3, 6)],
        back,
        |inputs, dout| {
            let (inp, dweights) = (rig.buffer(&inputs[0]), rig.empty(DType::F64, 6));
            rig.run(CombineBackward {
                dout: rig.buffer(dout),
                slots: rig.buffer(&slots),
                weights: rig.buffer(&inputs[1]),
                inp_dinp: inp.clone(),
                dweights: dweights.clone(),
                channels,
            });
            vec![values(&inp), values(&dweights)]
        },
    );
}

#[test]
fn products_of_groups() {
    let (rig, offsets) = (Rig::new(), [0, 3, 3, 7]);
    let features = [4, 5];
    for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
        let other = if layout == WeightLayout::InOut {
            WeightLayout::OutIn
        } else {
            WeightLayout::InOut
        };
        let product = |inp: &[f64], weight: &[f64], features: [usize; 2], layout| {
            let out = rig.buffer(&vec![7.0; inp.len() / features[0] * features[1]]);
            rig.run(GroupedLinear {
                inp: rig.buffer(inp),
                weight: rig.buffer(weight),
                offsets: rig.buffer(&offsets),
                out: out.clone(),
                features,
                layout,
            });
            values::<f64>(&out)
        };
        let backward = |inputs: &[Vec<f64>], dout: &[f64]| {
            let dweight = rig.buffer(&vec![7.0; inputs[1].len()]);
            let (lhs, rhs, of) = match layout {
                WeightLayout::InOut => (&inputs[0][..], dout, features),
                WeightLayout::OutIn => (dout, &inputs[0][..], [5, 4]),
            };
            for accumulate in [false, true] {
                rig.run(GroupedDweight {
                    lhs: rig.buffer(lhs),
                    rhs: rig.buffer(rhs),
                    offsets: rig.buffer(&offsets),
                    out: dweight.clone(),
                    features: of,
                    accumulate,
                });
            }
            let half = values::<f64>(&dweight).iter().map(|x| x / 2.0).collect();
            vec![product(dout, &inputs[1], [5, 4], other), half]
        };
        // One row behind the last.
        let inputs = [numbers(1, 8 * 4), numbers(2, 3 * 20)];
        check_gradients(
            &inputs,
            |inputs| product(&inputs[0], &inputs[1], features, layout),
            backward,
        );
    }
}

/// The rows of `groups` that have the same weights.
fn product_bits(
    rig: &Rig,
    dtype: DType,
    groups: &[usize],
    (features, layout): ([usize; 2], WeightLayout),
) -> Vec<u64> {
    let buffer = |numbers: Vec<f32>| match dtype {
        DType::F64 => rig.buffer(&numbers.into_iter().map(f64::from).collect::<Vec<_>>()),
        DType::Bf16 => rig.buffer(&numbers.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        _ => rig.buffer(&numbers),
    };
    let (rows, mut offsets) = (groups.iter().sum::<usize>(), vec![0_i32]);
    offsets.extend(groups.iter().scan(0, |end, rows| {
        *end += *rows as i32;
        Some(*end)
    }));
    let out = rig.empty(dtype, rows * features[1]);
    rig.run(GroupedLinear {
        inp: buffer(numbers_f32(1, rows * features[0])),
        weight: buffer(numbers_f32(2, features[0] * features[1]).repeat(groups.len())),
        offsets: rig.buffer(&offsets),
        out: out.clone(),
        features,
        layout,
    });
    wide_values(&out).into_iter().map(f64::to_bits).collect()
}

/// At sizes at which `gemm` has ways of its own: few elements, one row, a long inner dimension, one column over.
#[test]
fn the_bits_of_a_row_do_not_depend_on_the_rows_of_its_expert_or_on_threads() {
    let total = 1100;
    let few: Vec<usize> = [1, 2, 3, 4, 5, 0, 9, 15, 16, 17, 33, 64, 65].into();
    let divided = [few.clone(), vec![total - few.iter().sum::<usize>()]].concat();
    for features in [[3, 2], [8, 16], [40, 257], [513, 33], [1025, 64], [70, 700]] {
        for layout in [WeightLayout::InOut, WeightLayout::OutIn] {
            for dtype in [DType::F32, DType::Bf16, DType::F64] {
                for isa in Isa::available() {
                    let [one, three] = [1, 3].map(|threads| Rig::with(threads, isa));
                    let expected = product_bits(&one, dtype, &[total], (features, layout));
                    for (rig, groups) in [(&one, &divided), (&three, &divided), (&three, &vec![total])] {
                        let found = product_bits(rig, dtype, groups, (features, layout));
                        let differ = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
                        assert_eq!(
                            differ,
                            0,
                            "{features:?}, {layout:?}, {dtype}, {isa}, {} groups",
                            groups.len()
                        );
                    }
                }
            }
        }
    }
}
