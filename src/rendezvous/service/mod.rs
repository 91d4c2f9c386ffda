//! The daemon's I/O: the task that owns the state, its ledger, and the gRPC server. Nothing is decided here.

mod actor;
mod incoming;
mod ledger;
mod server;

#[cfg(test)]
pub(super) use actor::{Actor, Request};
pub use incoming::listen;
pub use ledger::{Ledger, LedgerError};
pub use server::{ServeError, serve};
