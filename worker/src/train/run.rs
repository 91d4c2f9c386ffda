//! A run of one rank, from a configuration and a session to a summary.
//!
//! A worker stops at a step boundary when its agent asks: it saves and returns without an error. It stops with an
//! error as soon as it learns that the generation is over; the next generation goes on from the latest checkpoint.

use std::path::PathBuf;
use std::time::Instant;

use ddp_proto::control::{Phase, Sizes};

use super::TrainError;
use super::checkpointing::{allowed_sizes, failed_saves};
use super::recorder::Recorder;
use super::reporting::{say, warn};
use super::setup::{Prepared, Substitutes, open, prepare};
use super::startup_table::startup_table;
use super::step::Outcome;
use crate::config::TrainConfig;
use crate::data::{Dataset, Entropies};
use crate::metrics::{MetricsLog, RunDir, Summary};
use crate::session::Session;

/// Of longer data only the start is counted, so that files of billions of tokens cost no more.
const MAX_ENTROPY_TOKENS: usize = 64 << 20;

/// What a run has come to, as one rank knows it.
#[derive(Clone, Debug, PartialEq)]
pub struct RunSummary {
    /// Steps finished since the run began.
    pub steps: u64,
    /// Training loss of the last step, mean over all ranks; none if there was nothing left to do.
    pub loss: Option<f64>,
    /// Validation loss at the end; none if the run was stopped before.
    pub val_loss: Option<f64>,
    /// Why the run was asked to stop early.
    pub stopped: Option<String>,
    /// Folder of the run.
    pub out_dir: PathBuf,
}

/// Trains as `config` says, at the place in the job that `session` gives. Every rank of the generation must call it.
///
/// On failure the agent has been told; printing the error is left to the caller.
pub fn run_worker(config: &TrainConfig, session: &Session) -> Result<RunSummary, TrainError> {
    run_worker_with(Substitutes::default(), config, session)
}

