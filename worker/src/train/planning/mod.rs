//! What a configuration would cost, on this machine or on machines that need not be here.
//!
//! | file | what it holds |
//! |---|---|
//! | `estimate.rs` | memory and traffic of a rank: the run's own types on a device that does nothing |
//! | `candidate.rs` | a strategy on a number of ranks |
//! | `advice.rs` | which strategy to take, and what to change where none fits |
//! | `planner.rs` | every strategy beside the others, and how the step grows with the ranks |

mod advice;
mod candidate;
mod estimate;
mod planner;

pub use advice::{Adjustment, Advice};
pub use candidate::{Candidate, Machines};
pub use estimate::{Estimate, Footprint, StepTraffic};
pub use planner::Comparison;
