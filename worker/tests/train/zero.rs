//! ZeRO-1, -2 and -3: the numbers of DDP.

use crate::train_support::{Job, assert_close, assert_same};
use ddp_worker::config::{Accumulate, ModelKind, Precision, Recompute, ReduceDtype, Strategy, TrainConfig};

pub(super) const SHARDED: [Strategy; 3] = [Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// Large enough that every rank owns parameters: units are cut at 16,384 elements.
pub(super) fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 2;
        c.model.n_embd = 64;
        c.train.micro_batch = 1;
        c.train.optimizer.lr = 3e-3;
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = 0.2;
        c.parallel.strategy = strategy;
        change(c);
    })
}

/// All strategies on `world` ranks: 100 steps, clipped, with accumulation 1 or 2 of whole gradients. Each of the
/// sharded ones recomputes something else, and over three sizes each of them everything.
fn all_are_bit_equal(world: u32, accumulation: usize, (precision, reduce_dtype): (Precision, ReduceDtype)) {
    const RECOMPUTED: [Recompute; 3] = [Recompute::Norms, Recompute::Selective, Recompute::Full];
    let run = |strategy, recompute| {
        let job = job(strategy, |c| {
            c.train.steps = 100;
            c.train.precision = precision;
            c.train.recompute = recompute;
            c.train.grad_clip = Some(0.8);
            c.train.grad_accumulation = accumulation;
            c.train.verify_every = 50;
            c.train.eval_every = 40;
            c.parallel.accumulate = Accumulate::Full;
            c.parallel.reduce_dtype = reduce_dtype;
        });
        job.train(world)
    };
    let reference = run(Strategy::Ddp, Recompute::Norms);
    let lines = &reference.metrics;
    let clipped = lines.iter().filter(|line| line.grad_norm > 0.8).count();
    assert!(clipped > 10 && lines.len() == 100, "{clipped} steps clipped");
    let (first, last) = (lines[0].loss, lines[99].loss);
    assert!(last < first - 1.5, "it learns: {first} to {last}");
    for (i, strategy) in SHARDED.into_iter().enumerate() {
        let recompute = RECOMPUTED[(i + world as usize + accumulation) % RECOMPUTED.len()];
        let trained = run(strategy, recompute);
        let what = format!(
            "{strategy:?}, {recompute:?}, {world} ranks, accumulation {accumulation}, {precision:?} {reduce_dtype:?}"
        );
        assert_same(&reference, &trained, &what);
        assert_eq!(trained.summary.val_loss, reference.summary.val_loss, "{what}");
    }
}

const F32: (Precision, ReduceDtype) = (Precision::F32, ReduceDtype::F32);
const BF16: (Precision, ReduceDtype) = (Precision::Bf16, ReduceDtype::Bf16);
const MIXED: (Precision, ReduceDtype) = (Precision::Bf16, ReduceDtype::F32);

#[test]
fn two_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(2, 1, F32);
    all_are_bit_equal(2, 1, BF16);
}

#[test]
fn three_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(3, 1, F32);
    all_are_bit_equal(3, 1, MIXED);
}

#[test]
fn whole_gradients_accumulate_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(2, 2, F32);
    all_are_bit_equal(3, 2, F32);
    all_are_bit_equal(2, 2, BF16);
    all_are_bit_equal(2, 2, MIXED);
}

#[test]
fn without_overlap_and_without_resharding_the_numbers_are_the_same() {
    let change = |c: &mut TrainConfig| c.train.eval_every = 2;
    let reference = job(Strategy::Ddp, change).train(3);
    for strategy in SHARDED {
        let trained = job(strategy, |c| {
            change(c);
            c.parallel.overlap = false;
        })
        .train(3);
        assert_same(&reference, &trained, &format!("{strategy:?} without overlap"));
    }
    for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
        let run = |strategy, reshard| {
            let job = job(strategy, |c| {
                change(c);
                c.model.kind = kind;
                c.parallel.reshard_after_forward = reshard;
            });
            job.train(2)
        };
        let reference = run(Strategy::Ddp, true);
        for reshard in [true, false] {
            assert_same(
                &reference,
                &run(Strategy::Zero3, reshard),
                &format!("{kind:?}, reshard_after_forward {reshard}"),
            );
        }
    }
}

#[test]
fn one_rank_alone_is_every_strategy() {
    let reference = job(Strategy::Ddp, |c| c.train.grad_accumulation = 2).train(1);
    for strategy in SHARDED {
        let run = |accumulate| {
            let job = job(strategy, |c| {
                c.train.grad_accumulation = 2;
                c.parallel.accumulate = accumulate;
            });
            job.train(1)
        };
        assert_same(&reference, &run(Accumulate::Full), &format!("{strategy:?}"));
        assert_close(&reference, &run(Accumulate::Sharded), &format!("{strategy:?}"));
    }
}

#[test]
fn sums_of_every_micro_batch_are_the_same_numbers_whether_they_are_sharded_or_not() {
    let run = |strategy, each_batch| {
        let job = job(strategy, |c| {
            c.train.grad_accumulation = 2;
            c.train.grad_clip = Some(0.8);
            c.parallel.sync_each_batch = each_batch;
        });
        job.train(3)
    };
    let each = run(Strategy::Ddp, true);
    assert_same(&each, &run(Strategy::Zero2, false), "zero2");
    assert_close(&each, &run(Strategy::Ddp, false), "once a step");
}
