//! `train.precision: bf16` on whole runs: the equalities that hold in f32, and the loss.

use crate::train_support::{Job, Trained, assert_same, assert_within};
use ddp_worker::config::{Accumulate, Precision, ReduceDtype, Resume, Strategy, TrainConfig};

const SHARDED: [Strategy; 3] = [Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];
const ALL: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// Large enough that every rank owns parameters: units are cut at 16,384 elements.
fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 2;
        c.model.n_embd = 64;
        c.train.precision = Precision::Bf16;
        c.train.micro_batch = 1;
        c.train.optimizer.lr = 3e-3;
        c.parallel.first_bucket_mb = 0.03;
        c.parallel.bucket_mb = 0.1;
        c.parallel.strategy = strategy;
        c.parallel.timeout_s = 600.0;
        change(c);
    })
}

/// All strategies on `world` ranks: 100 steps, clipped, compared bit by bit.
fn all_are_bit_equal(world: u32, change: impl Fn(&mut TrainConfig)) {
    let run = |strategy| {
        let job = job(strategy, |c| {
            c.train.steps = 100;
            c.train.grad_clip = Some(0.8);
            c.train.verify_every = 50;
            c.train.eval_every = 40;
            c.parallel.accumulate = Accumulate::Full;
            change(c);
        });
        job.train(world)
    };
    let reference = run(Strategy::Ddp);
    let (first, last) = (reference.metrics[0].loss, reference.metrics[99].loss);
    assert!(last < first - 1.5, "it learns: {first} to {last}");
    for strategy in SHARDED {
        let trained = run(strategy);
        let what = format!("{strategy:?}, {world} ranks");
        assert_same(&reference, &trained, &what);
        assert_eq!(trained.summary.val_loss, reference.summary.val_loss, "{what}");
    }
}

#[test]
fn two_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(2, |c| c.parallel.reduce_dtype = ReduceDtype::Bf16);
}

/// Sums of bf16 numbers are rounded by NCCL at each hop: the default reduces none.
#[test]
fn gradients_are_averaged_in_f32_unless_bf16_is_asked_for() {
    for strategy in ALL {
        let trained = job(strategy, |c| c.train.steps = 2).train(2);
        let asked = job(strategy, |c| {
            c.train.steps = 2;
            c.parallel.reduce_dtype = ReduceDtype::F32;
        });
        assert_same(&asked.train(2), &trained, &format!("{strategy:?}"));
        assert_eq!(
            trained.metrics[1].wire_bytes.grads,
            asked.metrics()[1].wire_bytes.grads
        );
    }
}

#[test]
fn three_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(3, |c| c.parallel.reduce_dtype = ReduceDtype::F32);
}

#[test]
fn four_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(4, |c| c.parallel.reduce_dtype = ReduceDtype::Bf16);
}

#[test]
fn whole_gradients_accumulate_the_same_numbers_under_every_strategy() {
    for reduce_dtype in [ReduceDtype::Bf16, ReduceDtype::F32] {
        all_are_bit_equal(2, |c| {
            c.train.grad_accumulation = 2;
            c.parallel.reduce_dtype = reduce_dtype;
        });
    }
}

#[test]
fn synchronisation_modes_and_overlap_are_bit_equal() {
    use ddp_worker::config::Sync;
    let run = |sync, overlap| {
        let job = job(Strategy::Ddp, |c| {
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
        (Sync::Naive, true),
    ] {
        assert_same(
            &reference,
            &run(sync, overlap),
            &format!("{sync:?}, overlap {overlap}"),
        );
    }
}

#[test]
fn threads_of_a_rank_do_not_change_a_bit() {
    let run = |threads| {
        let job = job(Strategy::Ddp, |c| {
            c.train.threads = Some(threads);
            c.train.micro_batch = 4;
        });
        job.train(1)
    };
    assert_same(&run(1), &run(2), "1 and 2 threads");
}

#[test]
fn sharded_accumulation_is_close_to_that_of_whole_gradients() {
    let run = |strategy, reduce_dtype| {
        let job = job(strategy, |c| {
            c.train.steps = 30;
            c.train.grad_accumulation = 3;
            c.parallel.reduce_dtype = reduce_dtype;
        });
        job.train(2)
    };
    for reduce_dtype in [ReduceDtype::Bf16, ReduceDtype::F32] {
        let reference = run(Strategy::Ddp, reduce_dtype);
        for strategy in [Strategy::Zero2, Strategy::Zero3] {
            assert_within(
                1e-2,
                &reference,
                &run(strategy, reduce_dtype),
                &format!("{strategy:?} {reduce_dtype:?}"),
            );
        }
    }
}

#[test]
fn losses_stay_near_those_of_f32() {
    let run = |precision, reduce_dtype| {
        let job = job(Strategy::Ddp, |c| {
            c.train.precision = precision;
            c.train.steps = 100;
            c.train.micro_batch = 8;
            c.train.optimizer.lr = 1e-3;
            c.parallel.reduce_dtype = reduce_dtype;
        });
        job.train(2)
    };
    let exact = run(Precision::F32, ReduceDtype::F32);
    for reduce_dtype in [ReduceDtype::Bf16, ReduceDtype::F32] {
        let rounded = run(Precision::Bf16, reduce_dtype);
        assert_within(1e-2, &exact, &rounded, &format!("{reduce_dtype:?}"));
        assert_ne!(exact.losses(), rounded.losses());
    }
}

/// Steps up to `until` of a run in `out_dir` of `first`, in some precision.
fn continued(first: &Job, precision: Precision, strategy: Strategy, until: u64) -> Trained {
    let mut again = job(strategy, |_| ());
    let data = again.config.data.clone();
    again.config = first.config.clone();
    again.config.data = data;
    again.config.train.precision = precision;
    again.config.parallel.strategy = strategy;
    again.config.train.steps = until;
    again.train(2)
}

#[test]
fn a_resumed_run_continues_with_the_same_bits_under_every_strategy() {
    let change = |c: &mut TrainConfig| {
        c.train.schedule.kind = ddp_worker::config::LearningRate::Constant;
        c.run.resume = Resume::Auto;
        c.train.grad_accumulation = 2;
        c.parallel.accumulate = Accumulate::Full;
    };
    let whole = job(Strategy::Ddp, |c| {
        change(c);
        c.train.steps = 6;
    })
    .train(2);
    for (i, strategy) in ALL.into_iter().enumerate() {
        let begun = job(strategy, |c| {
            change(c);
            c.train.steps = 3;
        });
        begun.train(2);
        let ended = continued(&begun, Precision::Bf16, ALL[(i + 1) % ALL.len()], 6);
        assert_same(&whole, &ended, &format!("{strategy:?}, then the next one"));
    }
}

#[test]
fn a_run_goes_on_in_another_precision() {
    let begin = |precision| {
        let job = job(Strategy::Zero2, |c| {
            c.train.precision = precision;
            c.train.steps = 3;
            c.run.resume = Resume::Auto;
        });
        job.train(2);
        job
    };
    for (from, to) in [
        (Precision::F32, Precision::Bf16),
        (Precision::Bf16, Precision::F32),
    ] {
        let job = begin(from);
        let trained = continued(&job, to, Strategy::Zero3, 30);
        let (first, last) = (trained.metrics[3].loss, trained.metrics[29].loss);
        assert!(last < first, "{from:?} to {to:?}: {first} to {last}");
    }
}
