//! Pipelines on whole runs: whatever the schedule, the stages and the micro-batches, the numbers are those of one rank, bit by
//! bit.

use std::sync::Arc;

use crate::train_support::deferred::DeferredDevice;
use crate::train_support::{Job, Trained};
use ddp_worker::config::{
    Accumulate, LastBatch, LearningRate, ModelKind, Order, PipelineSchedule, Precision, Recompute, Resume,
    Strategy, TrainConfig,
};

type Change = fn(&mut TrainConfig);

const ALL: [PipelineSchedule; 6] = [
    PipelineSchedule::GPipe,
    PipelineSchedule::OneFOneB,
    PipelineSchedule::Interleaved,
    PipelineSchedule::ZbH1,
    PipelineSchedule::Zbv,
    PipelineSchedule::Greedy,
];

const STRATEGIES: [Strategy; 4] = [Strategy::Ddp, Strategy::Zero1, Strategy::Zero2, Strategy::Zero3];

/// A few steps of a model of eight layers.
fn job(change: impl FnOnce(&mut TrainConfig)) -> Job {
    Job::with(|c| {
        // Its ends share the token embedding.
        c.model.kind = ModelKind::Gpt2;
        c.model.n_layer = 8;
        c.train.steps = 3;
        c.data.order = Order::Sequential;
        change(c);
    })
}

fn piped(stages: usize, schedule: PipelineSchedule, change: impl FnOnce(&mut TrainConfig)) -> Job {
    job(|c| {
        c.parallel.pipeline.stages = stages;
        c.parallel.pipeline.schedule = schedule;
        change(c);
    })
}

/// The same bits: losses, also of the evaluation, parameters and moments.
fn assert_equal(one: &Trained, other: &Trained, what: &str) {
    assert_eq!(one.losses(), other.losses(), "losses: {what}");
    let validation = |trained: &Trained| trained.summary.val_loss.map(f64::to_bits);
    assert_eq!(validation(one), validation(other), "evaluation: {what}");
    assert_eq!(one.state, other.state, "parameters and moments: {what}");
}

fn every_schedule_equals_one_rank(stages: usize, accumulations: [usize; 3]) {
    for accumulation in accumulations {
        let accumulate = |c: &mut TrainConfig| {
            c.train.grad_accumulation = accumulation;
            // One micro-batch adds both gradients of a tied weight where they are; two ranks add two sums.
            c.model.tied = Some(accumulation > 1);
        };
        let reference = job(accumulate).train(1);
        for schedule in ALL {
            let job = piped(stages, schedule, accumulate);
            let what = format!("{schedule:?} on {stages} ranks, {accumulation} micro-batches");
            assert_equal(&reference, &job.train(stages as u32), &what);
        }
    }
}

#[test]
fn two_stages_equal_one_rank_under_every_schedule() {
    every_schedule_equals_one_rank(2, [1, 4, 5]);
}

/// Two micro-batches are fewer than ranks.
#[test]
fn four_stages_equal_one_rank_under_every_schedule() {
    every_schedule_equals_one_rank(4, [2, 4, 9]);
}

#[test]
fn more_chunks_than_two_equal_one_rank() {
    let accumulate = |c: &mut TrainConfig| c.train.grad_accumulation = 4;
    let reference = job(accumulate).train(1);
    for schedule in [
        PipelineSchedule::GPipe,
        PipelineSchedule::Interleaved,
        PipelineSchedule::ZbH1,
    ] {
        let job = piped(2, schedule, |c| {
            accumulate(c);
            c.parallel.pipeline.chunks = Some(4);
        });
        assert_equal(&reference, &job.train(2), &format!("{schedule:?} of four chunks"));
    }
}

/// Megatron-LM 1304: 30 layers on 4 stages silently became 28.
#[test]
fn thirty_layers_on_four_stages_are_thirty_layers() {
    let thirty = |c: &mut TrainConfig| {
        c.model.n_layer = 30;
        c.train.steps = 2;
        c.train.grad_accumulation = 4;
    };
    let reference = job(thirty).train(1);
    let divided = piped(4, PipelineSchedule::OneFOneB, thirty).train(4);
    assert_equal(&reference, &divided, "divided by cost");
    let given = piped(4, PipelineSchedule::ZbH1, |c| {
        thirty(c);
        c.parallel.pipeline.layers = Some(vec![1, 9, 13, 7]);
    });
    assert_equal(&reference, &given.train(4), "as they are given");
}

