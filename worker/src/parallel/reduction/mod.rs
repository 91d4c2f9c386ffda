//! Summing gradients over the ranks while they are being computed.
//!
//! | file | what it holds |
//! |---|---|
//! | `reducer.rs` | the reducer, and the two phases of a step: gradients are written, then sums are read |
//! | `readiness.rs` | which gradients of a step are complete, and when |
//! | `gradients.rs` | what one reduction carries, and the memory of whole gradients |
//! | `sharded_gradients.rs` | the memory of gradients of which a rank keeps only its shard |
//! | `slots.rs` | memory through which gradients pass one unit after the other |
//! | `error.rs` | what can go wrong, by parameter and bucket |

mod error;
mod gradients;
mod readiness;
mod reducer;
mod sharded_gradients;
mod slots;

pub use error::ReduceError;
pub use reducer::{Reduced, Reducer, ReducerConfig, Step};
pub(super) use slots::slots_for;
