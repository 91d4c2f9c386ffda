//! What a step may do otherwise: recompute, skip, end short, scale its rate.

use std::sync::{Arc, Mutex};

use crate::train_support::agent::with_agent;
use crate::train_support::deferred::DeferredDevice;
use crate::train_support::faulty::{Fault, FaultyDevice, Spoilt};
use crate::train_support::{Job, Trained, assert_same};
use ddp_proto::control::{ToAgent, ToWorker};
use ddp_worker::checkpoint::{Reader, TensorKind, Which};
use ddp_worker::config::{
    Accumulate, LastBatch, LearningRate, LrScaling, ModelKind, OnNonFinite, Order, Recompute, Resume,
    Strategy, TrainConfig,
};
use ddp_worker::plan::Estimate;
use ddp_worker::session::Session;
use ddp_worker::train::{Assignment, TrainError, run_generations};

const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// Large enough that every rank owns parameters, with several blocks.
fn job(change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        c.model.n_layer = 3;
        c.model.n_embd = 64;
        c.train.optimizer.lr = 3e-3;
        c.parallel.first_bucket_mb = 0.06;
        c.parallel.bucket_mb = 0.2;
        change(c);
    })
}

#[test]
fn recomputation_changes_no_bit_under_any_strategy() {
    let run = |strategy, recompute, kind| {
        let job = job(|c| {
            c.model.kind = kind;
            c.train.steps = 3;
            c.train.grad_accumulation = 2;
            c.train.recompute = recompute;
            c.parallel.strategy = strategy;
            c.parallel.accumulate = Accumulate::Full;
        });
        job.train(2)
    };
    for kind in [ModelKind::Gpt2, ModelKind::Mlp] {
        let reference = run(Strategy::Ddp, Recompute::Norms, kind);
        // ZeRO-1 and -2 hold all parameters, as DDP does.
        for strategy in [Strategy::Ddp, Strategy::Zero3] {
            for recompute in [Recompute::Nothing, Recompute::Selective, Recompute::Full] {
                let what = format!("{kind:?} {strategy:?} {recompute:?}");
                assert_same(&reference, &run(strategy, recompute, kind), &what);
            }
        }
    }
}

#[test]
fn recomputation_gathers_a_group_no_more_often() {
    let sent = |recompute| {
        let job = job(|c| {
            c.train.steps = 2;
            c.train.recompute = recompute;
            c.parallel.strategy = Strategy::Zero3;
        });
        job.train(2).metrics[1].wire_bytes
    };
    let usual = sent(Recompute::Norms);
    assert!(usual.params > 0);
    assert_eq!(usual, sent(Recompute::Selective));
    assert_eq!(usual, sent(Recompute::Full));
}

/// Bytes that one more block adds to the memory of activations.
fn activations_of_a_block(recompute: Recompute) -> u64 {
    let bytes = |layers| {
        let job = job(|c| {
            c.model.n_layer = layers;
            c.train.steps = 2;
            c.train.recompute = recompute;
        });
        // After the last step comes an evaluation.
        let held = job.train(1).metrics[1].memory.activations;
        let told = Estimate::of(&job.config, &job.env(0, 1))
            .unwrap()
            .held
            .activations;
        assert_eq!(held, told, "something found no place in what was planned");
        held
    };
    bytes(6) - bytes(5)
}

#[test]
fn recomputation_keeps_what_the_formula_says() {
    // 2 samples of 16 positions, 64 channels, 2 heads, f32.
    let (positions, channels, heads) = (2 * 16, 64, 2);
    for (recompute, numbers) in [
        (Recompute::Nothing, 16 * channels + heads),
        (Recompute::Norms, 10 * channels + heads),
        (Recompute::Selective, 6 * channels + heads),
        (Recompute::Full, channels),
    ] {
        assert_eq!(
            activations_of_a_block(recompute),
            4 * positions * numbers,
            "{recompute:?}"
        );
    }
}

/// Two blocks; on rank 1 of 2, so many backward passes from step 3 on spoil a gradient of block `h.1`.
fn spoilt(passes: u64, change: impl FnOnce(&mut TrainConfig)) -> Job {
    let mut job = job(|c| {
        c.model.n_layer = 2;
        c.train.schedule.kind = LearningRate::Constant;
        change(c);
    });
    job.device = Some(Box::new(move |session: &Session| {
        let is_hit = session.env().rank.get() == 1;
        FaultyDevice::going_wrong(Spoilt::in_passes(passes), if is_hit { 3 } else { u64::MAX })
    }));
    job
}

