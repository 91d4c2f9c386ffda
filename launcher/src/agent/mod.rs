//! The agent: joins the job, runs the workers of this node, stops them, and reports why.
//!
//! | module | what it does |
//! |---|---|
//! | `launch` | a launch from outside: its beginning and its outcome |
//! | `context` | the parts of a launch that all others use |
//! | `machine` | decides: `(state, event) -> (state, effects)`, without I/O |
//! | `driver` | one loop that turns all that happens into events, and carries out the effects |
//! | `daemon` | the connection to the daemon, and what is said again when it was lost |
//! | `workers` | the workers of one generation: processes, files, the ends they came to; those that hang |
//! | `signals` | the signals that stop the launcher |

mod context;
mod daemon;
mod driver;
mod launch;
mod machine;
mod signals;
mod workers;

pub use context::user_name;
pub use daemon::{Memory, TakeoverClock};
pub use launch::{Outcome, run};
pub use machine::{Effect, Event, ExitReason, LEAVE_WAIT, Machine, Rules, VERDICT_WAIT};
pub use signals::is_ignored;
