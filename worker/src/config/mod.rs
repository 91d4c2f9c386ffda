//! `train.yaml`: its sections as types, and how they are read.
//!
//! All sections but `model` and `data` are optional; unknown keys are refused. A wrong value is reported
//! with the line that it stands in, or the `--set` that it came from.
//!
//! | file | what it holds |
//! |---|---|
//! | `schema.rs` | the sections as types ([`TrainConfig`]), each field with its default, values and description |
//! | `tokenizer.rs` | [`Tokenizer`]: what `data.tokenizer` names |
//! | `table.rs` | the macros that make types and a table of keys of the lines of `schema.rs` |
//! | `source.rs` | YAML and `--set` as a tree in which each value knows where it came from |
//! | `problem.rs` | what is wrong with a value, and where it stands |
//! | `keys.rs` | the pass that checks a file against the table |
//! | `load.rs` | [`load_without_data`]: file and overrides to a checked configuration; rules over several keys, and of the sizes of a model |
//! | `reference.rs` | [`reference()`]: the table of keys as Markdown |

mod keys;
mod load;
mod problem;
mod reference;
mod schema;
mod source;
mod table;
#[cfg(test)]
mod tests;
mod tokenizer;

pub(crate) use load::can_have_buddies;
pub use load::{Located, MAX_FILE_BYTES, check_rows, checked_vocab, load_without_data};
pub use problem::{ConfigError, Problem, nearest_multiples};
pub use reference::reference;
pub(crate) use schema::star_matches;
pub use schema::{
    Accumulate, Backend, CheckpointKeep, ContextAlgorithm, Data, Experts, LastBatch, LearningRate, LrScaling,
    Model, ModelKind, Offload, OffloadTarget, OnNonFinite, OptimizerConfig, OptimizerGroup, OptimizerKind,
    Order, Parallel, Paths, Pipeline, PipelineSchedule, Precision, Recompute, Recovery, ReduceDtype, Rescale,
    Resume, RopeScaling, RouterScore, Run, Schedule, ShardGroup, StepRange, Strategy, Sync, TokenDtype,
    Train, TrainConfig, section,
};
pub use source::Source;
pub use tokenizer::{Tokenizer, Vocabulary};
