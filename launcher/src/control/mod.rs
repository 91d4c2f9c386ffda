//! The agent's side of the control socket: one listener for all local workers, newline-delimited JSON.
//!
//! | file | what it does |
//! |---|---|
//! | `server` | listens, sends messages to all workers |
//! | `hub` | the state that server and connections share |
//! | `connection` | one connection: greeting, messages, key-value calls |
//! | `peer` | which worker a process belongs to |
//! | `store` | key-value calls, forwarded to the daemon and cached |
//!
//! A worker that stops reading loses its connection; it never holds up the agent.

mod connection;
mod hub;
mod peer;
mod server;
mod store;

pub use connection::read_foreign_lines;
pub(crate) use hub::{ControlEvent, ControlNews, WorkerContext};
pub(crate) use server::ControlServer;
pub(crate) use store::Store;
