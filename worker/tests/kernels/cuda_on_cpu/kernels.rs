//! Each operation against the CPU device.

use super::device::Imitation;
use crate::op_cases::numbers::numbers;
use crate::op_cases::{Bench, Case, Kind, Outcome, Size, Tensor, Types, catalogue};
use ddp_worker::device::{ArenaSpec, Buffer, DType, Device};
use ddp_worker::ops::cuda::plan;
use ddp_worker::ops::{
    AttentionBackward, AttentionForward, AttentionShape, ColumnSum, EncoderForward, Rates, Runs,
    TokenBackward, Update,
};
use ddp_worker::optim::adamw;

/// Orders of threads that each case is run in.
const SCHEDULES: u32 = 3;

/// Memory for operations that are planned and not run.
fn buffer(dtype: DType, len: usize) -> Buffer {
    let spec = ArenaSpec::private("operand", dtype, len);
    Imitation::new(1).alloc(&spec).unwrap().whole()
}

/// Runs the cases whose name starts so, in every precision.
fn check(start: &str) {
    let device = Imitation::new(SCHEDULES);
    let cases: Vec<Case> = catalogue(Size::Small)
        .into_iter()
        .filter(|case| case.name.starts_with(start))
        .collect();
    assert!(!cases.is_empty(), "there is no `{start}`");
    let bench = Bench::new(&device);
    let mut differences = Vec::new();
    for case in &cases {
        differences.extend(
            Types::ALL
                .iter()
                .filter_map(|types| case.check(&bench, *types).err()),
        );
    }
    assert!(differences.is_empty(), "{}", differences.join("\n"));
    let runs = cases.len() * Types::ALL.len();
    assert_eq!(
        device.planned() as usize,
        runs,
        "an operation ran without its kernel"
    );
}

#[test]
fn gelu() {
    check("gelu");
}

#[test]
fn cast() {
    check("cast");
}

#[test]
fn fill() {
    check("fill");
}

#[test]
fn updates() {
    for rule in crate::op_cases::catalogue::rules() {
        check(rule.name);
    }
}

/// A GPT-2 of 48 blocks has 192 runs of norms and biases.
#[test]
fn what_decays_and_what_does_not_are_updated_by_one_kernel() {
    let buffer = |len| buffer(DType::F32, len);
    for (ranges, calls) in [(0, 1), (192, 1), (228, 1), (229, 2)] {
        let [param, grad, m, v] = [5000; 4].map(buffer);
        let spared: Vec<_> = (0..ranges).map(|i| 16 * i..16 * i + 8).collect();
        let update = Update {
            rule: adamw([0.9, 0.99], 1e-8),
            runs: Runs::sparing(5000, &spared, Rates::new(1.0, 0.1)),
            param,
            copy: None,
            grad,
            slots: vec![m, v],
            scale: buffer(1),
            step: 1,
        };
        let plan = plan(&update.into()).unwrap().unwrap();
        assert_eq!(plan.calls.len(), calls, "{ranges} ranges");
    }
}

#[test]
fn norms() {
    check("squared norm");
    check("clip scale");
}

#[test]
fn experts() {
    for start in ["route", "sort", "index", "columns", "combine", "grouped"] {
        check(start);
    }
}

#[test]
fn encoder() {
    check("encoder");
    check("position");
}

#[test]
fn gradient_of_tokens() {
    check("token");
}

#[test]
fn layernorm() {
    check("layernorm");
}

#[test]
fn rmsnorm() {
    check("rmsnorm");
}

#[test]
fn swiglu() {
    check("swiglu");
}

#[test]
fn rotary() {
    check("rotary");
}

#[test]
fn attention_over_a_cache() {
    check("decode");
}

#[test]
fn column_sum() {
    check("column sum");
}

/// A shard of the gradients is one row as long as itself: two stages would take scratch memory of its size in f32.
#[test]
fn one_row_is_added_by_one_kernel_without_scratch_memory() {
    for (rows, calls, scratch) in [(1, 1, false), (2, 2, true)] {
        let buffer = |len| buffer(DType::F32, len);
        let sum = ColumnSum {
            x: buffer(rows * 5000),
            out: buffer(5000),
            accumulate: true,
        };
        let plan = plan(&sum.into()).unwrap().unwrap();
        assert_eq!(
            (plan.calls.len(), plan.scratch_bytes > 0),
            (calls, scratch),
            "{rows} rows"
        );
    }
}

#[test]
fn cross_entropy() {
    check("cross entropy");
    check("loss sum");
}

#[test]
fn attention() {
    check("attention");
}

