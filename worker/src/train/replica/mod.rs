//! The model on this rank, and micro-batches through it.
//!
//! | file | what |
//! |---|---|
//! | `replica.rs` | the model, the memory of its micro-batches, and what feeds them |
//! | `flights.rs` | a rank's row of the schedule, action by action |
//! | `rehearsal.rs` | how much memory activations will need, by going through rows without carrying them out |

mod flights;
mod rehearsal;
mod replica;

pub(super) use flights::RowPurpose;
pub(super) use rehearsal::{MicroBatchShape, rehearse};
pub(super) use replica::{MicroBatch, Replica};
