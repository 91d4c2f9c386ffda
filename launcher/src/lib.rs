//! The agent of one node: joins the job, spawns and guards its workers, supervises them, reports failures.
//!
//! | module | what it does |
//! |---|---|
//! | `plan`, `preview` | what an agent is asked to do, and what that comes to |
//! | `agent` | joins, decides, supervises, restarts |
//! | `spawn` | starts workers with the environment that they expect |
//! | `supervise` | collects their ends, finds workers that hang, kills leftovers; `guardian` kills after a launcher that died |
//! | `cgroup` | holds all that workers start in one control group; knows the control groups of this process |
//! | `control` | the control socket of the workers |
//! | `output` | the workers' output, on the console and in files |
//! | `threads` | threads for work that blocks, and with a runtime of their own |
//! | `report` | the failure report, for people and for programs, and the event log |
//! | `tcp_store` | hosts the store that the workers' PyTorch uses at `MASTER_PORT` |
//!
//! It knows the protocol of the daemon ([`ddp_proto`]) but not its insides, and nothing of tensors.
//!
//! Threads: the caller's runtime runs the agent; `spawner` starts workers, `reader` reads their output, `console`
//! writes, `tcp-store` serves. Only the agent decides, and it never waits for the others.
#![deny(unsafe_code)]

mod agent;
mod cgroup;
mod control;
mod output;
mod plan;
mod preview;
mod report;
mod spawn;
mod supervise;
mod tcp_store;
mod threads;

pub use agent::{ExitReason, Outcome, is_ignored, run, user_name};
pub use cgroup::{NoGroup, cpu_quota, parent_of_workers, usable_cores};
pub use output::console::progress_bar;
pub use output::logs::LogError;
pub use output::plan::{OutputPlan, PrefixTemplate, StreamSet, StreamsByRank};
pub use plan::{
    AgreedValue, BoundPlan, CoreSet, LaunchPlan, NodeRange, SignalPlan, SignalScope, WorkerCommand,
};
pub use preview::{Variable, environment_of, missing_program};
pub use report::error_file::replace_file;
pub use spawn::program::SpawnError;
pub use supervise::ending::{Ending, signal_name};
pub use supervise::guardian::Guardian;

/// The pure decisions of the agent, as `tests/sim` runs them: without I/O, clock or processes.
pub mod decisions {
    pub use crate::agent::{Effect, Event, LEAVE_WAIT, Machine, Memory, Rules, TakeoverClock, VERDICT_WAIT};
    pub use crate::spawn::spawner::SpawnEvent;
}

/// For `tests/fuzz`: what other processes send to an agent, and has no public function.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::control::read_foreign_lines;
    pub use crate::tcp_store::read_foreign_commands;
}
