//! The rendezvous daemon: brings the nodes of a job together, gives them their ranks, and decides what a
//! failure means for all of them.
//!
//! | file | noun | knows |
//! |---|---|---|
//! | `config` | [`Config`] | every interval and every bound |
//! | `event` | [`Event`], [`Effect`] | the state machine's input and output |
//! | `state` | [`State`], [`apply`] | all jobs; who speaks on which stream |
//! | `job` | one job | its nodes, its generations, and what it is doing |
//! | `policy` | restart policy | what an ended generation costs, when another one is no use |
//! | `nodes` | indexes and the list of nodes | who is ready, who is away, whose lease ends next, without a look at all |
//! | `node_list` | the nodes of a generation | what each is told of the others, and the list on request |
//! | `ranks` | node ranks | asked for, sticky, natural order of host names |
//! | `size` | the size of a generation | which nodes make a number of ranks that the workers can go on with |
//! | `history` | the past of a job | its generations with their reasons, and rank 0's losses |
//! | `stragglers` | slow ranks | which ones, by their step times |
//! | `isolation` | a daemon that receives nothing | whether its own network is down |
//! | `kv` | the store | write-once entries of one generation, blocking reads |
//! | `store_totals` | all stores together | how much they take |
//! | `deadlines` | deadlines by time | which is next |
//! | `difference` | two nodes of one job | in what they differ |
//! | `words` | messages | what people read |
//! | [`report`] | the daemon's answers to people | how they look as JSON |
//! | `service` | [`serve`], [`Ledger`] | who is let in, the clock, the dice, the queues, the file of records, gRPC, HTTP, sockets |
//!
//! Everything but `service` is pure: `apply(at, state, event) -> effects`, with time and randomness as
//! parameters, so that `tests/sim` can run years of trouble in seconds. The daemon never waits for an agent:
//! an agent that does not read its messages is disconnected.

mod config;
mod difference;
mod event;
mod history;
mod isolation;
mod job;
mod kv;
mod nodes;
mod policy;
mod ranks;
pub mod report;
mod service;
mod size;
mod state;
mod store_totals;
mod stragglers;
#[cfg(test)]
mod tests;
mod words;

pub use config::{Callers, Config, DEFAULT_JOB_ID, KvLimits};
pub use event::{
    About, At, CallId, ConnId, Effect, Event, KvError, Observation, Peer, RestartReason, Secret, Weight,
};
pub use job::Record;
pub use service::{
    Ledger, LedgerError, Listener, Monitoring, ServeError, Transport, listen, listen_locally, serve,
    serve_with,
};
pub use state::{Census, State, apply};
