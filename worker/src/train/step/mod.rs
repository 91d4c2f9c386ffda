//! The steps of a run.
//!
//! | file | what it holds |
//! |---|---|
//! | `trainer.rs` | the loop over the steps, one step, and what is due between them |
//! | `step_record.rs` | a step as it is enqueued, as the device has run it, and as it is reported |
//! | `nonfinite.rs` | a step whose numbers are not finite: what to do, and who saw it first |
//! | `evaluation.rs` | validation, each rank its share |

mod evaluation;
mod nonfinite;
mod step_record;
mod trainer;

pub(super) use step_record::StepRecord;
pub use trainer::RunSummary;
pub(super) use trainer::{Trainer, TrainerParts};
