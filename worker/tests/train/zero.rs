//! ZeRO-1, -2 and -3: the numbers of DDP.

use crate::train_support::faulty::{Fault, FaultyDevice};
use crate::train_support::{Job, Trained, assert_close, assert_same, copy_folder};
use ddp_worker::config::{Accumulate, ModelKind, Recompute, Rescale, Resume, Strategy, TrainConfig};

const SHARDED: [Strategy; 3] = [Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// Large enough that every rank owns parameters: units are cut at 16,384 elements.
fn job(strategy: Strategy, change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 2;
        c.model.n_embd = 64;
        c.train.micro_batch = 1;
        c.train.optimizer.lr = 3e-3;
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = 0.2;
        c.parallel.strategy = strategy;
        c.parallel.timeout_s = 600.0;
        change(c);
    })
}

/// All strategies on `world` ranks: 100 steps, clipped, with accumulation 1 or 2 of whole gradients. Each of the
/// sharded ones recomputes something else, and over three sizes each of them everything.
fn all_are_bit_equal(world: u32, accumulation: usize) {
    const RECOMPUTED: [Recompute; 3] = [Recompute::Norms, Recompute::Selective, Recompute::Full];
    let run = |strategy, recompute| {
        let job = job(strategy, |c| {
            c.train.steps = 100;
            c.train.recompute = recompute;
            c.train.grad_clip = Some(0.8);
            c.train.grad_accumulation = accumulation;
            c.train.verify_every = 50;
            c.train.eval_every = 40;
            c.parallel.accumulate = Accumulate::Full;
        });
        job.train(world)
    };
    let reference = run(Strategy::Ddp, Recompute::Norms);
    let clipped = reference
        .metrics
        .iter()
        .filter(|line| line.grad_norm > 0.8)
        .count();
    assert!(
        clipped > 10 && reference.metrics.len() == 100,
        "{clipped} steps clipped"
    );
    for (i, strategy) in SHARDED.into_iter().enumerate() {
        let recompute = RECOMPUTED[(i + world as usize + accumulation) % RECOMPUTED.len()];
        let trained = run(strategy, recompute);
        let what = format!("{strategy:?}, {recompute:?}, {world} ranks, accumulation {accumulation}");
        assert_same(&reference, &trained, &what);
        assert_eq!(trained.summary.val_loss, reference.summary.val_loss, "{what}");
    }
}

#[test]
fn two_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(2, 1);
}

#[test]
fn three_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(3, 1);
}

#[test]
fn four_ranks_train_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(4, 1);
}

#[test]
fn whole_gradients_accumulate_the_same_numbers_under_every_strategy() {
    all_are_bit_equal(2, 2);
    all_are_bit_equal(3, 2);
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
fn sharded_accumulation_is_close() {
    let run = |strategy| {
        let job = job(strategy, |c| {
            c.train.steps = 30;
            c.train.grad_accumulation = 3;
        });
        job.train(2)
    };
    let reference = run(Strategy::Ddp);
    for strategy in [Strategy::Zero2, Strategy::Zero3] {
        assert_close(&reference, &run(strategy), &format!("{strategy:?}"));
    }
}

#[test]
fn a_checkpoint_of_any_strategy_and_size_continues_under_any_other() {
    let all = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];
    for writers in 1..=4 {
        let saved = all.map(|strategy| {
            let job = job(strategy, |c| {
                c.train.steps = 2;
                c.train.rescale = Rescale::KeepMicroBatch;
                c.run.resume = Resume::Auto;
            });
            (job.train(writers), job)
        });
        for readers in 1..=4 {
            let (state, job) = &saved[0];
            let reference = resumed(job, Strategy::Ddp, readers);
            for (i, (from, job)) in saved.iter().enumerate() {
                // Over the sizes, every strategy reads what every other wrote.
                let to = all[(i + (writers + readers) as usize) % all.len()];
                let what = format!("{:?} on {writers} ranks to {to:?} on {readers}", all[i]);
                assert_same(state, from, &what);
                assert_same(&reference, &resumed(job, to, readers), &what);
            }
        }
    }
}

/// Two more steps of a copy of a run. They have the same bits only if the same state was loaded.
fn resumed(job: &Job, strategy: Strategy, ranks: u32) -> Trained {
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&job.out_dir(), copy.path());
    let mut again = Job::new();
    let data = again.config.data.clone();
    again.config = job.config.clone();
    again.config.data = data;
    again.config.run.out_dir = Some(copy.path().to_owned());
    again.config.parallel.strategy = strategy;
    again.config.train.steps = 4;
    again.train(ranks)
}

#[test]
fn a_restarted_job_ends_bit_equal_to_an_undisturbed_one_under_every_strategy() {
    for strategy in SHARDED {
        let change = |c: &mut TrainConfig| {
            c.train.steps = 7;
            c.train.checkpoint_every = 3;
            // The checkpoint of step 3 is there when the fault comes.
            c.train.checkpoint_async = false;
            c.train.grad_accumulation = 2;
        };
        let undisturbed = job(strategy, change).train(2);
        let mut job = job(strategy, change);
        job.device = Some(Box::new(|session| {
            let broken = session.env().rank.get() == 1;
            FaultyDevice::going_wrong(Fault::Fails, if broken { 5 } else { u64::MAX })
        }));
        let outcomes = job.run(2);
        assert_eq!(outcomes[1].as_ref().unwrap_err().to_string(), "the device broke");
        assert!(outcomes[0].is_err());
        job.device = None;
        job.restarts = 1;
        let resumed = job.train(2);
        assert_same(&undisturbed, &resumed, &format!("{strategy:?}"));
        assert_eq!(resumed.metrics[3].generation, 2);
    }
}
