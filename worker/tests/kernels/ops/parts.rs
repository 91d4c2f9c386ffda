//! What the ranks of a tensor group compute of their parts is what one rank computes of the whole: embedding and loss by
//! parts of the vocabulary, masks of dropout by rows and by heads, and what is added after a sum over the ranks.

use ddp_worker::device::{Buffer, DType};
use ddp_worker::ops::{
    AddBiasResidual, CrossEntropy, CrossEntropyCombine, CrossEntropyPartial, EncoderForward, LinearForward,
    LinearShape, TokenBackward, VocabularyPart, WeightLayout,
};
use half::bf16;

use super::rig::{Rig, numbers_f32, values};

/// A vocabulary in so many parts, the last one longer where they do not divide it.
fn parts(whole: usize, count: usize) -> Vec<VocabularyPart> {
    let each = whole / count;
    let part = |rank| {
        let first = rank * each;
        let end = if rank + 1 == count { whole } else { first + each };
        VocabularyPart {
            first,
            held: end - first,
            whole,
        }
    };
    (0..count).map(part).collect()
}

/// The columns of a part, of rows of the whole vocabulary.
fn columns<T: Copy>(rows: &[T], part: VocabularyPart) -> Vec<T> {
    let rows = rows.chunks_exact(part.whole);
    rows.flat_map(|row| row[part.first..part.first + part.held].to_vec())
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

const TOKENS: [i32; 8] = [0, 11, 5, 5, 2, 11, 8, 3];
const POSITIONS: usize = 4;
const CHANNELS: usize = 6;
const VOCAB: usize = 12;

/// Zeros of both signs among them.
fn table(seed: u64, rows: usize) -> Vec<f32> {
    let mut table = numbers_f32(seed, rows * CHANNELS);
    for (i, x) in table.iter_mut().enumerate() {
        *x = match i % 5 {
            0 => 0.0,
            1 => -0.0,
            _ => bf16::from_f32(*x).to_f32(),
        };
    }
    table
}

fn stored(rig: &Rig, dtype: DType, values: &[f32]) -> Buffer {
    match dtype {
        DType::Bf16 => rig.buffer(&values.iter().map(|&x| bf16::from_f32(x)).collect::<Vec<_>>()),
        _ => rig.buffer(values),
    }
}

fn read(buffer: &Buffer) -> Vec<f32> {
    match buffer.dtype() {
        DType::Bf16 => values::<bf16>(buffer).into_iter().map(f32::from).collect(),
        _ => values(buffer),
    }
}

/// The rows of the tokens, with positions or without.
fn embed(dtype: DType, wte: &[f32], wpe: Option<&[f32]>, part: Option<VocabularyPart>) -> Vec<f32> {
    let rig = Rig::new();
    let out = rig.empty(dtype, TOKENS.len() * CHANNELS);
    rig.run(EncoderForward {
        tokens: rig.buffer(&TOKENS),
        wte: stored(&rig, dtype, wte),
        wpe: wpe.map(|wpe| stored(&rig, dtype, wpe)),
        out: out.clone(),
        positions: POSITIONS,
        part,
    });
    read(&out)
}

#[test]
fn an_embedding_summed_over_parts_has_the_bits_of_the_whole() {
    let (wte, wpe) = (table(1, VOCAB), table(2, POSITIONS));
    for dtype in [DType::F32, DType::Bf16] {
        for wpe in [Some(&wpe[..]), None] {
            let whole = embed(dtype, &wte, wpe, None);
            for count in [1, 2, 3, 4, 5, 12] {
                // As an all-reduce does: in rank order, in f32, rounded once.
                let of_rank = |part: VocabularyPart| {
                    let rows = &wte[part.first * CHANNELS..][..part.held * CHANNELS];
                    embed(dtype, rows, wpe.filter(|_| part.first == 0), Some(part))
                };
                let ranks = parts(VOCAB, count).into_iter().map(of_rank);
                let sum = ranks.reduce(|sum, own| sum.iter().zip(own).map(|(a, b)| a + b).collect());
                let mut sum = sum.unwrap();
                if dtype == DType::Bf16 {
                    for x in &mut *sum {
                        *x = bf16::from_f32(*x).to_f32();
                    }
                }
                assert_eq!(bits(&sum), bits(&whole), "{dtype}, {count} parts");
            }
        }
    }
}

/// Gradients of the rows of a part, on top of what is there or instead of it.
fn embed_backward(dtype: DType, dout: &[f32], accumulate: bool, part: Option<VocabularyPart>) -> Vec<f32> {
    let rig = Rig::new();
    let before = table(4, VOCAB);
    let rows = part.map_or(0..VOCAB, |part| part.first..part.first + part.held);
    let dwte = rig.buffer(&before[rows.start * CHANNELS..rows.end * CHANNELS]);
    rig.run(TokenBackward {
        tokens: rig.buffer(&TOKENS),
        dout: stored(&rig, dtype, dout),
        dwte: dwte.clone(),
        accumulate,
        part,
    });
    read(&dwte)
}

#[test]
fn gradients_of_a_parts_rows_are_those_of_the_whole_table() {
    let dout = table(3, TOKENS.len());
    for dtype in [DType::F32, DType::Bf16] {
        for accumulate in [false, true] {
            let whole = embed_backward(dtype, &dout, accumulate, None);
            for count in [1, 2, 3, 4, 12] {
                let own = |part| embed_backward(dtype, &dout, accumulate, Some(part));
                let joined: Vec<f32> = parts(VOCAB, count).into_iter().flat_map(own).collect();
                assert_eq!(bits(&joined), bits(&whole), "{dtype}, {count} parts");
            }
        }
    }
}

/// Losses and gradients of whole rows of logits.
fn cross_entropy(logits: &[f32], targets: &[i32], dlosses: &[f32]) -> [Vec<f32>; 2] {
    let rig = Rig::new();
    let (logits, losses) = (rig.buffer(logits), rig.empty(DType::F32, targets.len()));
    rig.run(CrossEntropy {
        logits: logits.clone(),
        targets: rig.buffer(targets),
        losses: losses.clone(),
        dlosses: Some(rig.buffer(dlosses)),
    });
    [values(&losses), values(&logits)]
}

/// The same by ranks that hold a part of the logits each: each one's losses, in training and in validation, and the
/// gradient of its part.
fn by_parts(
    parts: &[VocabularyPart],
    logits: &[f32],
    (targets, dlosses): (&[i32], &[f32]),
) -> Vec<[Vec<f32>; 3]> {
    let rig = Rig::new();
    let (rows, targets) = (targets.len(), rig.buffer(targets));
    let statistics = rig.empty(DType::F32, parts.len() * rows * 3);
    let own: Vec<Buffer> = parts
        .iter()
        .map(|part| rig.buffer(&columns(logits, *part)))
        .collect();
    for (rank, (&part, logits)) in parts.iter().zip(&own).enumerate() {
        rig.run(CrossEntropyPartial {
            logits: logits.clone(),
            targets: targets.clone(),
            statistics: statistics.slice(rank * rows * 3..(rank + 1) * rows * 3),
            part,
        });
    }
    let combine = |logits: &Buffer, part, dlosses| {
        let losses = rig.empty(DType::F32, rows);
        rig.run(CrossEntropyCombine {
            logits: logits.clone(),
            statistics: statistics.clone(),
            targets: targets.clone(),
            losses: losses.clone(),
            dlosses,
            part,
        });
        values::<f32>(&losses)
    };
    let ranks = parts.iter().zip(&own).map(|(&part, logits)| {
        let before = values::<f32>(logits);
        let validation = combine(logits, part, None);
        assert_eq!(bits(&values(logits)), bits(&before), "only read");
        let training = combine(logits, part, Some(rig.buffer(dlosses)));
        [training, validation, values(logits)]
    });
    ranks.collect()
}

/// Megatron-LM's `test_vocab_parallel_cross_entropy`, with ignored targets and rows whose logits differ much: to 1e-6 of
/// the largest logit, which is what the logarithm of a sum is rounded by.
#[test]
fn vocabulary_parallel_cross_entropy_is_that_of_the_whole_vocabulary() {
    let (rows, vocab) = (34, 24);
    let scales = [1.0, 13.0, 100.0, 3000.0];
    let logits: Vec<f32> = numbers_f32(1, rows * vocab)
        .iter()
        .enumerate()
        .map(|(i, x)| x * scales[i / vocab % scales.len()])
        .collect();
    let targets: Vec<i32> = (0..rows as i32)
        .map(|row| if row % 7 == 3 { -1 } else { row * 5 % vocab as i32 })
        .collect();
    let dlosses: Vec<f32> = numbers_f32(2, rows);
    let [losses, gradients] = cross_entropy(&logits, &targets, &dlosses);
    for count in [1, 2, 3, 4, 5, 24] {
        let parts = parts(vocab, count);
        let ranks = by_parts(&parts, &logits, (&targets, &dlosses));
        for (part, [training, validation, own]) in parts.iter().zip(&ranks) {
            assert_eq!(bits(training), bits(validation), "{count} parts");
            assert_eq!(
                bits(training),
                bits(&ranks[0][0]),
                "all ranks have the same losses"
            );
            for (row, (found, expected)) in training.iter().zip(&losses).enumerate() {
                assert!(
                    (found - expected).abs() <= 1e-6 * scales[row % scales.len()],
                    "{count} parts, row {row}: loss {found}, expected {expected}"
                );
                assert!(targets[row] >= 0 || *found == 0.0, "an ignored target has a loss");
            }
            for (i, (found, expected)) in own.iter().zip(columns(&gradients, *part)).enumerate() {
                assert!(
                    (found - expected).abs() <= 1e-6 * scales[i / part.held % scales.len()],
                    "{part:?}, element {i}: gradient {found}, expected {expected}"
                );
                assert!(
                    targets[i / part.held] >= 0 || *found == 0.0,
                    "an ignored target has a gradient"
                );
            }
        }
        if count == 1 {
            let [found, _, own] = &ranks[0];
            assert_eq!((bits(found), bits(own)), (bits(&losses), bits(&gradients)));
        }
    }
}

#[test]
fn what_is_not_a_number_in_one_part_is_the_loss_of_its_row_on_every_rank() {
    let (rows, vocab) = (4, 9);
    let mut logits = numbers_f32(1, rows * vocab);
    logits[vocab + 4] = f32::NAN;
    logits[2 * vocab + 8] = f32::INFINITY;
    let ranks = by_parts(&parts(vocab, 3), &logits, (&[0, 0, 0, 0], &[1.0; 4]));
    for [losses, _, _] in ranks {
        let finite: Vec<bool> = losses.iter().map(|loss| loss.is_finite()).collect();
        assert_eq!(finite, [true, false, false, true]);
    }
}

const fn part(first: usize, held: usize, whole: usize) -> VocabularyPart {
    VocabularyPart { first, held, whole }
}

#[test]
fn parts_of_a_table_that_do_not_fit_are_named() {
    let rig = Rig::new();
    let f32s = |n| rig.empty(DType::F32, n);
    let encoder = |token: i32, rows: usize, part| {
        let encoder = EncoderForward {
            tokens: rig.buffer(&[token]),
            wte: f32s(2 * rows),
            wpe: None,
            out: f32s(2),
            positions: 1,
            part: Some(part),
        };
        rig.try_run(encoder).unwrap_err().to_string()
    };
    insta::assert_snapshot!(encoder(10, 4, part(4, 4, 10)), @"operation `encoder_forward`: `tokens[0]` is 10, expected less than 10");
    insta::assert_snapshot!(encoder(0, 3, part(4, 4, 10)), @"operation `encoder_forward`: `wte` holds 3 tokens, expected 4");
    insta::assert_snapshot!(encoder(0, 4, part(8, 4, 10)), @"operation `encoder_forward`: 4 tokens from token 8 on are not a valid part of a vocabulary of 10");
    insta::assert_snapshot!(encoder(0, 0, part(8, 0, 10)), @"operation `encoder_forward`: 0 tokens from token 8 on are not a valid part of a vocabulary of 10");
    let backward = TokenBackward {
        tokens: rig.buffer(&[-1]),
        dout: f32s(2),
        dwte: f32s(8),
        accumulate: false,
        part: Some(part(4, 4, 10)),
    };
    insta::assert_snapshot!(rig.try_run(backward).unwrap_err(), @"operation `token_backward`: `tokens[0]` is -1, expected at least 0");
}

#[test]
fn parts_of_logits_that_do_not_fit_are_named() {
    let rig = Rig::new();
    let f32s = |n| rig.empty(DType::F32, n);
    let partial = |target: i32, [logits, statistics]: [usize; 2], part| {
        let partial = CrossEntropyPartial {
            logits: f32s(logits),
            targets: rig.buffer(&[0, target]),
            statistics: f32s(statistics),
            part,
        };
        rig.try_run(partial).unwrap_err().to_string()
    };
    insta::assert_snapshot!(partial(10, [8, 6], part(4, 4, 10)), @"operation `cross_entropy_partial`: `targets[1]` is 10, expected less than 10");
    insta::assert_snapshot!(partial(0, [9, 6], part(4, 4, 10)), @"operation `cross_entropy_partial`: `logits` has 9 elements, expected 8");
    insta::assert_snapshot!(partial(0, [8, 7], part(4, 4, 10)), @"operation `cross_entropy_partial`: `statistics` has 7 elements, expected 6");
    insta::assert_snapshot!(partial(0, [8, 6], part(7, 4, 10)), @"operation `cross_entropy_partial`: 4 tokens from token 7 on are not a valid part of a vocabulary of 10");

    let combine = |target: i32, [statistics, losses, dlosses]: [usize; 3]| {
        let combine = CrossEntropyCombine {
            logits: f32s(8),
            statistics: f32s(statistics),
            targets: rig.buffer(&[0, target]),
            losses: f32s(losses),
            dlosses: Some(f32s(dlosses)),
            part: part(4, 4, 10),
        };
        rig.try_run(combine).unwrap_err().to_string()
    };
    insta::assert_snapshot!(combine(11, [12, 2, 2]), @"operation `cross_entropy_combine`: `targets[1]` is 11, expected less than 10");
    insta::assert_snapshot!(combine(0, [13, 2, 2]), @"operation `cross_entropy_combine`: `statistics` has 13 elements, expected 12");
    insta::assert_snapshot!(combine(0, [0, 2, 2]), @"operation `cross_entropy_combine`: `statistics` has 0 elements, expected 6");
    insta::assert_snapshot!(combine(0, [12, 3, 2]), @"operation `cross_entropy_combine`: `losses` has 3 elements, expected 2");
    insta::assert_snapshot!(combine(0, [12, 2, 1]), @"operation `cross_entropy_combine`: `dlosses` has 1 elements, expected 2");
}

/// What a layer adds to its product, added after a sum over ranks: with one rank the bits of the layer.
#[test]
fn bias_and_residual_are_added_in_the_order_of_a_linear_layer() {
    let (rows, inputs, outputs) = (70, 9, 300);
    let rig = Rig::new();
    let shape = LinearShape {
        rows,
        inputs,
        outputs,
        layout: WeightLayout::InOut,
    };
    let linear = |bias: Option<&Buffer>, residual: Option<&Buffer>| {
        let out = rig.empty(DType::F32, rows * outputs);
        rig.run(LinearForward {
            inp: rig.buffer(&numbers_f32(1, rows * inputs)),
            weight: rig.buffer(&numbers_f32(2, inputs * outputs)),
            bias: bias.cloned(),
            residual: residual.cloned(),
            out: out.clone(),
            exact: false,
            shape,
        });
        out
    };
    let (bias, residual) = (
        rig.buffer(&numbers_f32(3, outputs)),
        rig.buffer(&numbers_f32(4, rows * outputs)),
    );
    for bias in [None, Some(&bias)] {
        for residual in [None, Some(&residual)] {
            let expected = values::<f32>(&linear(bias, residual));
            let product = linear(None, None);
            for out in [rig.empty(DType::F32, rows * outputs), product.clone()] {
                rig.run(AddBiasResidual {
                    inp: product.clone(),
                    bias: bias.cloned(),
                    residual: residual.cloned(),
                    out: out.clone(),
                });
                assert_eq!(bits(&values(&out)), bits(&expected));
            }
        }
    }
}

#[test]
fn a_bias_that_does_not_fit_is_named() {
    let rig = Rig::new();
    let add = |[inp, bias, residual, out]: [usize; 4]| {
        let [inp, bias, residual, out] = [inp, bias, residual, out].map(|n| rig.empty(DType::F32, n));
        let add = AddBiasResidual {
            inp,
            bias: Some(bias),
            residual: Some(residual),
            out,
        };
        rig.try_run(add).unwrap_err().to_string()
    };
    insta::assert_snapshot!(add([5, 3, 6, 6]), @"operation `add_bias_residual`: `inp` has 5 elements, expected 6");
    insta::assert_snapshot!(add([6, 4, 6, 6]), @"operation `add_bias_residual`: 6 elements cannot be divided into rows of 4, the length of `bias`");
    insta::assert_snapshot!(add([6, 0, 6, 6]), @"operation `add_bias_residual`: 6 elements cannot be divided into rows of 0, the length of `bias`");
    insta::assert_snapshot!(add([6, 3, 5, 6]), @"operation `add_bias_residual`: `residual` has 5 elements, expected 6");
}
