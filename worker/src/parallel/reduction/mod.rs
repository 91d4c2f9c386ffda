//! Summing gradients over the ranks while they are being computed.
//!
//! | file | what it holds |
//! |---|---|
//! | `reducer.rs` | the reducer, and the two phases of a step: gradients are written, then sums are read |
//! | `readiness.rs` | which gradients of a step are complete, and when; what can go wrong |
//! | `grad_units.rs` | the memory of gradients, and the way of each unit: contributed, reduced, stored, summed over copies |
//! | `use_accumulators.rs` | a sum for each use of a tied parameter |

mod grad_units;
mod readiness;
mod reducer;
mod use_accumulators;

pub use grad_units::ReducerConfig;
pub(super) use grad_units::slots_for;
pub use readiness::ReduceError;
pub use reducer::{Reduced, Reducer, Step};