/// Cards of sm_86 and sm_89 have 99 KiB of shared memory a block, those of sm_80 and sm_90 more.
#[test]
fn attention_fits_into_the_shared_memory_of_every_card() {
    const LEAST: usize = 99 << 10;
    for dtype in [DType::F32, DType::Bf16] {
        for head in [32, 64, 80, 96, 128, 176] {
            let (heads, positions) = (2, 8);
            let channels = heads * head;
            let shape = AttentionShape {
                batch: 1,
                positions,
                heads,
                kv_heads: heads,
                head_size: head,
            };
            let backward = AttentionBackward {
                forward: AttentionForward {
                    qkv: shape.views(&buffer(dtype, 3 * channels * positions)),
                    out: buffer(dtype, channels * positions),
                    lse: buffer(DType::F32, heads * positions),
                    shape,
                    dropout: None,
                },
                dout: buffer(dtype, channels * positions),
                dqkv: shape.views(&buffer(dtype, 3 * channels * positions)),
                accumulate: false,
            };
            for call in plan(&backward.into()).unwrap().unwrap().calls {
                let shared = call.grid.shared_bytes;
                assert!(
                    shared <= LEAST,
                    "{dtype}, {head}: `{}` wants {shared}",
                    call.kernel
                );
            }
        }
    }
}

#[test]
fn dropout() {
    check("dropout");
}

#[test]
fn add_bias_residual() {
    check("add bias");
}

#[test]
fn attention_on_tensor_cores() {
    check("flash attention");
}

/// What a case leaves in its tensors.
fn run(case: &Case) -> Vec<Vec<f64>> {
    case.run(&Bench::new(&Imitation::new(SCHEDULES)), Types::ALL[0])
        .unwrap()
}

#[test]
fn a_factor_that_is_no_number_skips_the_update() {
    let f32s = |seed| Tensor::new(Kind::Fixed(DType::F32), numbers(seed, 100));
    for factor in [f64::NAN, f64::INFINITY] {
        let scale = Tensor::new(Kind::Fixed(DType::F32), vec![factor]);
        let tensors = vec![f32s(1), f32s(2), f32s(3), f32s(4), scale];
        let before: Vec<Vec<f64>> = tensors[..4]
            .iter()
            .map(|t| t.values.iter().map(|x| f64::from(*x as f32)).collect())
            .collect();
        let case = Case::new("a skipped step".to_owned(), tensors, |b| Update {
            rule: adamw([0.9, 0.99], 1e-8),
            runs: Runs::uniform(b[0].len(), Rates::new(1.0, 0.1)),
            param: b[0].clone(),
            copy: None,
            grad: b[1].clone(),
            slots: vec![b[2].clone(), b[3].clone()],
            scale: b[4].clone(),
            step: 1,
        });
        assert_eq!(run(&case)[..4], before);
    }
}

/// Tokens are checked on the host; a kernel that meets a wrong one all the same touches nothing else.
#[test]
fn a_token_outside_the_vocabulary_is_no_address() {
    let ids = Tensor::new(Kind::Fixed(DType::I32), vec![1.0, 9.0, -5.0, 1.0]);
    let values = |len| Tensor::new(Kind::Act, numbers(1, len));
    let encoder = vec![ids.clone(), values(3 * 8), values(4 * 8).result(Outcome::Close)];
    let encoder = Case::new("wrong tokens".to_owned(), encoder, |b| EncoderForward {
        tokens: b[0].clone(),
        wte: b[1].clone(),
        out: b[2].clone(),
        wpe: None,
        positions: 4,
        part: None,
    });
    let found = &run(&encoder)[2];
    let wrong: Vec<bool> = found
        .chunks(8)
        .map(|row| row.iter().all(|x| x.is_nan()))
        .collect();
    assert_eq!(wrong, [false, true, true, false]);

    let backward = vec![ids, values(4 * 8), values(3 * 8).result(Outcome::Close)];
    let backward = Case::new("wrong tokens".to_owned(), backward, |b| TokenBackward {
        tokens: b[0].clone(),
        dout: b[1].clone(),
        dwte: b[2].clone(),
        accumulate: false,
        part: None,
    });
    let after = run(&backward);
    for channel in 0..8 {
        let sum = (after[1][channel] as f32 + after[1][24 + channel] as f32).into();
        assert_eq!(
            [after[2][channel], after[2][8 + channel], after[2][16 + channel]],
            [0.0, sum, 0.0]
        );
    }
}

/// All rows of one token: its sums cross every block.
#[test]
fn a_token_may_be_everywhere() {
    let (rows, channels) = (100, 8);
    let tensors = vec![
        Tensor::new(Kind::Fixed(DType::I32), vec![2.0; rows]),
        Tensor::new(Kind::Act, numbers(1, rows * channels)),
        Tensor::new(Kind::Grad, vec![0.25; 3 * channels]).result(Outcome::Close),
    ];
    let case = Case::new("one token".to_owned(), tensors, |b| TokenBackward {
        tokens: b[0].clone(),
        dout: b[1].clone(),
        dwte: b[2].clone(),
        accumulate: true,
        part: None,
    });
    for types in Types::ALL {
        case.check(&Bench::new(&Imitation::new(SCHEDULES)), types)
            .unwrap();
    }
}
