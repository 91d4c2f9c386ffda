//! Where the state of a run comes from. A run that goes on from a checkpoint must have some things in common with the
//! one that wrote it. Published weights count at the beginning of a run only. A generation may also go on from what the
//! ranks of the one before have kept in memory: then a rank receives what it lacks from another one.

use std::path::Path;

use ddp_proto::words::grouped;
use serde_json::Value;

use super::recovery::{GoOn, Held};
use crate::checkpoint::{Reader, State, Which};
use crate::config::{self, Experts, TrainConfig};
use crate::data::ORDER_VERSION;
use crate::model::{Model, ModelPart};
use crate::parallel::{Dtypes, Signature, check_agreement};
use crate::pretrained::PretrainedWeights;
use crate::session::Session;
use crate::train::TrainError;
use crate::train::strategy::network;
use crate::train::world::timeout;

/// What a resumed run must have in common with the one that wrote the checkpoint: other values would make it another
/// run. Steps, schedule, batch and everything about ranks may change.
const FIXED_KEYS: &[&str] = &[
    "/model",
    "/data/tokenizer",
    "/data/order",
    "/run/seed",
    "/train/optimizer/kind",
];

/// Refuses what the ranks of a run that begins would refuse of `model.init_from`, if it is set.
pub fn check_initial_weights(config: &TrainConfig) -> Result<(), TrainError> {
    let Some(path) = &config.model.init_from else {
        return Ok(());
    };
    let model = network(config, Dtypes::of(config), &ModelPart::WHOLE)?;
    PretrainedWeights::open(path, &config.model, &model.all_params)?;
    Ok(())
}

/// Refuses settings with which a run cannot go on from its checkpoint of `step`. Only a start reads the training data, and
/// compares them too.
pub fn check_resumes(config: &TrainConfig, out_dir: &Path, step: u64) -> Result<(), TrainError> {
    let reader = Reader::open(out_dir, Which::Step(step))?;
    compare_settings(reader.path(), &document(config), &reader.manifest().state.config)
}

/// Where the state of a run comes from.
pub(crate) enum Origin {
    /// Published weights, if there are some, and random numbers from the seed.
    Fresh(Option<PretrainedWeights>),
    /// Its latest checkpoint.
    Saved(Box<Reader>),
    /// What the ranks of the generation before still have.
    Kept {
        /// What a checkpoint would say of it.
        state: Box<State>,
        go_on: Box<GoOn>,
    },
}

impl Origin {
    /// Of a run that begins. Parameters are opened, and must be the same on all ranks. Every rank calls it.
    pub(crate) fn fresh(config: &TrainConfig, model: &Model, session: &Session) -> Result<Self, TrainError> {
        let Some(path) = &config.model.init_from else {
            return Ok(Self::Fresh(None));
        };
        let weights = PretrainedWeights::open(path, &config.model, &model.all_params)?;
        let mut signature = Signature::new();
        signature.field("content of `model.init_from`", weights.fingerprint()?);
        check_agreement(session, "initial weights", &signature, timeout(config))?;
        Ok(Self::Fresh(Some(weights)))
    }

    /// Of a run called `identity` that goes on in memory.
    pub(crate) fn kept(identity: &State, go_on: Box<GoOn>) -> Self {
        let Held {
            version,
            updates,
            samples,
            batch,
            ..
        } = &go_on.state;
        let state = State {
            step: version.step,
            consumed_samples: *samples,
            skipped: version.step.saturating_sub(*updates),
            batch: *batch,
            ..identity.clone()
        };
        Self::Kept {
            state: Box::new(state),
            go_on,
        }
    }

    /// The state of the generation before, if the run goes on there.
    pub(crate) fn held(&self) -> Option<&Held> {
        match self {
            Self::Kept { go_on, .. } => Some(&go_on.state),
            _ => None,
        }
    }

    /// What was saved with the state, if it goes on from one.
    pub(crate) fn saved(&self) -> Option<&State> {
        match self {
            Self::Saved(reader) => Some(&reader.manifest().state),
            Self::Kept { state, .. } => Some(state),
            Self::Fresh(_) => None,
        }
    }

