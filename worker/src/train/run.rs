//! A run of one rank, from a configuration and a session to a summary: one generation, or several in the same process.
//!
//! A worker stops at a step boundary when its agent asks: it saves and returns without an error. It stops with an
//! error as soon as it learns that the generation is over. The next generation goes on from what the ranks have kept in
//! memory, or from the latest checkpoint.

use std::path::Path;
use std::time::Instant;

use ddp_proto::control::Phase;
use ddp_proto::words::{counted, duration, quoted, rate};

use super::TrainError;
use super::checkpointing::{Kept, failed_saves};
use super::reporting::{Recorder, say, warn};
use super::setup::{Assignment, Prepared, open, prepare};
use super::startup_table::startup_table;
use super::step::RunSummary;
use super::world::World;
use crate::config::TrainConfig;
use crate::metrics::{RunDir, Summary};
use crate::session::Session;

/// How a generation, and the run in it, has ended on a rank.
pub type Ended = Result<RunSummary, TrainError>;

/// Trains as `config` says, at the place in the job that `session` gives. Every rank of the generation must call it.
///
/// On failure the agent has been told; printing the error is left to the caller.
pub fn run_worker(config: &TrainConfig, session: &Session) -> Ended {
    run_generations(config, Assignment::of(session), |_| None)
}

/// As [`run_worker`], in one generation after the other: `next` learns how one has ended on this rank, and gives the
/// place in the next. By then all that the rank had of the generation is gone, threads, connections and shared memory, but
/// for the state of one that has steps left, and a save whose file system does not answer. Returns how the last one
/// has ended.
pub fn run_generations(
    config: &TrainConfig,
    first: Assignment,
    mut next: impl FnMut(&mut Ended) -> Option<Assignment>,
) -> Ended {
    let (mut assignment, mut kept) = (first, None);
    loop {
        let mut ended = run_generation(config, &assignment, &mut kept);
        // It holds the device, too.
        drop(assignment);
        match next(&mut ended) {
            Some(next) => assignment = next,
            None => return ended,
        }
    }
}

/// `kept` is what the rank has of the generation before, and then of this one.
fn run_generation(config: &TrainConfig, assignment: &Assignment, kept: &mut Option<Kept>) -> Ended {
    let session = assignment.session.clone();
    session.heartbeat(0, Phase::Starting, None);
    let mut world = None;
    let ended = train(config, assignment, &mut world, kept).map_err(|error| {
        report_lost(&session, &error);
        let verdict = if error.is_consequence() {
            session.verdict()
        } else if error.is_own() {
            // The others may have failed because of it, and faster.
            None
        } else {
            session.cancel().cause().map(str::to_owned)
        };
        match verdict {
            // What failed when the generation was over failed because of it.
            Some(cause) => TrainError::GenerationOver {
                rank: session.env().rank.get() as usize,
                activity: session.activity(),
                cause,
            },
            None => error,
        }
    });
    if let Err(error) = &ended {
        let (message, hint) = error.message_and_hint();
        session.fail(&message, hint.as_deref(), error.is_consequence());
    }
    if let Some(world) = world {
        if ended.is_err() {
            // What the threads still wait for ends at once.
            world.cancel.cancel("this rank has left the generation");
            world.comm.abandon();
        }
        world.mesh.end_threads();
    }
    ended
}

/// Tells the agent which rank is lost, if that is the error.
fn report_lost(session: &Session, error: &TrainError) {
    if let Some(rank) = error.lost_rank() {
        session.report_peer_lost(rank);
    }
}

fn train(
    config: &TrainConfig,
    assignment: &Assignment,
    joined: &mut Option<World>,
    kept: &mut Option<Kept>,
) -> Ended {
    let started = Instant::now();
    let (config, opened) = open(config, assignment, kept)?;
    let mut prepared = prepare(&config, opened, joined, kept)?;
    let begun = prepared.begin();
    let ended = begun.and_then(|()| run(&mut prepared, started));
    // Before memory is freed that a collective in flight may use.
    let state = match &ended {
        Err(error) => {
            // The agent need not wait until the device is at rest.
            report_lost(&assignment.session, error);
            if error.is_own() {
                assignment.session.set_outlives(false);
            }
            prepared.trainer.abandon(error)
        }
        Ok(summary) if summary.stopped.is_some() => prepared.trainer.keep(),
        Ok(_) => Ok(None),
    };
    *kept = state.unwrap_or_else(|error| {
        warn(&format!(
            "this process cannot go on in another generation: {error}"
        ));
        assignment.session.set_outlives(false);
        None
    });
    ended
}

