//! The steps of a run.
//!
//! | file | what it holds |
//! |---|---|
//! | `trainer.rs` | the loop over the steps, one step, and what is due between them |
//! | `training_row.rs` | the row of a schedule in training |
//! | `enqueued_step.rs` | a step as it is enqueued, and as the device has run it |
//! | `nonfinite.rs` | a step whose numbers are not finite: what to do, and who saw it first |
//! | `evaluation.rs` | validation, each rank its share |

mod enqueued_step;
mod evaluation;
mod nonfinite;
mod trainer;
mod training_row;

pub use trainer::RunSummary;
pub(super) use trainer::{Trainer, TrainerParts};
