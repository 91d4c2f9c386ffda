//! A run of one rank, from a configuration and a session to a summary.
//!
//! A worker stops at a step boundary when its agent asks: it saves and returns without an error. It stops with an
//! error as soon as it learns that the generation is over; the next generation goes on from the latest checkpoint.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use ddp_proto::control::{Phase, Sizes};

use super::TrainError;
use super::checkpointing::ranks_divide;
use super::reporting::{Recorder, say, startup_table};
use super::setup::{Substitutes, open, prepare};
use super::step::Outcome;
use super::summary::{finish, summary};
use crate::config::TrainConfig;
use crate::device::Device;
use crate::mesh::MeshShape;
use crate::metrics::{MetricsLog, Summary};
use crate::session::Session;

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

/// As [`run_worker`], on a device of the caller's choice.
pub fn run_worker_on(
    device: Arc<dyn Device>,
    config: &TrainConfig,
    session: &Session,
) -> Result<RunSummary, TrainError> {
    let parts = Substitutes {
        device: Some(device),
        ..Substitutes::default()
    };
    run_worker_with(parts, config, session)
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
    let (config, opened) = open(config, session, parts)?;
    let env = session.env();
    let sizes = Sizes {
        ranks_divide: ranks_divide(&config.train, env.world_size.get().into()),
        ranks_multiple_of: MeshShape::ranks_multiple_of(&config.parallel),
    };
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
