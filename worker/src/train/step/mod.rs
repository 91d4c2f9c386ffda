//! The steps of a run.
//!
//! | file | what it holds |
//! |---|---|
//! | `trainer.rs` | the loop over the steps, one step, and what is due between them |
//! | `numbers.rs` | what is measured of a step |
//! | `replica.rs` | the model on this rank, and one micro-batch through it |
//! | `exchange.rs` | numbers that every rank tells all others |
//! | `nonfinite.rs` | a step whose numbers are not finite: what to do, and who saw it first |
//! | `evaluation.rs` | validation, each rank its share |

mod evaluation;
mod exchange;
mod nonfinite;
mod numbers;
mod replica;
mod trainer;

pub(super) use evaluation::Evaluation;
pub(super) use exchange::{RankNumbers, Tally};
pub(super) use nonfinite::Skips;
pub(super) use numbers::StepRecord;
pub(super) use replica::{MicroBatch, Replica};
pub(super) use trainer::{Outcome, Trainer};
