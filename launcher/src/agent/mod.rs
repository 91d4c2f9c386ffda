//! The agent: joins the job, runs the workers of this node, stops them, and tells why.
//!
//! | file | what it does |
//! |---|---|
//! | `machine` | decides: `(state, event) -> (state, effects)`, without I/O |
//! | `conclusion` | the ways in which a launch ends, with their exit codes |
//! | `driver` | one `select!` loop that turns all that happens into events, and carries out the effects |
//! | `workers` | the workers of one generation: processes, files, the ends they came to |
//! | `link` | the stream to the daemon, opened again when it breaks |
//! | `signals` | the signals that stop the launcher |

mod conclusion;
mod driver;
mod link;
mod machine;
mod signals;
mod workers;

pub use conclusion::Conclusion;
pub use driver::{LaunchError, Outcome, run};
