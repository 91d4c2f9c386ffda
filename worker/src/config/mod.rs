//! `train.yaml`: its sections as types, and how they are read.
//!
//! All sections but `model` and `data` are optional; unknown keys are refused. A wrong value is reported
//! with the line that it stands in, or the `--set` that it came from.
//!
//! | file | what it holds |
//! |---|---|
//! | `schema.rs` | the sections as types: [`TrainConfig`] |
//! | `offload.rs`, `paths.rs`, `rescale.rs`, `shard_group.rs`, `step_range.rs`, `tokenizer.rs` | values of it that have a form of their own |
//! | `load.rs` | [`load`], [`load_located`], [`load_without_data`]: file and overrides to a checked configuration |
//! | `node.rs` | the YAML as a tree in which each value knows where it came from |
//! | `overrides.rs` | `--set key=value` |
//! | `de.rs` | from the tree to the types |
//! | `words.rs` | what was found and what is expected, in words |
//! | `check.rs` | what types cannot say: ranges, divisibility, files |
//! | `keys.rs` | the names of all keys, and the one that was meant |

mod check;
mod de;
mod error;
mod keys;
mod load;
mod node;
mod offload;
mod overrides;
mod paths;
mod rescale;
mod schema;
mod shard_group;
mod step_range;
#[cfg(test)]
mod tests;
mod tokenizer;
mod words;

pub use error::ConfigError;
pub use load::{Located, MAX_FILE_BYTES, load, load_located, load_without_data};
pub use offload::{Offload, OptimizerHome};
pub use paths::Paths;
pub use rescale::Rescale;
pub use schema::{
    Accumulate, Backend, CheckpointKeep, Data, LastBatch, LearningRate, LrScaling, Model, ModelKind,
    OnNonFinite, Optimizer, OptimizerKind, Order, Parallel, Precision, Recompute, ReduceDtype, Resume, Run,
    Schedule, Strategy, Sync, Train, TrainConfig, Unused,
};
pub use shard_group::ShardGroup;
pub use step_range::StepRange;
pub use tokenizer::Tokenizer;
