//! Training: the loop of one rank, from a configuration and a session to a summary.
//!
//! From top to bottom: what stands above uses what stands below, and never the other way. `tests/tidy` checks it.
//!
//! | file or folder | what it holds |
//! |---|---|
//! | `run.rs` | a run from its first line to its last, its summary, and the report of a failure |
//! | `startup_table.rs` | the lines that rank 0 prints before the first step |
//! | `setup.rs` | everything that happens once: files, other ranks, agreement, first values |
//! | `device_choice.rs` | which device this rank trains on |
//! | `warm_up.rs` | kernels that are loaded before the first collective |
//! | `step/` | the loop over the steps, and one step |
//! | `checkpointing/` | saving, resuming, and the global batch of a run that is resumed on other ranks |
//! | `reporting/` | the record of each step, the console, and the steps whose timeline is written |
//! | `rank_spec.rs` | what a rank holds and does, decided before anything is allocated; its rehearsal |
//! | `strategy.rs` | what a strategy holds of parameters and gradients, and a rank of the model |
//! | `run_row.rs` | the only loop over a row of a schedule |
//! | `replica.rs` | the model on this rank, and the memory of its micro-batches |
//! | `router_table.rs` | what the routers of experts count in a step |
//! | `row_state.rs` | what a rank keeps while it runs a row, and what each kind of action does |
//! | `rank_table.rs` | tables with one row a rank, gathered on all of them |
//! | `idle_world.rs` | a rank on a device that does nothing, to plan with |
//! | `world.rs` | this rank among the others: device, stream, communicator |
//! | `error.rs` | why a worker cannot go on |

mod checkpointing;
mod device_choice;
mod error;
pub(crate) mod idle_world;
pub(crate) mod rank_spec;
mod rank_table;
pub(crate) mod replica;
mod reporting;
pub(crate) mod router_table;
mod row_state;
mod run;
pub(crate) mod run_row;
mod setup;
mod startup_table;
mod step;
pub(crate) mod strategy;
mod warm_up;
mod world;

pub(crate) use checkpointing::BuddyCopy;
pub use checkpointing::{Decision, GoOn, Held, Place, Version, check_initial_weights, check_resumes, decide};
pub use error::TrainError;
pub use reporting::Footprint;
pub use run::{Ended, run_generations, run_worker};
pub use setup::Assignment;
pub use step::RunSummary;
pub use strategy::pipeline_plan;
pub use world::WrapTransport;
