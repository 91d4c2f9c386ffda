//! The same bits with any number of threads and on any instruction set.

use ddp_worker::config::{self, ModelKind};
use ddp_worker::device::{DType, Isa};
use ddp_worker::model::build;
use ddp_worker::ops::{
    CHUNK, LinearDinp, LinearDweight, LinearForward, LinearShape, Rates, Runs, SquaredNorm, Update,
    WeightLayout,
};
use ddp_worker::optim::adamw;
use half::bf16;

use super::rig::{Rank, Rig, numbers, numbers_f32, wide_values};

/// Gradients of one step, then the norm's partial sums and the update: bits of all of them.
fn step_bits(threads: usize, isa: Isa, (kind, dtype): (ModelKind, DType)) -> Vec<u64> {
    // Several tiles of rows and queries, an odd vocabulary, channels that do not fill the lanes.
    let config = config::Model {
        kind,
        n_layer: 2,
        n_head: 2,
        // A Llama's heads share keys and values.
        n_kv_head: (kind == ModelKind::Llama).then_some(1),
        n_embd: 72,
        block_size: 160,
        vocab_size: None,
        dropout: 0.0,
        ..config::Model::default()
    };
    let model = build(&config, 201).unwrap();
    let n = model.param_count();
    let mut rank = Rank::new(Rig::with(threads, isa), model, dtype, [1, 4, 150]);
    let loss = rank.step(0);
    let rig = &rank.rig;
    let partials = rig.empty(DType::F64, n.div_ceil(CHUNK));
    rig.run(SquaredNorm {
        x: rank.grads.whole(),
        partials: partials.clone(),
    });
    let master = rig.buffer(&numbers_f32(7, n));
    rig.run(Update {
        rule: adamw([0.9, 0.95], 1e-8),
        runs: Runs::uniform(master.clone().len(), Rates::new(1e-3, 0.1)),
        param: master.clone(),
        copy: (dtype == DType::Bf16).then(|| rank.params.whole()),
        grad: rank.grads.whole(),
        slots: vec![
            rig.buffer(&numbers_f32(8, n)),
            rig.buffer(&numbers_f32(9, n).iter().map(|x| x * x).collect::<Vec<_>>()),
        ],
        scale: rig.buffer(&[0.7_f32]),
        step: 10,
    });
    let all = [rank.grads.whole(), rank.params.whole(), master, partials];
    std::iter::once(loss)
        .chain(all.iter().flat_map(wide_values))
        .map(f64::to_bits)
        .collect()
}

/// A linear layer and its way back. How outputs are cut into tiles follows from the threads.
fn linear_bits(threads: usize, [rows, inputs, outputs]: [usize; 3], dtype: DType) -> Vec<u64> {
    let rig = Rig::with(threads, Isa::detect());
    let buffer = |seed, len| match dtype {
        DType::F64 => rig.buffer(&numbers(seed, len)),
        DType::Bf16 => {
            let numbers: Vec<_> = numbers_f32(seed, len).into_iter().map(bf16::from_f32).collect();
            rig.buffer(&numbers)
        }
        _ => rig.buffer(&numbers_f32(seed, len)),
    };
    let (inp, weight) = (buffer(1, rows * inputs), buffer(2, inputs * outputs));
    let (out, dinp) = (buffer(3, rows * outputs), buffer(4, rows * inputs));
    let shape = LinearShape {
        rows,
        inputs,
        outputs,
        layout: WeightLayout::InOut,
    };
    rig.run(LinearForward {
        inp: inp.clone(),
        weight: weight.clone(),
        bias: Some(buffer(5, outputs)),
        residual: Some(buffer(6, rows * outputs)),
        out: out.clone(),
        exact: false,
        shape,
    });
    rig.run(LinearDinp {
        dout: out.clone(),
        weight: weight.clone(),
        dinp: dinp.clone(),
        shape,
    });
    rig.run(LinearDweight {
        inp,
        dout: out.clone(),
        dweight: weight.clone(),
        accumulate: true,
        shape,
    });
    let all = [out, dinp, weight];
    all.iter().flat_map(wide_values).map(f64::to_bits).collect()
}

const CASES: [(ModelKind, DType); 5] = [
    (ModelKind::Gpt2, DType::F32),
    (ModelKind::Gpt2, DType::Bf16),
    (ModelKind::Llama, DType::F32),
    (ModelKind::Llama, DType::Bf16),
    (ModelKind::Mlp, DType::F32),
];

fn assert_same(found: &[u64], expected: &[u64], what: &str) {
    let differ = found.iter().zip(expected).filter(|(a, b)| a != b).count();
    assert_eq!(
        (differ, found.len()),
        (0, expected.len()),
        "{what}: numbers that differ"
    );
}

#[test]
fn threads_make_no_difference() {
    for kind in CASES {
        let one = step_bits(1, Isa::detect(), kind);
        for threads in [2, 3, 8] {
            assert_same(
                &step_bits(threads, Isa::detect(), kind),
                &one,
                &format!("{threads} threads"),
            );
        }
    }
}

/// Rows and columns that leave one over where they are cut at round numbers; outputs of few rows and columns.
#[test]
fn the_tiles_of_a_product_make_no_difference() {
    let sizes = [
        [2049, 65, 270],
        [4097, 40, 3],
        [1025, 129, 1],
        [513, 300, 66],
        [65, 257, 129],
        [64, 70, 4500],
        [64, 768, 128],
        [64, 128, 700],
        [64, 700, 270],
        [128, 900, 320],
        // One column would be left over by five threads, and by ten: `gemm` has a way of its own for it.
        [66, 321, 300],
        [130, 641, 600],
        [63, 33, 200],
        [3, 16, 130],
        [1, 20, 700],
    ];
    for dtype in [DType::F32, DType::F64, DType::Bf16] {
        for sizes in sizes {
            let one = linear_bits(1, sizes, dtype);
            for threads in [2, 3, 5, 8, 10, 16] {
                let what = format!("{sizes:?} of {dtype}, {threads} threads");
                assert_same(&linear_bits(threads, sizes, dtype), &one, &what);
            }
        }
    }
}

/// Products use the set of the process (`DDP_ISA`, or the best); everything else is compiled for each set.
#[test]
fn instruction_sets_make_no_difference() {
    for kind in CASES {
        let best = step_bits(1, Isa::detect(), kind);
        for isa in Isa::available() {
            assert_same(&step_bits(1, isa, kind), &best, &format!("{isa}, {kind:?}"));
        }
    }
}
