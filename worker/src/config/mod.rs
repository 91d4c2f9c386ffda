//! `train.yaml`: its sections as types, and how they are read.
//!
//! All sections but `model` and `data` are optional; unknown keys are refused. A wrong value is reported
//! with the line that it stands in, or the `--set` that it came from.
//!
//! | file | what it holds |
//! |---|---|
//! | `schema.rs` | the sections as types, with their defaults: [`TrainConfig`] |
//! | `values.rs` | values that several forms can be written in: paths, tokenizers, steps, groups of ranks |
//! | `optimizer.rs` | `train.optimizer` and `train.schedule` |
//! | `keys.rs` | the table of all keys, what each takes, and the pass that holds a file against it |
//! | `rules.rs` | rules over several keys, and what files must hold |
//! | `source.rs` | YAML and `--set` as a tree in which each value knows where it came from; [`ConfigError`] |
//! | `load.rs` | [`load`], [`load_located`], [`load_without_data`]: file and overrides to a checked configuration |

mod keys;
mod load;
mod optimizer;
mod rules;
mod schema;
mod source;
#[cfg(test)]
mod tests;
mod values;

pub use load::{Located, MAX_FILE_BYTES, load, load_located, load_without_data};
pub use optimizer::{LearningRate, OptimizerConfig, OptimizerGroup, OptimizerKind, Schedule};
pub use schema::{
    Accumulate, Backend, CheckpointKeep, Data, LastBatch, LrScaling, Model, ModelKind, Offload, OnNonFinite,
    OptimizerOffload, Order, Parallel, Precision, Recompute, ReduceDtype, Rescale, Resume, Run, Strategy,
    Sync, Train, TrainConfig, Unused,
};
pub use source::ConfigError;
pub use values::{Paths, ShardGroup, StepRange, Tokenizer};
