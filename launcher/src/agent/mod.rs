//! The agent: joins the job, runs the workers of this node, stops them, and tells why.
//!
//! | file | what it does |
//! |---|---|
//! | `machine` | decides: `(state, event) -> (state, effects)`, without I/O |
//! | `conclusion` | the ways in which a launch ends, with their exit codes |
//! | `event` | the words in which the machine and its driver speak |
//! | `stop` | the stop routine, a part of the machine |
//! | `farewell` | the end of the agent: the daemon's last word, the good-bye; a part of the machine |
//! | `launch` | a launch from outside: its beginning and its outcome |
//! | `driver` | one loop that turns all that happens into events, and carries out the effects |
//! | `inbox` | the one `select!` over everything that may happen |
//! | `aside` | what takes time, done beside the loop |
//! | `hand` | the thread for what blocks |
//! | `workers` | the workers of one generation: processes, files, the ends they came to |
//! | `contracts` | what an assignment means for each of them |
//! | `link` | the stream to the daemon, opened again when it breaks |
//! | `meanwhile` | what goes on while the daemon is out of reach, in words |
//! | `place` | what the agent keeps of its assignment for a daemon that has lost its state |
//! | `standstill` | notices that this process was suspended |
//! | `signals` | the signals that stop the launcher |

mod aside;
mod blame;
mod conclusion;
mod contracts;
mod driver;
mod event;
mod farewell;
mod hand;
mod inbox;
mod launch;
mod link;
mod machine;
mod meanwhile;
mod place;
mod signals;
mod spawning;
mod standstill;
mod stop;
mod workers;

pub use conclusion::Conclusion;
pub use launch::{LaunchError, Outcome, run};
pub use signals::is_ignored;
