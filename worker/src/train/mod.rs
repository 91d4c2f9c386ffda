//! Training: the loop of one rank, from a configuration and a session to a summary.
//!
//! | file or folder | what it holds |
//! |---|---|
//! | `run.rs` | a run from its first line to its last, and who is told of its failure |
//! | `summary.rs` | what a run has come to |
//! | `setup.rs` | everything that happens once: files, other ranks, agreement, first values |
//! | `device_choice.rs` | which device this rank trains on |
//! | `world.rs` | this rank among the others: device, stream, communicator |
//! | `strategy.rs` | what a strategy holds of parameters and gradients |
//! | `step/` | the loop over the steps, one step, and the model on this rank |
//! | `checkpointing/` | saving, resuming, and the global batch of a run that is resumed on other ranks |
//! | `reporting/` | what is told to files, agent and people |
//! | `planning/` | what a strategy costs, before anything is allocated |

mod checkpointing;
mod device_choice;
mod error;
mod planning;
mod reporting;
mod run;
mod setup;
mod step;
mod strategy;
mod summary;
mod world;

pub use checkpointing::check_initial_weights;
pub use error::TrainError;
pub use planning::{Adjustment, Advice, Buffers, Candidate, Comparison, Estimate, Exchanges, Machines};
pub use run::{RunSummary, run_worker, run_worker_on, run_worker_with};
pub use setup::Substitutes;
pub use world::WrapTransport;
