//! Published weights that a run begins with. One that goes on from a checkpoint does not look at them again.

use std::time::Instant;

use super::TrainError;
use super::progress::grouped;
use super::setup::network;
use super::world::timeout;
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

/// Opens them, if there are some, and checks that all ranks have the same. Every rank calls it.
pub(super) fn open(
    config: &TrainConfig,
    model: &Model,
    session: &Session,
) -> Result<Option<PretrainedWeights>, TrainError> {
    let Some(path) = &config.model.init_from else {
        return Ok(None);
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
    Ok(Some(weights))
}

/// `gpt2 (124,439,808 parameters, f16)`, and what is not from there.
pub(super) fn words(weights: &PretrainedWeights) -> String {
    let remainder = weights.remainder().map(|words| format!("; {words}"));
    format!(
        "{} ({} parameters, {}){}",
        weights.path().display(),
        grouped(weights.parameters() as u64),
        weights.types(),
        remainder.unwrap_or_default()
    )
}
