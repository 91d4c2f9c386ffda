//! A worker's connection to its job: place, key-value store, heartbeats, and the message that the generation is over.
//!
//! | file | what it holds |
//! |---|---|
//! | `session.rs` | [`Session`]: what the rest of the worker sees |
//! | `link.rs` | the control socket: connecting, its lines, the reader and the writer thread; [`SessionError`] |
//! | `outbox.rs` | what is still to be written to the agent |
//! | `store.rs` | [`KeyValue`]: the store of a world of one, and the one behind the control socket |
//! | `cancel.rs` | [`Cancel`]: the generation is over; [`StopRequest`]: stop at the next step boundary; what the process waits for |
//! | `stacks.rs` | where the threads of the process are, for an agent that asks |
//!
//! Nothing here waits without a deadline, and an agent that died ends every wait at once.

mod cancel;
mod link;
mod outbox;
#[expect(clippy::module_inception, reason = "the file is named for its noun")]
mod session;
mod stacks;
mod store;
#[cfg(test)]
mod tests;

pub use cancel::{Cancel, StopRequest, Waiting, Wanted};
pub use ddp_proto::control::{Phase, Progress};
pub use link::SessionError;
pub(crate) use link::other_user;
pub use session::Session;
pub use store::{Entries, KeyValue, MemoryStore, StoreError};
