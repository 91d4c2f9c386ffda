//! The steps of a run.
//!
//! | file | what it holds |
//! |---|---|
//! | `trainer.rs` | the loop over the steps, one step, and what is due between them |
//! | `step_record.rs` | a step as it is enqueued, as the device has run it, and as it is reported |
//! | `replica.rs` | the model on this rank, and the memory of its micro-batches |
//! | `flights.rs` | a rank's row of the schedule, action by action |
//! | `rehearsal.rs` | how much memory activations will need, by going through rows without carrying them out |
//! | `rank_table.rs` | tables with one row a rank, gathered on all of them |
//! | `nonfinite.rs` | a step whose numbers are not finite: what to do, and who saw it first |
//! | `evaluation.rs` | validation, each rank its share |

mod evaluation;
mod flights;
mod nonfinite;
mod rank_table;
mod rehearsal;
mod replica;
mod step_record;
mod trainer;

pub(super) use evaluation::Evaluation;
pub(super) use flights::Purpose;
pub(super) use rank_table::{RankTable, StepTable};
pub(super) use rehearsal::{MicroBatchShape, rehearse};
pub(super) use replica::{MicroBatch, Replica};
pub(super) use step_record::StepRecord;
pub(super) use trainer::{Outcome, Trainer, TrainerParts};