/// The message of the ranks that did not hear first that the generation is over.
fn message(job: &Job, world_size: u32) -> String {
    let outcomes = job.run(world_size);
    let errors: Vec<_> = outcomes
        .iter()
        .map(|o| o.as_ref().expect_err("it should fail"))
        .collect();
    let own = |error: &&&TrainError| !matches!(error, TrainError::GenerationOver { .. });
    let own: Vec<String> = errors.iter().filter(own).map(ToString::to_string).collect();
    assert!(
        !own.is_empty() && own.iter().all(|message| *message == own[0]),
        "{own:#?}"
    );
    own[0].clone()
}

/// Of a model of two blocks: gradients of weights in a pass, the head's among them.
const PRODUCTS_A_STEP: usize = 2 * 4 + 1;

const FIRST_SEEN: &str =
    "first seen on rank 1: the gradient of `h.1.mlp.c_fc.weight` in block `h.1`, micro-batch 0";

#[test]
fn a_gradient_that_is_no_number_names_rank_block_and_parameter() {
    for strategy in STRATEGIES {
        let job = spoilt(u64::MAX, |c| c.parallel.strategy = strategy);
        let message = message(&job, 2);
        let expected = format!("norm of the averaged gradient is NaN in step 3: {FIRST_SEEN}\n  hint: ");
        assert!(message.starts_with(&expected), "{strategy:?}: {message}");
        assert_eq!(job.metrics().len(), 2);
    }
}

/// First is what comes first in a step, whichever rank it is on.
#[test]
fn of_two_ranks_that_see_it_the_one_that_sees_it_earlier_is_named() {
    let (late, early) = (7, 3);
    for (of_rank_0, of_rank_1, seen) in [
        ((0, late), (0, early), "block `h.1`, micro-batch 0"),
        ((1, early), (0, late), "block `h.0`, micro-batch 0"),
    ] {
        let mut job = job(|c| {
            c.model.n_layer = 2;
            c.train.grad_accumulation = 2;
        });
        job.device = Some(Box::new(move |session: &Session| {
            let (micro_batch, weight) = [of_rank_0, of_rank_1][session.env().rank.get() as usize];
            let spoilt = Spoilt {
                passes: u64::MAX,
                micro_batch: (micro_batch, 2),
                weight,
            };
            FaultyDevice::going_wrong(Fault::NotANumber(spoilt), 3)
        }));
        let message = message(&job, 2);
        let found = message.contains("first seen on rank 1: the gradient of `h.") && message.contains(seen);
        assert!(found, "{message}");
    }
}

/// On a device that has the next step already: what is inspected is what the step had, not what the next one made of it.
#[test]
fn a_step_is_inspected_before_the_next_one_counts() {
    let mut job = job(|c| {
        c.model.n_layer = 2;
        c.train.steps = 3;
        // An update would leave parameters that no pass survives.
        c.train.optimizer.lr = 1e30;
        c.train.schedule.kind = LearningRate::Constant;
    });
    job.device = Some(Box::new(|_| Arc::new(DeferredDevice::spoiling(2))));
    let message = message(&job, 1);
    assert!(
        message.contains("in step 1: no rank can reproduce it alone"),
        "{message}"
    );
}

/// Skipping costs a device that is ahead some steps twice, and no bit.
#[test]
fn a_device_that_runs_later_skips_as_one_that_does_not() {
    for strategy in STRATEGIES {
        let run = |later: bool| {
            let mut job = job(|c| {
                c.model.n_layer = 2;
                c.train.steps = 4;
                c.train.on_nonfinite = OnNonFinite::Skip;
                c.parallel.strategy = strategy;
            });
            job.device = Some(Box::new(move |session: &Session| {
                let is_hit = session.env().rank.get() == 1;
                if later {
                    // Two blocks have eight weights, and the head one more: the third of the second step.
                    let sound = if is_hit { PRODUCTS_A_STEP + 2 } else { usize::MAX };
                    Arc::new(DeferredDevice::spoiling(sound))
                } else {
                    FaultyDevice::going_wrong(Spoilt::in_passes(1), if is_hit { 2 } else { u64::MAX })
                }
            }));
            let trained = job.train(2);
            assert_eq!(trained.metrics.last().unwrap().skipped, 1, "{strategy:?}");
            trained
        };
        assert_same(&run(false), &run(true), &format!("{strategy:?}"));
    }
}

#[test]
fn a_fault_that_does_not_come_back_is_called_one() {
    let message = message(&spoilt(1, |_| ()), 2);
    assert!(
        message.contains("in step 3: no rank can reproduce it alone"),
        "{message}"
    );
}

