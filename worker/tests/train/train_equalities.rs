//! The numerical contract on whole runs: what must be bit-equal is compared bit by bit.

use std::sync::Arc;

use crate::train_support::deferred::DeferredDevice;
use crate::train_support::{Job, Trained, assert_close, assert_same};
use ddp_worker::config::{
    Accumulate, LearningRate, ModelKind, Order, Precision, Recompute, Resume, Strategy, Sync, TrainConfig,
};

#[test]
fn synchronisation_modes_and_overlap_are_bit_equal() {
    for precision in [Precision::F32, Precision::Bf16] {
        let run = |sync, overlap| {
            let job = Job::with(|c| {
                c.train.precision = precision;
                c.parallel.sync = sync;
                c.parallel.overlap = overlap;
                c.train.grad_accumulation = 2;
            });
            job.train(2)
        };
        let reference = run(Sync::Bucketed, true);
        for (sync, overlap) in [
            (Sync::Bucketed, false),
            (Sync::PerParameter, true),
            (Sync::PerParameter, false),
            (Sync::Naive, true),
            (Sync::Naive, false),
        ] {
            let what = format!("{precision:?}, {sync:?}, overlap {overlap}");
            assert_same(&reference, &run(sync, overlap), &what);
        }
    }
}

#[test]
fn a_device_that_defers_everything_is_bit_equal() {
    for sync in [Sync::Bucketed, Sync::PerParameter] {
        let change = |c: &mut TrainConfig| {
            c.parallel.sync = sync;
            c.train.grad_accumulation = 2;
        };
        let reference = Job::with(change).train(2);
        let mut job = Job::with(change);
        job.device = Some(Box::new(|_| Arc::new(DeferredDevice::new())));
        assert_same(&reference, &job.train(2), &format!("{sync:?}"));
    }
}

#[test]
fn two_ranks_equal_one_rank_with_twice_the_accumulation() {
    let run = |world_size, accumulation| {
        Job::with(|c| {
            c.train.steps = 50;
            c.train.grad_accumulation = accumulation;
            c.train.optimizer.lr = 2e-3;
            c.data.order = Order::Sequential;
        })
        .train(world_size)
    };
    let (two, one) = (run(2, 1), run(1, 2));
    assert_eq!(two.metrics.len(), 50);
    for (two, one) in two.metrics.iter().zip(&one.metrics) {
        let error = (two.loss - one.loss).abs() / one.loss;
        assert!(error < 1e-5, "step {}: {} and {}", one.step, two.loss, one.loss);
        assert_eq!(two.tokens, one.tokens);
    }
    let (first, last) = (one.metrics[0].loss, one.metrics[49].loss);
    assert!(last < first - 1.0, "it learns: {first} to {last}");
}

#[test]
fn an_mlp_on_one_rank_learns() {
    let job = Job::with(|c| {
        c.model.kind = ModelKind::Mlp;
        c.model.n_head = 1;
        c.train.steps = 150;
        c.train.micro_batch = 8;
    });
    let trained = job.train(1);
    let (first, last) = (trained.metrics[0].loss, trained.summary.val_loss.unwrap());
    assert!(
        (first - 256_f64.ln()).abs() < 0.3,
        "a fresh model knows nothing: {first}"
    );
    assert!(last < 2.5, "{first} to {last}");
}

/// A job whose masks change every loss.
fn dropout_job(change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 2;
        c.model.dropout = 0.2;
        c.train.optimizer.lr = 2e-3;
        change(c);
    })
}

fn with_dropout(ranks: u32, change: impl FnOnce(&mut TrainConfig)) -> Trained {
    dropout_job(change).train(ranks)
}

#[test]
fn masks_are_those_of_the_samples_on_any_layout() {
    let run = |ranks, micro_batch, accumulation| {
        with_dropout(ranks, |c| {
            c.train.steps = 20;
            c.train.micro_batch = micro_batch;
            c.train.grad_accumulation = accumulation;
        })
    };
    let one = run(1, 4, 1);
    for (ranks, micro_batch, accumulation) in [(1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 1, 2), (4, 1, 1)] {
        let other = run(ranks, micro_batch, accumulation);
        let what = format!("{ranks} ranks of {micro_batch} samples, {accumulation} times");
        assert_close(&one, &other, &what);
    }
    let without = with_dropout(1, |c| {
        c.train.steps = 20;
        c.train.micro_batch = 4;
        c.model.dropout = 0.0;
    });
    assert_ne!(without.losses()[0], one.losses()[0]);
}

#[test]
fn recomputation_and_sharding_repeat_masks_bit_by_bit() {
    let one = with_dropout(2, |_| ());
    for recompute in [Recompute::Nothing, Recompute::Selective, Recompute::Full] {
        let other = with_dropout(2, |c| c.train.recompute = recompute);
        assert_same(&one, &other, &format!("{recompute:?}"));
    }
    for strategy in [Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
        let other = with_dropout(2, |c| {
            c.parallel.strategy = strategy;
            c.parallel.accumulate = match strategy {
                Strategy::Zero1 => Accumulate::Sharded,
                _ => Accumulate::Full,
            };
            c.train.recompute = Recompute::Full;
        });
        assert_same(&one, &other, &format!("{strategy:?}"));
    }
}

#[test]
fn a_resumed_run_goes_on_with_the_masks_of_the_next_samples() {
    let constant = |c: &mut TrainConfig| c.train.schedule.kind = LearningRate::Constant;
    let whole = with_dropout(2, constant);
    let mut job = dropout_job(constant);
    job.config.train.steps = 3;
    job.train(2);
    job.config.train.steps = 6;
    job.config.run.resume = Resume::Require;
    let resumed = job.train(2);
    assert_eq!(whole.state, resumed.state);
    assert_eq!(whole.losses()[3..], resumed.losses()[3..]);
}