/// The halves of backward keep what they read, whatever was recomputed; masks are functions of the samples' numbers.
#[test]
fn recomputation_bf16_and_dropout_equal_one_rank() {
    let variants: [(&str, Change); 5] = [
        ("nothing", |c| c.train.recompute = Recompute::Nothing),
        ("selective", |c| c.train.recompute = Recompute::Selective),
        ("full", |c| c.train.recompute = Recompute::Full),
        ("bf16", |c| c.train.precision = Precision::Bf16),
        ("dropout", |c| c.model.dropout = 0.2),
    ];
    for (what, change) in variants {
        let change = |c: &mut TrainConfig| {
            c.train.grad_accumulation = 4;
            change(c);
        };
        let reference = job(change).train(1);
        for schedule in [
            PipelineSchedule::OneFOneB,
            PipelineSchedule::ZbH1,
            PipelineSchedule::Zbv,
        ] {
            let found = piped(2, schedule, change).train(2);
            assert_equal(&reference, &found, &format!("{what}, {schedule:?}"));
        }
    }
}

/// What an epoch leaves over is a step of fewer micro-batches.
#[test]
fn a_short_last_step_equals_one_rank() {
    let short = |c: &mut TrainConfig| {
        c.data.last_batch = LastBatch::Short;
        c.model.block_size = 128;
        c.train.micro_batch = 3;
        c.train.grad_accumulation = 6;
        c.train.steps = 8;
    };
    let reference = job(short).train(1);
    let tokens: Vec<u64> = reference.metrics.iter().map(|line| line.tokens).collect();
    let first = tokens[0];
    assert!(
        tokens.windows(2).any(|pair| pair[1] - pair[0] < first),
        "a step is short: {tokens:?}"
    );
    for schedule in [PipelineSchedule::OneFOneB, PipelineSchedule::Zbv] {
        let found = piped(2, schedule, short).train(2);
        assert_equal(&reference, &found, &format!("{schedule:?}"));
    }
}

#[test]
fn a_pipeline_beside_another_equals_data_parallelism() {
    for strategy in STRATEGIES {
        let change = |c: &mut TrainConfig| {
            c.parallel.strategy = strategy;
            c.train.grad_accumulation = 4;
            // As stages do, whatever is said here.
            if matches!(strategy, Strategy::Zero2 | Strategy::Zero3) {
                c.parallel.accumulate = Accumulate::Full;
            }
        };
        let reference = job(change).train(2);
        for schedule in [PipelineSchedule::OneFOneB, PipelineSchedule::Zbv] {
            let found = piped(2, schedule, change).train(4);
            assert_equal(&reference, &found, &format!("{strategy:?} under {schedule:?}"));
        }
    }
}

/// Stages hold other units: the last has only such as stay gathered. All of them still make as many passes.
#[test]
fn stages_that_release_nothing_evaluate_as_often_as_others() {
    let change = |c: &mut TrainConfig| {
        c.parallel.strategy = Strategy::Zero3;
        c.parallel.accumulate = Accumulate::Full;
        c.parallel.persist_below = 256 * 16;
        c.train.micro_batch = 1;
        c.train.grad_accumulation = 4;
    };
    let reference = job(change).train(2);
    assert!(reference.summary.val_loss.is_some());
    let found = piped(4, PipelineSchedule::OneFOneB, change).train(8);
    assert_equal(&reference, &found, "evaluation of stages that release nothing");
}

#[test]
fn executors_and_devices_that_run_later_do_not_change_a_bit() {
    let accumulate = |c: &mut TrainConfig| c.train.grad_accumulation = 4;
    let reference = job(accumulate).train(1);
    for schedule in [PipelineSchedule::OneFOneB, PipelineSchedule::Zbv] {
        let inline = piped(2, schedule, |c| {
            accumulate(c);
            c.parallel.overlap = false;
        });
        assert_equal(&reference, &inline.train(2), "without overlap");
        let mut later = piped(2, schedule, accumulate);
        later.device = Some(Box::new(|_| Arc::new(DeferredDevice::new())));
        assert_equal(&reference, &later.train(2), "a device that defers everything");
    }
    let mut nodes = piped(2, PipelineSchedule::Zbv, accumulate);
    nodes.nodes = 2;
    assert_equal(&reference, &nodes.train(2), "on two nodes");
}