#[test]
fn a_skipped_step_leaves_everything_as_it_was() {
    for strategy in STRATEGIES {
        // The first pass of step 3, the inspection after it, then a pass a step.
        let skipping = spoilt(1 + 3, |c| {
            c.train.steps = 5;
            c.train.on_nonfinite = OnNonFinite::Skip;
            c.parallel.strategy = strategy;
        });
        let skipped = skipping.train(2);
        let reference = spoilt(0, |c| {
            c.train.steps = 2;
            c.parallel.strategy = strategy;
        });
        assert_eq!(skipped.state, reference.train(2).state, "{strategy:?}");
        let counts: Vec<u64> = skipped.metrics.iter().map(|line| line.skipped).collect();
        assert_eq!(counts, [0, 0, 1, 2, 3]);
        assert!(skipped.metrics[4].grad_norm.is_nan() && skipped.metrics[4].loss.is_finite());
    }
}

/// The elements of a tensor of the latest checkpoint.
fn elements(job: &Job, tensor: &str) -> Vec<f32> {
    let reader = Reader::open(&job.out_dir(), Which::Latest).unwrap();
    let bytes = reader.read_whole(&TensorKind::Parameter.of(tensor)).unwrap();
    let each = bytes.chunks_exact(size_of::<f32>());
    each.map(bytemuck::pod_read_unaligned).collect()
}

/// As PyTorch under a `GradScaler`: the first update that is made moves each element by the learning rate.
#[test]
fn a_skipped_step_does_not_count_for_the_bias_correction() {
    for strategy in STRATEGIES {
        let run = |steps| {
            let mut job = job(|c| {
                c.train.steps = steps;
                c.train.on_nonfinite = OnNonFinite::Skip;
                c.train.optimizer.lr = 1e-3;
                c.train.optimizer.weight_decay = 0.0;
                c.train.schedule.kind = LearningRate::Constant;
                c.train.grad_clip = None;
                c.parallel.strategy = strategy;
            });
            // Only the first pass of the first step.
            job.device = Some(Box::new(|_| FaultyDevice::going_wrong(Spoilt::in_passes(1), 1)));
            assert_eq!(job.train(2).metrics.last().unwrap().skipped, 1);
            job
        };
        let [before, after] = [1, 2].map(|steps| elements(&run(steps), "h.0.mlp.c_fc.weight"));
        let moved = before
            .iter()
            .zip(&after)
            .map(|(before, after)| (before - after).abs());
        let most = moved.fold(0.0, f32::max);
        assert!((most - 1e-3).abs() < 1e-6, "{strategy:?}: moved by {most}");
    }
}

/// What was skipped before a run was resumed is known after it.
#[test]
fn a_resumed_run_knows_what_was_skipped_before() {
    let job = |steps| {
        let mut job = job(|c| {
            c.train.steps = steps;
            c.train.on_nonfinite = OnNonFinite::Skip;
            c.train.schedule.kind = LearningRate::Constant;
            c.run.resume = Resume::Auto;
        });
        job.device = Some(Box::new(|_| FaultyDevice::going_wrong(Spoilt::in_passes(1), 1)));
        job
    };
    let whole = job(5).train(2);
    assert_eq!(whole.metrics[4].skipped, 1);
    let mut parts = job(2);
    parts.train(2);
    parts.device = None;
    for steps in [3, 5] {
        parts.config.train.steps = steps;
        parts.train(2);
    }
    let saved = Reader::open(&parts.out_dir(), Which::Latest).unwrap();
    assert_eq!(saved.manifest().state.step, 5);
    assert_eq!(parts.state(), whole.state);
}

#[test]
fn too_many_skipped_steps_in_a_row_end_the_run() {
    let job = spoilt(u64::MAX, |c| {
        c.train.steps = 9;
        c.train.on_nonfinite = OnNonFinite::Skip;
        c.train.max_skips = 2;
    });
    let message = message(&job, 2);
    let expected = format!(
        "norm of the averaged gradient is NaN in step 5, after 2 skipped steps in a row: {FIRST_SEEN}"
    );
    assert!(message.starts_with(&expected), "{message}");
    // After the inspection two steps go well again.
    let job = spoilt(2, |c| {
        c.train.on_nonfinite = OnNonFinite::Skip;
        c.train.max_skips = 1;
    });
    assert_eq!(job.train(2).metrics.last().unwrap().skipped, 1);
}

/// 6 of 8 steps need not be finished before the next one begins.
fn hurried(change: impl FnOnce(&mut TrainConfig)) -> Job {
    job(|c| {
        c.train.steps = 8;
        c.train.verify_every = 0;
        c.train.checkpoint_every = 5;
        change(c);
    })
}

#[test]
fn an_asynchronous_device_is_read_a_step_late() {
    for strategy in STRATEGIES {
        let change = |c: &mut TrainConfig| c.parallel.strategy = strategy;
        let reference = hurried(change).train(2);
        let mut job = hurried(change);
        let devices: Arc<Mutex<Vec<Arc<DeferredDevice>>>> = Arc::default();
        let made = devices.clone();
        job.device = Some(Box::new(move |_| {
            let device = Arc::new(DeferredDevice::new());
            made.lock().unwrap().push(device.clone());
            device
        }));
        assert_same(&reference, &job.train(2), &format!("{strategy:?}"));
        for device in devices.lock().unwrap().iter() {
            assert_eq!(device.ran_ahead(), 6, "{strategy:?}");
        }
    }
}

