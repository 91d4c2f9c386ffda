//! The life of a run: resuming, stopping, failing with a name.

use crate::train_support::agent::with_agent;
use crate::train_support::faulty::{Fault, FaultyDevice};
use crate::train_support::{Job, Outcome};
use ddp_proto::control::{Phase, ToAgent, ToWorker};
use ddp_worker::config::{OffloadTarget, OptimizerKind, Rescale, Resume, TrainConfig};
use ddp_worker::metrics::Summary;
use ddp_worker::session::Session;
use ddp_worker::train::{TrainError, run_worker};

fn error(outcome: &Outcome) -> String {
    outcome.as_ref().expect_err("it should fail").to_string()
}

/// A device that goes wrong on rank 1 only.
fn faulty_rank_1(fault: Fault, step: u64) -> crate::train_support::DeviceOf {
    Box::new(move |session: &Session| {
        let step = if session.env().rank.get() == 1 {
            step
        } else {
            u64::MAX
        };
        FaultyDevice::going_wrong(fault, step)
    })
}

#[test]
fn a_restarted_job_ends_bit_equal_to_an_undisturbed_one() {
    let change = |c: &mut TrainConfig| {
        c.train.steps = 9;
        c.train.checkpoint_every = 3;
        // The checkpoint of step 3 is there when the fault comes.
        c.train.checkpoint_async = false;
        c.train.grad_accumulation = 2;
    };
    let undisturbed = Job::with(change).train(2);
    let mut job = Job::with(change);
    job.device = Some(faulty_rank_1(Fault::Fails, 6));
    let outcomes = job.run(2);
    assert_eq!(error(&outcomes[1]), "the device broke");
    assert!(
        matches!(&outcomes[0], Err(TrainError::GenerationOver { rank: 0, cause, .. }) if cause == "rank 1 failed")
    );
    // Rank 0 may have recorded steps that no checkpoint holds; they must not appear twice.
    job.device = None;
    job.restarts = 1;
    let resumed = job.train(2);
    assert_eq!(resumed.state, undisturbed.state);
    assert_eq!(resumed.losses(), undisturbed.losses());
    let steps: Vec<u64> = resumed.metrics.iter().map(|line| line.step).collect();
    assert_eq!(steps, (1..=9).collect::<Vec<_>>());
    assert_eq!(resumed.metrics[2].generation, 1);
    assert_eq!(resumed.metrics[3].generation, 2);
}

#[test]
fn a_global_batch_that_cannot_be_kept_is_refused_on_every_rank() {
    let mut job = Job::with(|c| {
        c.train.steps = 2;
        c.run.resume = Resume::Auto;
    });
    job.train(2);
    job.config.train.steps = 4;
    let outcomes = job.run(3);
    let refused = |o: &Outcome| matches!(o, Err(TrainError::Refused(words)) if words.contains("global batch of 4 samples, but 3 ranks"));
    let over = |o: &Outcome| matches!(o, Err(TrainError::GenerationOver { .. }));
    assert!(outcomes.iter().any(refused), "{outcomes:?}");
    assert!(outcomes.iter().all(|o| refused(o) || over(o)), "{outcomes:?}");
    assert_eq!(job.metrics().len(), 2, "nothing was trained");
    // What the refusal names does fit.
    job.config.train.rescale = Rescale::KeepMicroBatch;
    let last = job.train(3).metrics.pop().unwrap();
    // 2 steps of 2 ranks, then 2 of 3, 2 samples of 16 tokens each.
    assert_eq!((last.step, last.world_size), (4, 3));
    assert_eq!(last.tokens, (2 * 2 + 2 * 3) * 2 * 16);
}

#[test]
fn a_contradiction_with_the_checkpoint_names_the_key() {
    let mut job = Job::with(|c| c.run.resume = Resume::Require);
    job.config.run.resume = Resume::Auto;
    job.train(1);
    // What losses of experts weigh may change.
    job.config.model.experts.aux_loss = 0.5;
    job.config.run.seed = 7;
    let message = error(&job.run(1)[0]);
    assert!(
        message.contains("`run.seed` is 7, but the run was started with 1337\n  hint: "),
        "{message}"
    );
    job.config.run.seed = 1337;
    job.config.model.n_embd = 32;
    let message = error(&job.run(1)[0]);
    assert!(
        message.contains("`model.n_embd` is 32, but the run was started with 16"),
        "{message}"
    );
    job.config.model.n_embd = 16;
    job.config.train.optimizer.kind = OptimizerKind::Lion;
    let message = error(&job.run(1)[0]);
    let expected = "`train.optimizer.kind` is \"lion\", but the run was started with \"adamw\"";
    assert!(message.contains(expected), "{message}");
}

