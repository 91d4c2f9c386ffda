//! The agent of one node: joins the job, spawns and guards its workers, supervises them, reports failures.
//!
//! | module | what it does |
//! |---|---|
//! | `plan` | what an agent is asked to do |
//! | `agent` | joins, decides, supervises, restarts |
//! | `guardian` | kills the workers of a launcher that was killed |
//! | `spawn`, `environment`, `master_port` | start workers with the environment that they expect |
//! | `reap`, `sweep`, `proc_table`, `ending` | collect ends, kill leftovers |
//! | `control` | the control socket of the workers |
//! | `pump`, `lines`, `console`, `progress`, `logs` | the workers' output, on the console and in files |
//! | `report` | the failure report |
//!
//! It knows the protocol of the daemon ([`ddp_proto`]) but not its insides, and nothing of tensors.
//!
//! Threads: the caller's runtime runs the agent; `spawner` starts workers, `pump` reads their output, `console`
//! writes. Only the agent decides, and it never waits for the others.
#![deny(unsafe_code)]

mod agent;
mod console;
mod control;
mod ending;
mod environment;
mod guardian;
mod lines;
mod logs;
mod master_port;
mod plan;
mod proc_table;
mod progress;
mod pump;
mod reap;
mod report;
mod spawn;
mod sweep;

pub use agent::{Conclusion, LaunchError, Outcome, run};
pub use ending::{Ending, signal_name};
pub use guardian::Guardian;
pub use logs::LogError;
pub use plan::{LaunchPlan, NodeRange, WorkerCommand};
pub use spawn::SpawnError;