#[test]
fn data_that_comes_early_overwrites_no_batch_that_is_still_read() {
    for strategy in [Strategy::Ddp, Strategy::Zero3] {
        let change = |c: &mut TrainConfig| {
            c.train.steps = 4;
            c.train.grad_accumulation = 5;
            c.train.eval_every = 3;
            c.parallel.strategy = strategy;
        };
        let reference = job(change).train(2);
        let mut job = job(change);
        job.device = Some(Box::new(|_| Arc::new(DeferredDevice::with_early_uploads())));
        assert_same(&reference, &job.train(2), &format!("{strategy:?}"));
    }
}

#[test]
fn a_run_on_an_asynchronous_device_stops_with_all_steps_told() {
    let mut job = hurried(|c| {
        c.train.steps = 100_000;
        c.train.checkpoint_every = 0;
        c.run.resume = Resume::Auto;
    });
    let stop = |message: &ToAgent| match message {
        ToAgent::Heartbeat { step: 2.., .. } => Some(ToWorker::StopAtStepBoundary {
            cause: "SIGTERM".into(),
            stay: false,
        }),
        _ => None,
    };
    let (outcome, _) = with_agent(job.env(0, 1), stop, |session| {
        let assignment = Assignment {
            device: Some(Arc::new(DeferredDevice::new())),
            ..Assignment::of(session)
        };
        run_generations(&job.config, assignment, |_| None)
    });
    let summary = outcome.unwrap();
    assert_eq!(summary.stopped.as_deref(), Some("SIGTERM"));
    assert_eq!(job.metrics().len() as u64, summary.steps);
    job.config.train.steps = summary.steps + 1;
    assert_eq!(job.train(1).metrics.len() as u64, summary.steps + 1);
}

#[test]
fn the_learning_rate_follows_the_global_batch() {
    let rates = |world_size| {
        let job = job(|c| {
            c.train.lr_scaling = LrScaling::Linear;
            c.train.base_batch = Some(4);
            c.train.schedule.warmup_steps = 2;
            c.train.optimizer.lr = 1e-3;
        });
        let metrics = job.train(world_size).metrics;
        metrics.iter().map(|line| line.lr).collect::<Vec<_>>()
    };
    // Global batches of 2 and 8 samples.
    for (half, twice) in rates(1).into_iter().zip(rates(4)) {
        assert!((twice - 4.0 * half).abs() <= 1e-6 * twice, "{half} {twice}");
    }
    assert!((rates(2)[2] - 1e-3).abs() < 1e-9);
}

/// 443 samples of 16 tokens in batches of 108: the fifth step of an epoch has 11.
fn uneven(world_size: usize, change: impl FnOnce(&mut TrainConfig)) -> Trained {
    let job = job(|c| {
        c.model.n_layer = 1;
        c.data.order = Order::Sequential;
        c.data.last_batch = LastBatch::Short;
        c.train.steps = 11;
        c.train.micro_batch = 36 / world_size;
        c.train.grad_accumulation = 3;
        change(c);
    });
    job.train(world_size as u32)
}

#[test]
fn uneven_last_batches_train_the_numbers_of_one_rank() {
    let alone = uneven(1, |_| ());
    let tokens: Vec<u64> = alone.metrics.iter().map(|line| line.tokens / 16).collect();
    let epoch = [108, 216, 324, 432, 443];
    assert_eq!(tokens[..5], epoch);
    assert_eq!(tokens[5..10], epoch.map(|n| 443 + n));
    assert_eq!(alone.metrics[4].epoch, 1.0);
    // On 4 ranks the last batch leaves 9, 2, 0 and 0 samples.
    for world_size in [3, 4] {
        for strategy in STRATEGIES {
            let found = uneven(world_size, |c| c.parallel.strategy = strategy);
            assert_eq!(found.metrics.len(), alone.metrics.len());
            for (one, other) in alone.metrics.iter().zip(&found.metrics) {
                let what = format!("step {}, {world_size} ranks, {strategy:?}", one.step);
                let close = |a: f64, b: f64| ((a - b) / a).abs() < 1e-5;
                assert!(close(one.loss, other.loss), "{what}: {} {}", one.loss, other.loss);
                assert!(
                    close(one.grad_norm, other.grad_norm),
                    "{what}: norm {} {}",
                    one.grad_norm,
                    other.grad_norm
                );
                assert_eq!(one.tokens, other.tokens, "{what}");
            }
        }
    }
}