#[test]
fn ranks_with_different_configurations_stop_with_the_key_and_the_rank() {
    let rate: fn(&mut TrainConfig) = |c| c.train.optimizer.lr = 0.5;
    let home: fn(&mut TrainConfig) = |c| c.train.offload.optimizer = OffloadTarget::File;
    for (key, change) in [("train.optimizer.lr", rate), ("train.offload.optimizer", home)] {
        let job = Job::new();
        let outcomes = job.run_with(3, |rank, config| {
            if rank == 2 {
                change(config);
            }
        });
        let expected = format!("rank 2 does not agree with rank 0: configuration key `{key}` is ");
        let named = outcomes
            .iter()
            .filter(|o| error(o).starts_with(&expected))
            .count();
        // Whoever is told of the end of the generation first says that instead.
        let over = outcomes
            .iter()
            .filter(|o| matches!(o, Err(TrainError::GenerationOver { .. })))
            .count();
        assert!(named >= 1 && named + over == 3, "{outcomes:?}");
        assert!(!job.out_dir().exists(), "nothing was begun");
    }
}

#[test]
fn ranks_offload_to_folders_of_their_own() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let job = Job::with(|c| c.train.offload.optimizer = OffloadTarget::File);
    let outcomes = job.run_with(2, |rank, config| {
        config.train.offload.dir = Some(folders[rank as usize].path().to_owned());
    });
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    assert_eq!(job.metrics().len(), 6);
    let memory = job.metrics()[5].memory;
    assert_eq!(memory.optimizer_file, 2 * memory.params, "two moments");
    assert_eq!(
        (memory.optimizer, memory.optimizer_host),
        (memory.optimizer_file, 0),
        "it is small"
    );
}

#[test]
fn a_flipped_bit_stops_the_run_with_the_parameter_and_the_rank() {
    let mut job = Job::with(|c| c.train.verify_every = 2);
    job.device = Some(faulty_rank_1(Fault::FlipsBit, 3));
    let outcomes = job.run(2);
    let first = &ddp_worker::model::build(&job.config.model, 256).unwrap();
    let param = &first.params[first.backward_order()[0].0].key;
    let expected = format!("parameter `{param}` of rank 1 differs from rank 0 after step 4");
    assert!(
        outcomes.iter().any(|o| error(o).starts_with(&expected)),
        "{outcomes:?}"
    );
}

#[test]
fn a_loss_that_is_no_number_names_rank_and_step_and_leaves_the_checkpoint() {
    let job = Job::with(|c| {
        c.train.optimizer.lr = 1e30;
        c.train.checkpoint_every = 1;
        c.train.verify_every = 0;
    });
    let outcomes = job.run(2);
    assert!(
        outcomes
            .iter()
            .any(|o| error(o)
                .starts_with("loss is NaN on rank 0 in step 2: first seen on rank 0: the output of block `h.0`, micro-batch 0\n  hint: lower `train.optimizer.lr`")),
        "{outcomes:?}"
    );
    assert_eq!(job.metrics().len(), 1);
    assert!(!job.state().is_empty());
}

#[test]
fn validation_is_the_same_mean_whoever_computes_it() {
    let val_loss = |world_size| {
        let job = Job::with(|c| {
            c.train.steps = 1;
            c.train.optimizer.lr = 0.0;
            c.train.micro_batch = 4;
        });
        job.train(world_size).summary.val_loss.unwrap()
    };
    // 49 blocks, which neither 2 nor 3 ranks nor micro-batches of 4 divide.
    let alone = val_loss(1);
    for world_size in [2, 3] {
        let error = (val_loss(world_size) - alone).abs() / alone;
        assert!(error < 1e-9, "{world_size} ranks: off by {error}");
    }
}

#[test]
fn a_run_that_is_asked_to_stop_saves_and_goes_on_later() {
    let job = Job::with(|c| {
        c.train.steps = 100_000;
        c.train.verify_every = 0;
        c.run.resume = Resume::Auto;
    });
    let stop = |message: &ToAgent| match message {
        ToAgent::Heartbeat { step: 2.., .. } => Some(ToWorker::StopAtStepBoundary {
            cause: "SIGTERM".into(),
            stay: false,
        }),
        _ => None,
    };
    let (outcome, heard) = with_agent(job.env(0, 1), stop, |session| run_worker(&job.config, session));
    let summary = outcome.unwrap();
    assert_eq!(summary.stopped.as_deref(), Some("SIGTERM"));
    assert!(summary.steps >= 2 && summary.steps < 100_000);
    let phases: Vec<Phase> = heard
        .iter()
        .filter_map(|message| match message {
            ToAgent::Heartbeat { phase, .. } => Some(*phase),
            _ => None,
        })
        .collect();
    // Not `Finishing`: steps are left.
    assert_eq!(phases.last(), Some(&Phase::Saving));
    let mut job = job;
    job.config.train.steps = summary.steps + 3;
    let resumed = job.train(1);
    assert_eq!(resumed.metrics.len() as u64, summary.steps + 3);
}

