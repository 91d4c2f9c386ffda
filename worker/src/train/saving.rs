//! Checkpoints of a run: saving the state after a step, and going on from it.
//!
//! Every rank writes what it owns, one file for the parameters and one for each moment, and rank 0 makes one
//! checkpoint of them; where every rank holds everything, rank 0 writes for all. Every rank reads what it owns.
//! Tensors are logical: where they lie in an arena, who held them, and how many ranks there were, is not recorded.

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::TrainError;
use super::exchange::Exchange;
use super::replica::Replica;
use super::world::World;
use crate::checkpoint::{Expected, Piece, Reader, Rng, State, Which, Writer, step_name};
use crate::config::TrainConfig;
use crate::data::ORDER_VERSION;
use crate::device::DType;
use crate::model::Model;
use crate::optim::{AdamW, Moment};
use crate::parallel::{OwnPiece, Portion};

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
    last: Option<String>,
}

/// Tensors of one kind: where they lie, and how they are called.
struct Part<'a> {
    stem: &'static str,
    prefix: &'static str,
    portion: &'a Portion,
}

/// A tensor's name and global shape, as a checkpoint has them.
struct Named {
    name: String,
    shape: Vec<u64>,
}

impl Checkpoints {
    pub(super) fn new(out_dir: &Path, generation: u64, config: &TrainConfig) -> Self {
        Self {
            out_dir: out_dir.to_owned(),
            generation,
            config: serde_json::to_value(config).expect("a configuration serialises"),
            seed: config.run.seed,
            last: None,
        }
    }

    /// Name of the last checkpoint that was saved or loaded.
    pub(super) fn last(&self) -> Option<String> {
        self.last.clone()
    }

    /// Saves the state after so many steps and consumed samples. Every rank calls it; it is whole when rank 0 has
    /// returned.
    pub(super) fn save(
        &mut self,
        world: &World,
        replica: &Replica,
        adamw: &AdamW,
        exchange: &Exchange,
        (step, consumed): (u64, u64),
    ) -> Result<(), TrainError> {
        let (rank, writers) = (world.rank(), replica.weights.sharding().world());
        self.last = Some(step_name(step));
        if rank >= writers {
            return Ok(());
        }
        let writer = if rank == 0 {
            Writer::begin(&self.out_dir, step, self.generation)?
        } else {
            Writer::join(&self.out_dir, step, self.generation)?
        };
        let parts = parts(replica, adamw);
        let written = parts.iter().try_for_each(|part| {
            let stem = stem(part, rank, writers);
            write(&writer, &stem, world, replica, part)
        });
        let written = written.and_then(|()| match writers {
            1 => Ok(()),
            // An error ends the generation before the other ranks get here.
            _ => exchange.gather("files of the checkpoint", [0.0; 2]).map(drop),
        });
        if rank > 0 {
            return written;
        }
        if let Err(error) = written {
            // The error that counts is on its way; what cannot be deleted now is at the next begin.
            let _ = writer.abort();
            return Err(error);
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
        let ranks = 0..writers;
        let stems: Vec<String> = ranks
            .flat_map(|rank| parts.iter().map(move |part| stem(part, rank, writers)))
            .collect();
        writer.commit(&state, &stems)?;
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
            for piece in replica.weights.sharding().own_pieces() {
                let named = named(part, &replica.model, piece.param.0);
                let bytes = reader.read(&named.name, elements(&piece))?;
                let target = part.portion.slice(&piece.place);
                world.device.upload(world.stream, &target, &bytes);
            }
        }
        world.device.synchronize(world.stream)?;
        self.last = Some(step_name(step));
        Ok(state.consumed_samples)
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
        portion: adamw.moment(moment),
    };
    let parameters = Part {
        stem: "parameters",
        prefix: "",
        portion: replica.weights.own(),
    };
    [
        parameters,
        moment("first-moments", Moment::First),
        moment("second-moments", Moment::Second),
    ]
}

/// Name of a rank's file.
fn stem(part: &Part<'_>, rank: usize, writers: usize) -> String {
    match writers {
        1 => part.stem.to_owned(),
        _ => format!("{}-{rank}-of-{writers}", part.stem),
    }
}

/// Writes what this rank owns.
fn write(
    writer: &Writer,
    stem: &str,
    world: &World,
    replica: &Replica,
    part: &Part<'_>,
) -> Result<(), TrainError> {
    let own = replica.weights.sharding().own_pieces();
    let mut tensors = Vec::with_capacity(own.len());
    for piece in own {
        let source = part.portion.slice(&piece.place);
        let bytes = world.device.download(world.stream, &source)?;
        tensors.push((
            named(part, &replica.model, piece.param.0),
            elements(&piece),
            bytes,
        ));
    }
    let pieces: Vec<Piece<'_>> = tensors
        .iter()
        .map(|(named, range, bytes)| Piece {
            tensor: &named.name,
            shape: &named.shape,
            dtype: DType::F32,
            range: range.clone(),
            bytes,
        })
        .collect();
    Ok(writer.write(stem, &pieces)?)
}

fn elements(piece: &OwnPiece) -> std::ops::Range<u64> {
    piece.elements.start as u64..piece.elements.end as u64
}

fn names(part: &Part<'_>, model: &Model) -> Vec<Named> {
    (0..model.params.len()).map(|id| named(part, model, id)).collect()
}

fn named(part: &Part<'_>, model: &Model, id: usize) -> Named {
    let spec = &model.params[id];
    Named {
        name: format!("{}{}", part.prefix, spec.name),
        shape: spec.shape.iter().map(|&d| d as u64).collect(),
    }
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
