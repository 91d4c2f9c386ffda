//! What is between this agent and the daemon.
//!
//! | file | what it does |
//! |---|---|
//! | `connection` | whether the daemon can be reached, and how long it is waited for |
//! | `link` | the stream, as a task that opens it again when it breaks |
//! | `memory` | what is said again on a new stream, and how long workers may train without one |

mod connection;
mod link;
mod memory;

pub(super) use connection::{DaemonConnection, WorkersEnd};
pub(super) use link::LinkEvent;
pub use memory::{Memory, TakeoverClock};
