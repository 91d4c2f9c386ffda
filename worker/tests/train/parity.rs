//! Losses of 50 steps beside those of PyTorch, from the same first values, samples and settings, computed by
//! `tests/parity/make_golden.py` and kept in `tests/parity/golden.json`.

use std::path::Path;

use crate::train_support::Job;
use ddp_worker::config::{LearningRate, Order, Precision, Strategy};
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    text_bytes: usize,
    settings: Settings,
    f32: Vec<f64>,
    bf16: Vec<f64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    n_layer: usize,
    n_head: usize,
    n_embd: usize,
    block_size: usize,
    ranks: u32,
    micro_batch: usize,
    steps: u64,
    seed: u64,
    grad_clip: f32,
    lr: f32,
    min_lr: f32,
    warmup_steps: u64,
    betas: [f32; 2],
    eps: f32,
    weight_decay: f32,
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../../tests/parity/golden.json")).unwrap()
}

fn job(settings: &Settings, precision: Precision, strategy: Strategy) -> Job {
    let text = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/data/python-reference.txt");
    Job::with(|c| {
        c.run.seed = settings.seed;
        c.model.n_layer = settings.n_layer;
        c.model.n_head = settings.n_head;
        c.model.n_embd = settings.n_embd;
        c.model.block_size = settings.block_size;
        // A text of its own to validate on, so that nothing of the other is held out.
        c.data.val = Some(c.data.train.clone());
        c.data.train = text.into();
        c.data.order = Order::Sequential;
        c.train.precision = precision;
        c.train.micro_batch = settings.micro_batch;
        c.train.steps = settings.steps;
        c.train.grad_clip = Some(settings.grad_clip);
        c.train.optimizer.lr = settings.lr;
        c.train.optimizer.betas = Some(settings.betas);
        c.train.optimizer.eps = settings.eps;
        c.train.optimizer.weight_decay = settings.weight_decay;
        c.train.schedule.kind = LearningRate::Cosine;
        c.train.schedule.warmup_steps = settings.warmup_steps;
        c.train.schedule.min_lr = settings.min_lr;
        c.parallel.strategy = strategy;
    })
}

/// Every step's loss is within `tolerance` of the golden one, relatively; returns the largest distance.
fn assert_parity(precision: Precision, strategy: Strategy, tolerance: f64) -> f64 {
    let golden = golden();
    let job = job(&golden.settings, precision, strategy);
    let text = std::fs::metadata(job.config.data.train.iter().next().unwrap()).unwrap();
    assert_eq!(text.len() as usize, golden.text_bytes, "the text is another one");
    let expected = match precision {
        Precision::Bf16 => &golden.bf16,
        _ => &golden.f32,
    };
    let found = job.train(golden.settings.ranks).losses();
    assert_eq!(found.len(), expected.len());
    assert!(expected[0] - expected[expected.len() - 1] > 1.0, "it learned");
    let mut worst = 0.0_f64;
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs() / expected;
        assert!(
            error < tolerance,
            "step {}: {found}, PyTorch has {expected}, off by {error:e}",
            step + 1
        );
        worst = worst.max(error);
    }
    worst
}

#[test]
fn losses_in_f32_are_those_of_pytorch() {
    for strategy in [Strategy::Ddp, Strategy::Zero3] {
        let worst = assert_parity(Precision::F32, strategy, 1e-4);
        println!("f32, {strategy:?}: off by at most {worst:e}");
    }
}

#[test]
fn losses_in_bf16_are_those_of_pytorch() {
    for strategy in [Strategy::Ddp, Strategy::Zero3] {
        let worst = assert_parity(Precision::Bf16, strategy, 1e-2);
        println!("bf16, {strategy:?}: off by at most {worst:e}");
    }
}
