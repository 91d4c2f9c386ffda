//! `train.precision: bf16` on whole runs: what is reduced in which type, and the loss. That all strategies train the same
//! numbers is in `zero.rs`.

use crate::train_support::{Job, assert_same, assert_within};
use ddp_worker::config::{Precision, ReduceDtype, Strategy, TrainConfig};

use super::zero;

const ALL: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    zero::job(strategy, |c| {
        c.train.precision = Precision::Bf16;
        c.parallel.first_bucket_mb = 0.03;
        c.parallel.bucket_mb = 0.1;
        change(c);
    })
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
