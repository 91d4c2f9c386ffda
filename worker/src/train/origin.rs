//! Where the state of a run comes from. Published weights count at its beginning only: a run that goes on from a
//! checkpoint does not look at them again.

use std::time::Instant;

use ddp_proto::words::grouped;

use super::TrainError;
use super::setup::network;
use super::world::timeout;
use crate::checkpoint::{Reader, State};
use crate::config::TrainConfig;
use crate::model::Model;
use crate::parallel::{Agreement, Dtypes, Signature};
use crate::pretrained::PretrainedWeights;
use crate::session::Session;

/// Refuses what the ranks of a run that begins would refuse of `model.init_from`, if it is set.
pub fn check_initial_weights(config: &TrainConfig) -> Result<(), TrainError> {
    let Some(path) = &config.model.init_from else {
        return Ok(());
    };
    let model = network(config, Dtypes::of(config))?;
    PretrainedWeights::open(path, &config.model, &model.params)?;
    Ok(())
}

/// Where the state of a run comes from.
#[expect(clippy::large_enum_variant, reason = "a process has one of them")]
pub(super) enum Origin {
    /// Random numbers, from the seed alone.
    Seed,
    /// Published weights, and random numbers where they have none.
    Pretrained(PretrainedWeights),
    /// A checkpoint of its own.
    Checkpoint(Reader),
}

impl Origin {
    /// Of a run that begins. Parameters are opened, and must be the same on all ranks. Every rank calls it.
    pub(super) fn of_new(config: &TrainConfig, model: &Model, session: &Session) -> Result<Self, TrainError> {
        let Some(path) = &config.model.init_from else {
            return Ok(Self::Seed);
        };
        let weights = PretrainedWeights::open(path, &config.model, &model.params)?;
        let mut signature = Signature::new();
        signature.field("content of `model.init_from`", weights.fingerprint()?);
        let (env, store) = (session.env(), session.store());
        let agreement = Agreement {
            store: store.as_ref(),
            name: "initial weights",
            rank: env.rank.get() as usize,
            world_size: env.world_size.get() as usize,
            deadline: Instant::now() + timeout(config),
        };
        agreement.check(&signature)?;
        Ok(Self::Pretrained(weights))
    }

    /// The state that the checkpoint was saved with, if it is one.
    pub(super) fn saved(&self) -> Option<&State> {
        match self {
            Self::Checkpoint(reader) => Some(&reader.manifest().state),
            Self::Seed | Self::Pretrained(_) => None,
        }
    }

    /// The weights, if it is some, as in `gpt2 (124,439,808 parameters, f16)`, and what is not from there.
    pub(super) fn weights_words(&self) -> Option<String> {
        let Self::Pretrained(weights) = self else {
            return None;
        };
        let remainder = weights.remainder().map(|words| format!("; {words}"));
        Some(format!(
            "{} ({} parameters, {}){}",
            weights.path().display(),
            grouped(weights.parameters() as u64),
            weights.types(),
            remainder.unwrap_or_default()
        ))
    }
}
