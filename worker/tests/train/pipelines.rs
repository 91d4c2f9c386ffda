//! Pipelines on whole runs: whatever the schedule, the stages and the micro-batches, the numbers are those of one rank, bit by
//! bit.

use std::sync::Arc;

use crate::train_support::deferred::DeferredDevice;
use crate::train_support::{Job, Trained};
use ddp_worker::config::{Accumulate, ModelKind, Order, PipelineSchedule, Recompute, Strategy, TrainConfig};

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

fn every_schedule_equals_one_rank(stages: usize, accumulations: &[usize]) {
    for &accumulation in accumulations {
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
    every_schedule_equals_one_rank(2, &[1, 4, 5]);
}

/// Fewer micro-batches than ranks among them. torchtitan 775: such a step hung.
#[test]
fn four_stages_equal_one_rank_under_every_schedule() {
    every_schedule_equals_one_rank(4, &[1, 3, 4, 9]);
}

/// The halves of backward keep what they read, whatever was recomputed; masks are functions of the samples' numbers.
#[test]
fn recomputation_and_dropout_equal_one_rank() {
    let variants: [(&str, Change); 3] = [
        ("nothing", |c| c.train.recompute = Recompute::Nothing),
        ("full", |c| c.train.recompute = Recompute::Full),
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
