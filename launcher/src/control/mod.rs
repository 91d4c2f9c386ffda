//! The agent's side of the control socket: one listener for all local workers, newline-delimited JSON.
//!
//! | file | what it does |
//! |---|---|
//! | `server` | listens, keeps the list of connections, sends to all of them |
//! | `connection` | one connection: greeting, messages, key-value calls |
//! | `peer` | which worker a process belongs to |
//! | `store` | key-value calls, forwarded to the daemon and cached |
//!
//! A worker that stops reading loses its connection; it never holds up the agent.

mod connection;
mod peer;
mod server;
mod store;

pub(crate) use server::{ControlEvent, ControlServer, News, Place};
pub(crate) use store::Store;
