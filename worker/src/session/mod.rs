//! A worker's link to its job: place, key-value store, heartbeats, and the word that the generation is over.
//!
//! | file | what it holds |
//! |---|---|
//! | `session.rs` | [`Session`]: what the rest of the worker sees |
//! | `link.rs` | the control socket: connecting, the reader and the writer thread |
//! | `outbox.rs` | what is still to be written to the agent |
//! | `line.rs` | lines of bounded length |
//! | `remote.rs` | the key-value store behind the control socket |
//! | `calls.rs` | its calls that are under way |
//! | `store.rs` | [`KeyValue`], and the store of a world of one |
//! | `stop.rs` | [`StopRequest`]: the word that training is to stop at the next step boundary |
//! | `cancel.rs` | [`Cancel`]: the word that the generation is over |
//! | `waits.rs` | what the process waits for, for the agent |
//! | `stacks.rs` | where its threads are, for an agent that asks |
//!
//! Nothing here waits without a deadline, and an agent that died ends every wait at once.

mod calls;
mod cancel;
mod error;
mod line;
mod link;
mod outbox;
mod remote;
#[expect(clippy::module_inception, reason = "the file is named for its noun")]
mod session;
mod stacks;
mod stop;
mod store;
#[cfg(test)]
mod tests;
mod waits;

pub use ddp_proto::control::{Phase, Progress};

pub use cancel::Cancel;
pub use error::SessionError;
pub use session::Session;
pub use stop::StopRequest;
pub use store::{KeyValue, MemoryStore, StoreError};
pub use waits::{Waiting, Wanted};
