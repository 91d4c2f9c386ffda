//! What a configuration would cost, on this machine or on machines that need not be here. From top to bottom:
//!
//! | file | what it holds |
//! |---|---|
//! | `planner.rs` | all strategies side by side, and which one to take |
//! | `search.rs` | the layouts of given machines with the shortest steps |
//! | `candidate.rs` | a configuration on machines: every stage of it |
//! | `step_times.rs` | the least time of a step, by the simulator of pipelines and the rates of the wires |
//! | `estimate.rs` | memory and traffic of a rank: the run's own types on a device that does nothing |

mod candidate;
mod estimate;
mod planner;
mod search;
mod step_times;

pub use candidate::Candidate;
pub use estimate::{Estimate, StepTraffic};
pub use planner::{Advice, Comparison};
pub use search::{FoundLayout, LayoutSearch};
pub use step_times::Machines;