fn run(prepared: &mut Prepared<'_>, started: Instant) -> Ended {
    let parts = prepared.trainer.parts();
    let (config, rank, first_step) = (parts.config, parts.world.rank(), parts.first_step);
    let run_dir = (rank == 0).then_some(prepared.run_dir.as_ref());
    let mut recorder = Recorder::open(run_dir, first_step, config, &parts.world)?;
    let mut last = None;
    if rank == 0 {
        let path = prepared.run_dir.summary();
        last = Summary::read(&path);
        // It does not say how this life ends.
        if first_step < config.train.steps {
            Summary::delete(&path)?;
        }
        say(&startup_table(prepared));
    }
    let mut outcome = RunSummary {
        out_dir: prepared.run_dir.path().to_owned(),
        ..RunSummary::default()
    };
    let ended = (prepared.trainer).run(&mut prepared.reducer, &mut recorder, &mut outcome);
    if rank == 0 && matches!(ended, Err(TrainError::NotSaved { .. })) {
        // Where the disk takes so little; the error that counts is on its way.
        let _ = summary(prepared, &recorder, &outcome, started, false).write(&prepared.run_dir.summary());
    }
    ended?;
    if rank == 0 {
        finish(prepared, &recorder, &outcome, started, last)?;
        recorder.check()?;
    }
    prepared.trainer.parts().world.comm.shutdown();
    Ok(outcome)
}

/// Writes the summary, and says what the run has come to. `last` is the summary of the life before this one.
fn finish(
    prepared: &Prepared<'_>,
    recorder: &Recorder,
    outcome: &RunSummary,
    started: Instant,
    last: Option<Summary>,
) -> Result<(), TrainError> {
    let (trainer, path) = (prepared.trainer.parts(), prepared.run_dir.summary());
    let summary = summary(prepared, recorder, outcome, started, true);
    // A life without steps knows neither loss nor speed, and the life that had them has written them down; unless that
    // one was killed after its last checkpoint.
    let told = last.filter(|before| {
        before.steps == summary.steps && before.loss.is_some() && trainer.first_step == summary.steps
    });
    match told {
        None => summary.write(&path)?,
        Some(before) if before.complete && summary.complete => {}
        // It was stopped where the configuration ends by now, or this life was stopped before its first step.
        Some(before) => {
            let whole = Summary {
                complete: summary.complete,
                stopped: summary.stopped.clone(),
                val_loss: summary.val_loss,
                ..before
            };
            whole.write(&path)?;
        }
    }
    if let Some(words) = failed_saves(summary.failed_saves, summary.checkpoint.as_deref()) {
        warn(&words);
    }
    let words = end_summary(&summary, trainer.first_step, prepared.run_dir.path());
    let goes_on = summary.stopped.is_some() && trainer.session.stays();
    say(if goes_on {
        words.lines().next().unwrap_or_default()
    } else {
        &words
    });
    if let (Some(_), None) = (&outcome.stopped, &trainer.session.env().control) {
        // Under a launcher, the launcher prints this.
        let run = &trainer.config.run;
        say(&format!(
            "resume with {}",
            RunDir::resume_words(run, &summary.run_id)
        ));
    }
    Ok(())
}

/// The run in one object, on rank 0. `is_saved` is false where its last state is lost.
fn summary(
    prepared: &Prepared<'_>,
    recorder: &Recorder,
    outcome: &RunSummary,
    started: Instant,
    is_saved: bool,
) -> Summary {
    let trainer = prepared.trainer.parts();
    let config = trainer.config;
    let env = trainer.session.env();
    let samples = trainer.loader.consumed_before(outcome.steps);
    let (best, tokens_per_s) = (recorder.validations().best, recorder.tokens_per_s());
    Summary {
        name: config.run.name.clone(),
        run_id: env.run_id.clone(),
        steps: outcome.steps,
        complete: outcome.stopped.is_none() && is_saved,
        stopped: outcome.stopped.clone().filter(|_| is_saved),
        samples,
        tokens: samples * config.model.block_size as u64,
        parameters: trainer.replica.model.param_count() as u64,
        loss: outcome.loss,
        val_loss: outcome.val_loss,
        best_val_loss: best.map(|(loss, _)| loss),
        best_val_step: best.map(|(_, step)| step),
        bytes_per_token: prepared.dataset.val.bytes_per_token(),
        seconds: started.elapsed().as_secs_f64(),
        tokens_per_s,
        achieved: recorder.achieved(tokens_per_s),
        world_size: env.world_size.get(),
        generation: env.generation.get(),
        restarts: env.restart_count,
        checkpoint: trainer.checkpoints.last(),
        failed_saves: trainer.checkpoints.failed() + u64::from(!is_saved),
        device_taken: trainer
            .world
            .compute
            .device
            .taken_bytes()
            .map(|bytes| bytes as u64),
    }
}

