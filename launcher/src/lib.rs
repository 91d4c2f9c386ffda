//! The agent of one node: joins the job, spawns and guards its workers, supervises them, reports failures.
//!
//! | module | what it does |
//! |---|---|
//! | `plan`, `preview` | what an agent is asked to do, and what that comes to |
//! | `agent` | joins, decides, supervises, restarts |
//! | `guardian` | kills the workers of a launcher that was killed |
//! | `cgroup` | holds all that workers start in one control group; knows the control groups of this process |
//! | `spawn`, `process`, `environment`, `master_port` | start workers with the environment that they expect |
//! | `tcp_store` | hosts the store that the workers' PyTorch uses at `MASTER_PORT` |
//! | `hang`, `waits` | find workers that say nothing any more, and tell who waits for whom |
//! | `reap`, `sweep`, `proc_table`, `ending` | collect ends, kill leftovers |
//! | `oom` | tells a death for lack of memory from a stranger's `kill -9` |
//! | `control` | the control socket of the workers |
//! | `output`, `pump`, `lines`, `repeated_errors`, `feed`, `console`, `sinks`, `progress`, `terminal`, `logs` | the workers' output, on the console and in files |
//! | `report`, `root_cause`, `local_end`, `failures` | the failure report, for people and for programs; what else failed, here and elsewhere |
//! | `event_log` | what happened, as JSON lines |
//!
//! It knows the protocol of the daemon ([`ddp_proto`]) but not its insides, and nothing of tensors.
//!
//! Threads: the caller's runtime runs the agent; `spawner` starts workers, `pump` reads their output, `console`
//! writes, `tcp-store` serves. Only the agent decides, and it never waits for the others.
#![deny(unsafe_code)]

mod agent;
mod cgroup;
mod console;
mod control;
mod ending;
mod environment;
mod event_log;
mod failures;
mod feed;
mod guardian;
mod hang;
mod lines;
mod local_end;
mod logs;
mod master_port;
mod oom;
mod output;
mod plan;
mod preview;
mod proc_table;
mod process;
mod progress;
mod pump;
mod reap;
mod repeated_errors;
mod report;
mod root_cause;
mod sinks;
mod spawn;
mod sweep;
mod tcp_store;
mod terminal;
mod waits;

pub use agent::{ExitReason, LaunchError, Outcome, is_ignored, run};
pub use cgroup::{NoGroup, cpu_quota, memory_limit, parent_of_workers, usable_cores};
pub use ending::{Ending, signal_name};
pub use guardian::Guardian;
pub use logs::LogError;
pub use output::{OutputPlan, PrefixTemplate, StreamSet, StreamsByRank};
pub use plan::{CoreSet, LaunchPlan, NodeRange, SignalPlan, SignalScope, WorkerCommand};
pub use preview::{Variable, environment_of, missing_program};
pub use spawn::SpawnError;

/// The pure decisions of the agent, as `tests/sim` runs them: without I/O, clock or processes.
pub mod decisions {
    pub use crate::agent::{Effect, Event, LEAVE_WAIT, Machine, Memory, Rules, VERDICT_WAIT};
}
