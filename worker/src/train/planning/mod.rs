//! What a configuration would cost, on this machine or on machines that need not be here.
//!
//! | file | what it holds |
//! |---|---|
//! | `estimate.rs` | memory and traffic of a rank: the run's own types on a device that does nothing |
//! | `planner.rs` | every strategy beside the others, how the step grows with the ranks, and advice |

mod estimate;
mod planner;

pub use estimate::{Estimate, Footprint, StepTraffic};
pub use planner::{Adjustment, Advice, Candidate, Comparison, Machines};
