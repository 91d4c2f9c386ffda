//! The daemon's I/O: the task that owns the state, its ledger, the gRPC server, and what operators look at. Nothing is
//! decided here.

mod actor;
mod admin;
mod admission;
mod arrivals;
mod connection;
mod http;
mod incoming;
mod ledger;
mod metrics;
#[cfg(feature = "otlp")]
mod otlp;
mod page;
mod replies;
mod server;

#[cfg(test)]
pub(super) use actor::{Actor, Request};
pub use admin::Admin;
pub use http::Operators;
pub use incoming::{Listener, OperatorTls, Transport, listen, listen_locally};
pub use ledger::{Ledger, LedgerError};
#[cfg(feature = "otlp")]
pub use otlp::Collector;
pub use server::{ServeError, serve, serve_with};
