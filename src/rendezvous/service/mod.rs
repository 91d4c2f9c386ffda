//! The daemon's I/O: the task that owns the state, its ledger, and the gRPC server. Nothing is decided here.

mod actor;
mod admission;
mod connection;
mod incoming;
mod ledger;
mod server;

#[cfg(test)]
pub(super) use actor::{Actor, Request};
pub use incoming::{Listener, OperatorTls, Transport, listen, listen_locally};
pub use ledger::{Ledger, LedgerError};
pub use server::{ServeError, serve};
