//! The daemon's I/O: the task that owns the state, its ledger, the gRPC server, and the status page. Nothing is decided
//! here.

mod actor;
mod connection;
mod connection_limits;
mod http;
mod http_state;
mod ledger;
mod ledger_queue;
mod metrics;
mod metrics_file;
mod page;
mod server;

#[cfg(test)]
pub(super) use actor::{Actor, Request};
pub use connection::{Listener, Transport, listen, listen_locally};
pub use ledger::{Ledger, LedgerError};
pub use server::{Monitoring, ServeError, serve};
