//! Checkpoints of a run: saving the state after a step, and going on from it.
//!
//! With plain data parallelism every rank holds everything, so rank 0 writes for all, one file for the parameters and
//! one for each moment, and every rank reads what it needs. Tensors are logical: where they lie in an arena, and how
//! many ranks there are, is not recorded.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::TrainError;
use super::replica::Replica;
use super::world::World;
use crate::checkpoint::{Expected, Piece, Reader, Rng, State, Which, Writer, step_name};
use crate::config::TrainConfig;
use crate::data::ORDER_VERSION;
use crate::device::{Arena, DType};
use crate::model::{Model, ParamId};
use crate::optim::{AdamW, Moment};
use crate::parallel::GradientLayout;

/// What a resumed run must have in common with the one that wrote the checkpoint: other values would make it another
/// run. Steps, schedule, batch and everything about ranks may change.
const FIXED_KEYS: &[&str] = &[
    "/model",
    "/data/tokenizer",
    "/data/order",
    "/run/seed",
    "/train/precision",
    "/train/optimizer/kind",
];

/// See the module.
pub(super) struct Checkpoints {
    out_dir: PathBuf,
    generation: u64,
    config: Value,
    seed: u64,
    layout: Arc<GradientLayout>,
    last: Option<String>,
}

/// Tensors of one kind: where they lie, and how they are called.
struct Part<'a> {
    stem: &'static str,
    prefix: &'static str,
    arena: &'a Arena,
}

/// A tensor's name and global shape, as a checkpoint has them.
struct Named {
    name: String,
    shape: Vec<u64>,
}

impl Named {
    fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

impl Checkpoints {
    pub(super) fn new(
        out_dir: &Path,
        generation: u64,
        config: &TrainConfig,
        layout: Arc<GradientLayout>,
    ) -> Self {
        Self {
            out_dir: out_dir.to_owned(),
            generation,
            config: serde_json::to_value(config).expect("a configuration serialises"),
            seed: config.run.seed,
            layout,
            last: None,
        }
    }

    /// Name of the last checkpoint that was saved or loaded.
    pub(super) fn last(&self) -> Option<String> {
        self.last.clone()
    }

    /// Saves the state after `step` steps and `consumed` samples. Only rank 0 calls it.
    pub(super) fn save(
        &mut self,
        world: &World,
        replica: &Replica,
        adamw: &AdamW,
        step: u64,
        consumed: u64,
    ) -> Result<(), TrainError> {
        let writer = Writer::begin(&self.out_dir, step, self.generation)?;
        let parts = parts(replica, adamw);
        for part in &parts {
            if let Err(error) = self.write(&writer, world, &replica.model, part) {
                // The error that counts is on its way; what cannot be deleted now is at the next begin.
                let _ = writer.abort();
                return Err(error);
            }
        }
        let state = State {
            step,
            consumed_samples: consumed,
            rng: Rng {
                seed: self.seed,
                data_order: ORDER_VERSION.into(),
            },
            config: self.config.clone(),
        };
        writer.commit(&state, &parts.map(|part| part.stem))?;
        self.last = Some(step_name(step));
        Ok(())
    }

    /// Loads the state after `step` steps. Returns the number of samples consumed. Every rank calls it.
    pub(super) fn load(
        &mut self,
        world: &World,
        replica: &Replica,
        adamw: &AdamW,
        step: u64,
    ) -> Result<u64, TrainError> {
        let reader = Reader::open(&self.out_dir, Which::Step(step))?;
        let state = &reader.manifest().state;
        self.compare(state)?;
        let parts = parts(replica, adamw);
        let names: Vec<Named> = parts
            .iter()
            .flat_map(|part| names(part, &replica.model))
            .collect();
        let expected: Vec<Expected<'_>> = names
            .iter()
            .map(|named| Expected {
                tensor: &named.name,
                shape: &named.shape,
                dtype: DType::F32,
            })
            .collect();
        reader.expect(&expected)?;
        for part in &parts {
            for (id, named) in names_by_id(part, &replica.model) {
                let bytes = reader.read(&named.name, 0..named.elements())?;
                let target = part.arena.slice(self.layout.range(id));
                world.device.upload(world.stream, &target, &bytes);
            }
        }
        world.device.synchronize(world.stream)?;
        self.last = Some(step_name(step));
        Ok(state.consumed_samples)
    }

    fn write(
        &self,
        writer: &Writer,
        world: &World,
        model: &Model,
        part: &Part<'_>,
    ) -> Result<(), TrainError> {
        let mut tensors = Vec::with_capacity(model.params.len());
        for (id, named) in names_by_id(part, model) {
            let source = part.arena.slice(self.layout.range(id));
            tensors.push((named, world.device.download(world.stream, &source)?));
        }
        let pieces: Vec<Piece<'_>> = tensors
            .iter()
            .map(|(named, bytes)| Piece {
                tensor: &named.name,
                shape: &named.shape,
                dtype: DType::F32,
                range: 0..named.elements(),
                bytes,
            })
            .collect();
        Ok(writer.write(part.stem, &pieces)?)
    }

    fn compare(&self, state: &State) -> Result<(), TrainError> {
        let contradiction = |key: &str, found: String, begun: String| TrainError::Contradiction {
            checkpoint: self
                .out_dir
                .join("checkpoints")
                .join(step_name(state.step))
                .display()
                .to_string(),
            key: key.to_owned(),
            found,
            begun,
        };
        for pointer in FIXED_KEYS {
            let (now, then) = (self.config.pointer(pointer), state.config.pointer(pointer));
            let path = pointer[1..].replace('/', ".");
            if let Some((key, found, begun)) = difference(&path, now, then) {
                return Err(contradiction(&key, found, begun));
            }
        }
        if state.rng.data_order != ORDER_VERSION {
            let begun = state.rng.data_order.clone();
            return Err(contradiction(
                "rule of the data order",
                ORDER_VERSION.into(),
                begun,
            ));
        }
        Ok(())
    }
}

fn parts<'a>(replica: &'a Replica, adamw: &'a AdamW) -> [Part<'a>; 3] {
    let moment = |stem, moment: Moment| Part {
        stem,
        prefix: moment.prefix(),
        arena: adamw.moment(moment),
    };
    let parameters = Part {
        stem: "parameters",
        prefix: "",
        arena: &replica.params,
    };
    [
        parameters,
        moment("first-moments", Moment::First),
        moment("second-moments", Moment::Second),
    ]
}

fn names(part: &Part<'_>, model: &Model) -> Vec<Named> {
    names_by_id(part, model).map(|(_, named)| named).collect()
}

fn names_by_id(part: &Part<'_>, model: &Model) -> impl Iterator<Item = (ParamId, Named)> {
    let prefix = part.prefix;
    model.params.iter().enumerate().map(move |(id, spec)| {
        let named = Named {
            name: format!("{prefix}{}", spec.name),
            shape: spec.shape.iter().map(|&d| d as u64).collect(),
        };
        (ParamId(id), named)
    })
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
