//! The rendezvous daemon: brings the nodes of a job together, gives them their ranks, and decides what a
//! failure means for all of them.
//!
//! | file | noun | knows |
//! |---|---|---|
//! | `config` | [`Config`] | every interval and every bound |
//! | `event` | [`Event`], [`Effect`] | the state machine's input and output |
//! | `state` | [`State`], [`apply`] | all jobs; who speaks on which stream |
//! | `job` | one job | its nodes, its generations, and what it is doing |
//! | `generation_counter` | a job's generations | their numbers and assignment ids, the id of the run |
//! | `policy` | restart policy | what an ended generation costs, when another one is no use |
//! | `nodes` | many nodes | their assignments, and whose lease ends next |
//! | `ranks` | node ranks | asked for, sticky, natural order of host names |
//! | `size` | the size of a generation | which nodes make a number of ranks that the workers can go on with |
//! | `history` | the past of a job | its generations with their reasons, and rank 0's losses |
//! | `partition` | a daemon that hears no node | whether its own network may be down |
//! | `kv` | the store | write-once entries of one generation, blocking reads |
//! | `store_totals` | all stores together | how much they take |
//! | `messages` | texts | what people read |
//! | [`report`] | the daemon's answers to people | how they look as JSON |
//! | `service` | [`serve`], [`Ledger`] | who is let in, the clock, the dice, the queues, the file of records, gRPC, HTTP, sockets |
//!
//! Everything but `service` is pure: `apply(at, state, event) -> effects`, with time and randomness as
//! parameters, so that `tests/sim` can run years of trouble in seconds. The daemon never waits for an agent:
//! an agent that does not read its messages is disconnected.

mod config;
mod context;
mod event;
mod generation_counter;
mod history;
mod job;
mod kv;
mod messages;
mod nodes;
mod partition;
mod policy;
mod ranks;
pub mod report;
mod service;
mod size;
mod state;
mod store_totals;
#[cfg(test)]
mod tests;

pub use config::{Callers, Config, DEFAULT_JOB_ID, KvLimits};
pub use event::{
    About, At, CallId, ConnId, Effect, Event, KvError, Observation, Peer, Record, Secret, Weight,
};
pub use policy::EndReason;
pub use report::Census;
pub use service::{
    Ledger, LedgerError, Listener, Monitoring, ServeError, Transport, listen, listen_locally, serve,
};
pub use state::{State, apply};