/// Resumed with other stages and another schedule.
#[test]
fn a_checkpoint_of_one_pipeline_is_resumed_by_another() {
    let constant = |c: &mut TrainConfig| {
        c.train.grad_accumulation = 4;
        c.train.schedule.kind = LearningRate::Constant;
    };
    let whole = job(constant).train(1);
    let mut job = piped(2, PipelineSchedule::Zbv, |c| {
        constant(c);
        c.train.steps = 1;
    });
    job.train(2);
    job.config.run.resume = Resume::Require;
    for (steps, stages) in [(2, 4), (3, 1)] {
        job.config.train.steps = steps;
        job.config.parallel.pipeline.stages = stages;
        job.config.parallel.pipeline.schedule = PipelineSchedule::OneFOneB;
        let resumed = job.train(stages as u32);
        if steps == whole.metrics.len() as u64 {
            assert_eq!(whole.state, resumed.state);
            assert_eq!(whole.losses(), resumed.losses());
        }
    }
}

/// More replicas leave each fewer micro-batches than the schedule supports.
#[test]
fn a_schedule_that_a_rescaled_run_cannot_have_is_explained() {
    let mut job = piped(2, PipelineSchedule::Interleaved, |c| {
        c.train.grad_accumulation = 10;
        c.train.steps = 1;
    });
    job.train(2);
    job.config.run.resume = Resume::Require;
    job.config.train.steps = 2;
    let refused = job.run(4).remove(0).unwrap_err().to_string();
    insta::assert_snapshot!(refused, @"");
}

#[test]
fn numbers_that_are_not_finite_are_found_in_the_stage_that_makes_them_first() {
    let seen = |job: &Job, ranks: u32| {
        let outcomes = job.run(ranks);
        let words = outcomes
            .into_iter()
            .map(|outcome| outcome.unwrap_err().to_string());
        let words: Vec<String> = words.collect();
        assert!(words.iter().all(|other| *other == words[0]), "{words:?}");
        words[0].clone()
    };
    let diverging = |c: &mut TrainConfig| {
        c.train.grad_accumulation = 4;
        c.train.steps = 30;
        c.train.optimizer.lr = 1e30;
        c.train.verify_every = 0;
    };
    let (one, two) = (
        seen(&job(diverging), 1),
        seen(&piped(2, PipelineSchedule::ZbH1, diverging), 2),
    );
    let place = |words: &str| {
        let (_, rank_and_place) = words.split_once("first seen on ").unwrap();
        let (_, place) = rank_and_place.split_once(": ").unwrap();
        place.to_owned()
    };
    assert_eq!(place(&one), place(&two), "{one}\n{two}");
}

/// A rank counts what it receives: of each boundary an activation or its gradient a micro-batch, and nothing in `other`.
#[test]
fn what_stages_send_to_each_other_is_counted_by_the_formula() {
    let (micro_batches, steps) = (4, 2);
    let counted = |schedule, stages: usize| {
        let job = piped(stages, schedule, |c| {
            c.train.grad_accumulation = micro_batches;
            c.model.tied = Some(false);
            c.train.steps = steps;
            c.train.verify_every = 0;
        });
        let model = &job.config.model;
        let message = job.config.train.micro_batch * model.block_size * model.n_embd * size_of::<f32>();
        let sent = job.train(stages as u32).metrics[1].wire_bytes;
        assert_eq!(sent.pipeline % message as u64, 0, "{sent:?}");
        assert_eq!((sent.grads, sent.params, sent.activations), (0, 0, 0), "{sent:?}");
        assert!(sent.other < message as u64, "only losses and norms: {sent:?}");
        sent.pipeline / (message * micro_batches) as u64
    };
    // Rank 0 receives the gradient of each boundary behind its stages, and the activation of each before them.
    assert_eq!(counted(PipelineSchedule::OneFOneB, 2), 1);
    assert_eq!(counted(PipelineSchedule::ZbH1, 4), 1);
    assert_eq!(counted(PipelineSchedule::Interleaved, 2), 3);
    assert_eq!(counted(PipelineSchedule::Zbv, 4), 2);
}