/// What to know of a run that has ended: what it took and came to, where its files are, and what to do next. Every model
/// is one of language: text can be made with all of them.
fn end_summary(summary: &Summary, first_step: u64, out_dir: &Path) -> String {
    let (steps, out) = (summary.steps, out_dir.display());
    let trained = steps.saturating_sub(first_step);
    let (time, speed) = (duration(summary.seconds), rate(summary.tokens_per_s));
    let speed = format!("{time} at {speed} tok/s, {}", summary.achieved);
    let took = match trained {
        0 => "nothing was left to train".to_owned(),
        _ if first_step == 0 => speed,
        _ => format!("the last {trained} in {speed}"),
    };
    let mut lines = vec![match &summary.stopped {
        Some(cause) => format!("stopped after step {steps} ({cause}); the checkpoint is saved; {took}"),
        None => format!("done: {}, {took}", counted(steps, "step")),
    }];
    lines.extend(validation(summary));
    if let Some(checkpoint) = &summary.checkpoint {
        lines.push(format!("checkpoint  {out}/checkpoints/{checkpoint}"));
    }
    lines.push(format!("metrics     {out}/metrics.jsonl"));
    if summary.checkpoint.is_some() {
        let out = quoted(&out_dir.to_string_lossy());
        lines.push(format!("next        ddp-train generate {out} --prompt 'The '"));
    }
    lines.join("\n")
}

/// The validation loss, and the best one, if that is another.
fn validation(summary: &Summary) -> Option<String> {
    let best = (summary.best_val_loss.zip(summary.best_val_step))
        .filter(|(best, _)| summary.val_loss.is_none_or(|last| *best < last))
        .map(|(best, step)| format!("best val loss {best:.3} after step {step}"));
    let Some(loss) = summary.val_loss else {
        return best;
    };
    let last = match summary.bytes_per_token {
        // Each token is a byte.
        Some(1.0) => format!("val loss {loss:.3} nats/byte"),
        Some(bytes) => format!("val loss {loss:.3} nats/token, {:.3} nats/byte", loss / bytes),
        None => format!("val loss {loss:.3} nats/token"),
    };
    Some(match best {
        Some(best) => format!("{last}; {best}"),
        None => last,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metrics::Achieved;

    fn summary() -> Summary {
        Summary {
            name: "train".into(),
            run_id: "r".into(),
            steps: 600,
            complete: true,
            stopped: None,
            samples: 9600,
            tokens: 1_228_800,
            parameters: 10,
            loss: Some(1.5),
            val_loss: Some(1.717_9),
            best_val_loss: Some(1.717_9),
            best_val_step: Some(600),
            bytes_per_token: Some(1.0),
            seconds: 32.4,
            tokens_per_s: 38_200.0,
            achieved: Achieved {
                model_flops_per_s: 1.632e11,
                mfu: None,
            },
            world_size: 2,
            generation: 1,
            restarts: 0,
            checkpoint: Some("step_00000600".into()),
            failed_saves: 0,
            device_taken: None,
        }
    }

    #[test]
    fn the_end_says_what_to_know() {
        insta::assert_snapshot!(end_summary(&summary(), 0, Path::new("runs/a/b")), @"
        done: 600 steps, 0:32 at 38.2k tok/s, 163 GFLOP/s
        val loss 1.718 nats/byte
        checkpoint  runs/a/b/checkpoints/step_00000600
        metrics     runs/a/b/metrics.jsonl
        next        ddp-train generate runs/a/b --prompt 'The '
        ");
        let stopped = Summary {
            steps: 340,
            stopped: Some("SIGTERM".into()),
            val_loss: None,
            checkpoint: None,
            achieved: Achieved {
                model_flops_per_s: 3.79e14,
                mfu: Some(0.3831),
            },
            ..summary()
        };
        insta::assert_snapshot!(end_summary(&stopped, 300, Path::new("my run")), @"
        stopped after step 340 (SIGTERM); the checkpoint is saved; the last 40 in 0:32 at 38.2k tok/s, 379 TFLOP/s, MFU 38.3%
        best val loss 1.718 after step 600
        metrics     my run/metrics.jsonl
        ");
        let words = end_summary(&summary(), 600, Path::new("r"));
        assert!(
            words.starts_with("done: 600 steps, nothing was left to train\n"),
            "{words}"
        );
    }

    #[test]
    fn the_loss_says_of_what_it_is() {
        let mut tokens = summary();
        (tokens.val_loss, tokens.bytes_per_token) = (Some(3.2812), None);
        (tokens.best_val_loss, tokens.best_val_step) = (Some(3.19), Some(560));
        insta::assert_snapshot!(validation(&tokens).unwrap(), @"val loss 3.281 nats/token; best val loss 3.190 after step 560");
        (tokens.bytes_per_token, tokens.best_val_loss) = (Some(4.0), None);
        insta::assert_snapshot!(validation(&tokens).unwrap(), @"val loss 3.281 nats/token, 0.820 nats/byte");
        tokens.val_loss = None;
        assert_eq!(validation(&tokens), None);
    }
}
