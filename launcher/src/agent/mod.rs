//! The agent: joins the job, runs the workers of this node, stops them, and tells why.
//!
//! | file | what it does |
//! |---|---|
//! | `machine` | decides: `(state, event) -> (state, effects)`, without I/O |
//! | `exit_reason` | the ways in which a launch ends, with their exit codes |
//! | `event` | the words in which the machine and its driver speak |
//! | `stop` | the stop routine, a part of the machine |
//! | `launch` | a launch from outside: its beginning and its outcome |
//! | `driver` | one loop that turns all that happens into events, and carries out the effects |
//! | `inbox` | the one `select!` over everything that may happen |
//! | `tasks` | what takes time, done beside the loop |
//! | `blocking_thread` | the thread for what blocks |
//! | `workers` | the workers of one generation: processes, files, the ends they came to |
//! | `contracts` | what an assignment means for each of them |
//! | `link` | the stream to the daemon, opened again when it breaks |
//! | `meanwhile` | what goes on while the daemon is out of reach, in words |
//! | `place` | what the agent keeps of its assignment for a daemon that has lost its state |
//! | `suspension` | notices that this process was suspended |
//! | `signals` | the signals that stop the launcher |

mod blame;
mod blocking_thread;
mod contracts;
mod driver;
mod event;
mod exit_reason;
mod inbox;
mod launch;
mod link;
mod machine;
mod meanwhile;
mod place;
mod signals;
mod spawning;
mod stop;
mod suspension;
mod tasks;
mod workers;

pub use event::{Effect, Event};
pub use exit_reason::ExitReason;
pub use launch::{LaunchError, Outcome, run};
pub use link::Memory;
pub use machine::{LEAVE_WAIT, Machine, Rules, VERDICT_WAIT};
pub use signals::is_ignored;