/// Runs the job on one rank; its agent has asked it to stop before its first step.
fn run_asked_to_stop(job: &Job) -> Outcome {
    let stop = |message: &ToAgent| match message {
        ToAgent::Heartbeat { .. } => Some(ToWorker::StopAtStepBoundary {
            cause: "SIGTERM".into(),
            stay: false,
        }),
        _ => None,
    };
    let (outcome, _) = with_agent(job.env(0, 1), stop, |session| {
        session.heartbeat(0, Phase::Starting, None);
        while session.stop_requested().is_none() {
            std::thread::yield_now();
        }
        run_worker(&job.config, session)
    });
    outcome
}

fn summary_of(job: &Job) -> Summary {
    Summary::read(&job.out_dir().join("summary.json")).unwrap()
}

#[test]
fn a_run_that_is_asked_to_stop_in_its_last_step_is_complete() {
    let job = Job::with(|c| c.train.steps = 1);
    let outcome = run_asked_to_stop(&job).unwrap();
    assert_eq!((outcome.steps, outcome.stopped), (1, None));
    let summary = summary_of(&job);
    assert!(summary.complete && summary.val_loss.is_some(), "{summary:?}");
}

/// Its last steps were taken from it: nothing is left to train, and the summary of the life that trained still counts.
#[test]
fn a_stopped_run_that_is_resumed_at_its_end_is_complete() {
    let mut job = Job::with(|c| c.train.steps = 3);
    assert!(run_asked_to_stop(&job).unwrap().stopped.is_some());
    let stopped = summary_of(&job);
    assert_eq!(
        (stopped.steps, stopped.complete, stopped.val_loss),
        (1, false, None)
    );
    job.config.train.steps = 1;
    job.config.run.resume = Resume::Auto;
    let val_loss = job.train(1).summary.val_loss;
    assert!(val_loss.is_some());
    let complete = Summary {
        complete: true,
        stopped: None,
        val_loss,
        ..stopped
    };
    assert_eq!(summary_of(&job), complete);
}

#[test]
fn a_stopped_run_goes_on_unasked_but_not_after_a_life_that_failed() {
    let mut job = Job::with(|c| c.train.steps = 6);
    assert!(run_asked_to_stop(&job).unwrap().stopped.is_some());
    assert_eq!(summary_of(&job).stopped.as_deref(), Some("SIGTERM"));
    job.device = Some(Box::new(|_: &Session| FaultyDevice::going_wrong(Fault::Fails, 2)));
    assert_eq!(error(&job.run(1)[0]), "the device broke");
    job.device = None;
    let refused = error(&job.run(1)[0]);
    assert!(refused.contains("already holds a run"), "{refused}");
}

#[test]
fn the_agent_hears_progress_and_the_words_of_a_failure() {
    let job = Job::new();
    let (outcome, heard) = with_agent(
        job.env(0, 1),
        |_| None,
        |session| run_worker(&job.config, session),
    );
    outcome.unwrap();
    let last = heard.iter().rev().find_map(|message| match message {
        ToAgent::Heartbeat { step, progress, .. } => progress.clone().map(|p| (*step, p)),
        _ => None,
    });
    let (step, progress) = last.expect("a heartbeat with progress");
    assert_eq!((step, progress.steps), (6, 6));
    assert!(progress.tokens_per_s > 0.0 && progress.val_loss.is_some());
    assert_eq!(progress.val_step, Some(6));

    let (outcome, heard) = with_agent(
        job.env(0, 1),
        |_| None,
        |session| run_worker(&job.config, session),
    );
    assert!(outcome.is_err());
    let said = heard.iter().find_map(|message| match message {
        ToAgent::Failure { message, hint, .. } => Some((message.clone(), hint.clone())),
        _ => None,
    });
    let (message, hint) = said.expect("the failure");
    assert!(message.contains("already holds a run"), "{message}");
    assert!(hint.is_some_and(|hint| hint.starts_with("set `run.resume: auto`")));
    assert_eq!(job.metrics().len(), 6, "the run was touched");
}

#[test]
fn the_end_of_a_generation_is_named() {
    let job = Job::with(|c| c.train.steps = 100_000);
    let over = |message: &ToAgent| match message {
        ToAgent::Heartbeat { step: 1.., .. } => Some(ToWorker::GenerationOver {
            generation: job.env(0, 1).generation,
            cause: "rank 5 (node `b`) died of SIGKILL".into(),
        }),
        _ => None,
    };
    let (outcome, _) = with_agent(job.env(0, 1), over, |session| run_worker(&job.config, session));
    assert_eq!(
        error(&outcome),
        "rank 0 stopped: the launcher stopped the workers: rank 5 (node `b`) died of SIGKILL"
    );
}

#[test]
fn the_summary_says_what_the_run_came_to() {
    let job = Job::new();
    let trained = job.train(2);
    let text = std::fs::read_to_string(job.out_dir().join("summary.json")).unwrap();
    let summary: Summary = serde_json::from_str(&text).unwrap();
    assert!(summary.complete);
    assert_eq!((summary.steps, summary.samples, summary.world_size), (6, 24, 2));
    assert_eq!(summary.val_loss, trained.summary.val_loss);
    assert_eq!(summary.checkpoint.as_deref(), Some("step_00000006"));
}