/// As [`run_worker`], on parts of the caller's choice.
pub fn run_worker_with(
    parts: Substitutes,
    config: &TrainConfig,
    session: &Session,
) -> Result<RunSummary, TrainError> {
    session.heartbeat(0, Phase::Starting, None);
    let result = train(config, session, parts).map_err(|error| {
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
    if let Err(error) = &result {
        let (message, hint) = error.message_and_hint();
        if error.is_consequence() {
            session.fail_as_consequence(&message, hint.as_deref());
        } else {
            session.fail(&message, hint.as_deref());
        }
    }
    result
}

fn train(config: &TrainConfig, session: &Session, parts: Substitutes) -> Result<RunSummary, TrainError> {
    let started = Instant::now();
    let configured = config.train.grad_accumulation;
    let (config, opened) = open(config, session, parts)?;
    let env = session.env();
    let sizes = allowed_sizes(&config, opened.mesh(), configured);
    if env.rank.get() == 0 && sizes != Sizes::default() {
        session.limit_sizes(sizes);
    }
    let mut prepared = prepare(&config, opened, session)?;
    let parts = prepared.trainer.parts();
    let (rank, first_step) = (parts.world.rank(), parts.first_step);
    let log = match rank {
        0 => Some(MetricsLog::open(&prepared.run_dir.metrics(), first_step)?),
        _ => None,
    };
    let mut last = None;
    if rank == 0 {
        let path = prepared.run_dir.summary();
        last = Summary::read(&path);
        // It does not say how this life ends.
        if first_step < config.train.steps {
            Summary::delete(&path)?;
        }
        if let Some(words) = &prepared.rescaled {
            say(words);
        }
        say(&startup_table(&prepared));
    }
    let mut recorder = Recorder::new(log, first_step, config.train.steps);
    let mut outcome = Outcome::default();
    let ended = prepared.trainer.run(
        &mut prepared.reducer,
        &mut |record, parts| recorder.record(record, parts),
        &mut outcome,
    );
    if ended.as_ref().is_err_and(TrainError::is_unanimous) {
        // The error that counts is known already.
        let _ = prepared.trainer.drain_checkpoints();
    }
    if ended.is_err() {
        prepared.trainer.abandon();
    }
    if rank == 0 && matches!(ended, Err(TrainError::NotSaved { .. })) {
        // Where the disk takes so little; the error that counts is on its way.
        let _ = summary(&prepared, &recorder, &outcome, started, false)
            .map(|summary| summary.write(&prepared.run_dir.summary()));
    }
    ended?;
    if rank == 0 {
        finish(&prepared, &recorder, &outcome, started, last)?;
    }
    prepared.trainer.parts().world.comm.shutdown();
    Ok(RunSummary {
        steps: outcome.steps,
        loss: outcome.loss,
        val_loss: outcome.val_loss,
        stopped: outcome.stopped,
        out_dir: prepared.run_dir.path().to_owned(),
    })
}

/// Writes the summary, and says what the loss means. `last` is the summary of the life before this one.
fn finish(
    prepared: &Prepared<'_>,
    recorder: &Recorder,
    outcome: &Outcome,
    started: Instant,
    last: Option<Summary>,
) -> Result<(), TrainError> {
    let (trainer, path) = (prepared.trainer.parts(), prepared.run_dir.summary());
    let summary = summary(prepared, recorder, outcome, started, true)?;
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
    say(&verdict(outcome, summary.entropies, summary.bytes_per_token));
    if let (Some(_), None) = (&outcome.stopped, &trainer.session.env().control) {
        // Whoever has started this one hears it from its launcher.
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
    outcome: &Outcome,
    started: Instant,
    is_saved: bool,
) -> Result<Summary, TrainError> {
    let trainer = prepared.trainer.parts();
    let config = trainer.config;
    let env = trainer.session.env();
    let samples = trainer.loader.consumed_before(outcome.steps);
    Ok(Summary {
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
        entropies: entropies(&prepared.dataset)?,
        bytes_per_token: prepared.dataset.val.bytes_per_token(),
        seconds: started.elapsed().as_secs_f64(),
        tokens_per_s: recorder.tokens_per_s(),
        world_size: env.world_size.get(),
        generation: env.generation.get(),
        restarts: env.restart_count,
        checkpoint: trainer.checkpoints.last(),
        failed_saves: trainer.checkpoints.failed() + u64::from(!is_saved),
        device_taken: trainer.world.device.taken_bytes().map(|bytes| bytes as u64),
    })
}

/// Entropies of a text as a whole, held-out part included; where tokens are more than bytes, of the validation tokens.
/// Of long data only the start is counted.
fn entropies(dataset: &Dataset) -> Result<Entropies, TrainError> {
    let measured = if dataset.vocabulary.is_bytes() {
        dataset.train.whole()
    } else {
        dataset.val.clone()
    };
    let part = measured.part(0..measured.len().min(MAX_ENTROPY_TOKENS));
    Ok(Entropies::of(&part, dataset.vocabulary.size)?)
}

/// The validation loss beside what a model without context can reach.
fn verdict(outcome: &Outcome, entropies: Entropies, bytes_per_token: Option<f64>) -> String {
    let Entropies { unigram, bigram } = entropies;
    match (&outcome.stopped, outcome.val_loss, bigram) {
        (Some(cause), _, _) => format!(
            "stopped after step {} ({cause}); the checkpoint is saved",
            outcome.steps
        ),
        (None, Some(loss), Some(bigram)) => format!(
            "nats per byte: unigram {unigram:.2}, bigram {bigram:.2} (entropies of the text), this model {loss:.4} (validation)"
        ),
        (None, Some(loss), None) => {
            let a_byte = bytes_per_token.map_or_else(String::new, |bytes| {
                format!(
                    "; {:.4} nats per byte, with {bytes:.2} bytes to a token",
                    loss / bytes
                )
            });
            format!(
                "nats per token: unigram {unigram:.2} (entropy of the validation tokens), this model {loss:.4} (validation){a_byte}"
            )
        }
        (None, None, _) => format!("done after step {}", outcome.steps),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_says_of_what_the_loss_is() {
        let mut outcome = Outcome {
            steps: 40,
            val_loss: Some(3.2812),
            ..Outcome::default()
        };
        let tokens = Entropies {
            unigram: 7.4242,
            bigram: None,
        };
        let bytes = Entropies {
            bigram: Some(2.45),
            ..tokens
        };
        insta::assert_snapshot!(verdict(&outcome, bytes, Some(1.0)), @"nats per byte: unigram 7.42, bigram 2.45 (entropies of the text), this model 3.2812 (validation)");
        insta::assert_snapshot!(verdict(&outcome, tokens, None), @"nats per token: unigram 7.42 (entropy of the validation tokens), this model 3.2812 (validation)");
        insta::assert_snapshot!(verdict(&outcome, tokens, Some(4.0)), @"nats per token: unigram 7.42 (entropy of the validation tokens), this model 3.2812 (validation); 0.8203 nats per byte, with 4.00 bytes to a token");
        outcome.stopped = Some("asked to".into());
        insta::assert_snapshot!(verdict(&outcome, tokens, None), @"stopped after step 40 (asked to); the checkpoint is saved");
    }
}