    /// The weights, if it is some, as in `gpt2 (124,439,808 parameters, f16)`, and what is not from there.
    pub(crate) fn weights_words(&self) -> Option<String> {
        let Self::Fresh(Some(weights)) = self else {
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

/// Opens the checkpoint after `step` steps, if it is one of this run. `identity` is what this run is: its state at any
/// step.
pub(crate) fn open_checkpoint(out_dir: &Path, step: u64, identity: &State) -> Result<Reader, TrainError> {
    let reader = Reader::open(out_dir, Which::Step(step))?;
    compare(reader.path(), identity, &reader.manifest().state)?;
    Ok(reader)
}

/// Refuses a saved state that is not of this run. `checkpoint` says where it is.
pub(crate) fn compare(checkpoint: &Path, now: &State, then: &State) -> Result<(), TrainError> {
    compare_settings(checkpoint, &now.config, &then.config)?;
    let (order, begun) = (&now.rng.data_order, &then.rng.data_order);
    if order != begun || order != ORDER_VERSION {
        return Err(contradiction(
            checkpoint,
            "rule of the data order",
            [order, begun],
        ));
    }
    if now.data != then.data {
        let text = "training text of `data.train`";
        return Err(contradiction(checkpoint, text, [&now.data, &then.data]));
    }
    Ok(())
}

/// The part of [`compare`] that needs no data.
fn compare_settings(checkpoint: &Path, now: &Value, then: &Value) -> Result<(), TrainError> {
    for pointer in FIXED_KEYS {
        let path = pointer[1..].replace('/', ".");
        let [now, then] = [now, then].map(|config| lasting(config, pointer));
        if let Some((key, found, begun)) = difference(&path, now.as_ref(), then.as_ref()) {
            return Err(contradiction(checkpoint, &key, [&found, &begun]));
        }
    }
    Ok(())
}

/// The value of `key` now, and when the run was started.
fn contradiction(checkpoint: &Path, key: &str, [found, begun]: [&str; 2]) -> TrainError {
    TrainError::Refused(format!(
        "cannot resume from `{}`: `{key}` is {found}, but the run was started with {begun}\n  hint: restore the value, or start a new run with a different `run.out_dir`",
        checkpoint.display()
    ))
}

/// A configuration to be compared with another: a tokenizer is the same wherever its file is.
pub(crate) fn document(config: &TrainConfig) -> Value {
    let mut document = serde_json::to_value(config).expect("a configuration serialises");
    document["data"]["tokenizer"] = config.vocabulary.identity(&config.data.tokenizer).into();
    document
}

/// A section without what may change: what counts only at the beginning of a run, the rate of dropout, and what the losses
/// of experts weigh and an expert takes at most. A checkpoint of an older build lacks the keys that were added since: they
/// have their defaults.
fn lasting(config: &Value, pointer: &str) -> Option<Value> {
    let section = config.pointer(pointer)?.clone();
    if pointer != "/model" {
        return Some(section);
    }
    let model = config::section("model", section.clone()).map(|model: config::Model| config::Model {
        init_from: None,
        dropout: 0.0,
        experts: Experts {
            capacity: None,
            aux_loss: 0.0,
            z_loss: 0.0,
            ..model.experts
        },
        ..model
    });
    let complete = model.and_then(serde_json::to_value);
    Some(complete.unwrap_or(section))
}

/// First difference between two values, by path: key, value now, value then.
fn difference(path: &str, now: Option<&Value>, then: Option<&Value>) -> Option<(String, String, String)> {
    if now == then {
        return None;
    }
    if let (Some(Value::Object(now)), Some(Value::Object(then))) = (now, then) {
        let keys = now.keys().chain(then.keys());
        return keys
            .into_iter()
            .find_map(|key| difference(&format!("{path}.{key}"), now.get(key), then.get(key)));
    }
    let show = |value: Option<&Value>| value.map_or_else(|| "not set".to_owned(), Value::to_string);
    Some((path.to_owned(), show(now), show(then)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_difference_is_named_by_its_path() {
        let (now, then) = (
            json!({ "a": 1, "b": { "c": 2 } }),
            json!({ "a": 1, "b": { "c": 3 } }),
        );
        assert_eq!(difference("model", Some(&now), Some(&now)), None);
        assert_eq!(
            difference("model", Some(&now), Some(&then)),
            Some(("model.b.c".into(), "2".into(), "3".into()))
        );
        assert_eq!(
            difference("model", Some(&now), Some(&json!({ "a": 1 }))),
            Some(("model.b".into(), "{\"c\":2}".into(), "not set".into()))
        );
    }
}
