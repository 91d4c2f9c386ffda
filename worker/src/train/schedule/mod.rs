//! A rank's row of the pipeline's schedule; without a pipeline it is forward and backward of each micro-batch.
//!
//! | file | what |
//! |---|---|
//! | `flights.rs` | the row carried out, action by action |
//! | `rehearsal.rs` | how much memory activations will need, by going through rows without carrying them out |

mod flights;
mod rehearsal;

pub(super) use flights::{Flights, RowPurpose};
pub(super) use rehearsal::{MicroBatchShape, rehearse};
