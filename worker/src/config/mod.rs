//! `train.yaml`: its sections as types, and how they are read.
//!
//! All sections but `model` and `data` are optional; unknown keys are refused. A wrong value is reported
//! with the line that it stands in, or the `--set` that it came from.
//!
//! | file | what it holds |
//! |---|---|
//! | `schema.rs` | the sections as types: [`TrainConfig`] |
//! | `keys.rs` | the table of all keys, with the default and the range of each, and the pass that checks a file against it |
//! | `source.rs` | YAML and `--set` as a tree in which each value knows where it came from; [`ConfigError`] |
//! | `load.rs` | [`load`], [`load_located`], [`load_without_data`]: file and overrides to a checked configuration; rules over several keys |

mod keys;
mod load;
mod schema;
mod source;
#[cfg(test)]
mod tests;

pub use keys::section;
pub use load::{Located, MAX_FILE_BYTES, load, load_located, load_without_data};
pub(crate) use schema::star_matches;
pub use schema::{
    Accumulate, Backend, CheckpointKeep, Data, LastBatch, LearningRate, LrScaling, Model, ModelKind, Offload,
    OnNonFinite, OptimizerConfig, OptimizerGroup, OptimizerKind, OptimizerOffload, Order, Parallel, Paths,
    Pipeline, PipelineSchedule, Precision, Recompute, ReduceDtype, Rescale, Resume, RopeScaling, Run,
    Schedule, ShardGroup, StepRange, Strategy, Sync, Tokenizer, Train, TrainConfig,
};
pub use source::{ConfigError, Source};
