//! The rendezvous daemon: brings the nodes of a job together, gives them their ranks, and decides what a
//! failure means for all of them.
//!
//! | file | noun | knows |
//! |---|---|---|
//! | `config` | [`Config`] | every interval and every bound |
//! | `event` | [`Event`], [`Effect`] | the state machine's input and output |
//! | `state` | [`State`], [`apply`] | all jobs; who speaks on which stream |
//! | `job` | one job | leases, timers, dispatch |
//! | `joining` | joining | who may take part, who comes back, who is refused |
//! | `recovery` | recovery | how a daemon that lost its state takes up a generation that runs |
//! | `record` | [`Record`] | what is written down of a job, and what a restarted daemon makes of it |
//! | `gather` | gathering | when a generation starts |
//! | `assignment` | the start | what every node receives |
//! | `ranks` | node ranks | asked for, sticky, natural order of host names |
//! | `outcome` | the end | failures, lost nodes, signals, success |
//! | `silence` | silent members | whose peers vouch for them, and for how long |
//! | `hearing` | a daemon that hears from nobody | whether its own network is down |
//! | `witnesses` | nodes that two witnesses saw die | when they are believed |
//! | `failures` | all failures | their order, the last word on them |
//! | `policy` | restart policy | what an ended generation costs, when another one is no use |
//! | `size` | the size of a generation | which nodes make a number of ranks that the workers can go on with |
//! | `scale` | growing and shrinking | nodes that come to a job that runs, and nodes that leave it |
//! | `kv` | the store | write-once entries of one generation, blocking reads |
//! | `difference` | two nodes of one job | in what they differ |
//! | `words` | messages | what people read |
//! | `actor` | the task that owns the state | the clock, the dice, the queues |
//! | `ledger` | [`Ledger`] | the file in which records are kept |
//! | `server` | [`serve`] | gRPC, sockets |
//! | `incoming` | connections | how many may wait, a lack of open files |
//!
//! Everything above `actor` is pure: `apply(at, state, event) -> effects`, with time and randomness as
//! parameters, so that `tests/sim` can run years of trouble in seconds. The daemon never waits for an agent:
//! an agent that does not read its messages is disconnected.

mod actor;
mod assignment;
mod config;
mod difference;
mod event;
mod failures;
mod gather;
mod hearing;
mod incoming;
mod job;
mod joining;
mod kv;
mod ledger;
mod outcome;
mod policy;
mod ranks;
mod record;
mod recovery;
mod scale;
mod server;
mod silence;
mod size;
mod state;
#[cfg(test)]
mod tests;
mod witnesses;
mod words;

pub use config::{Config, DEFAULT_JOB_ID, KvLimits};
pub use event::{At, CallId, ConnId, Effect, Event, KvError, Peer, Weight};
pub use incoming::listen;
pub use ledger::{Ledger, LedgerError};
pub use record::Record;
pub use server::{ServeError, serve};
pub use state::{State, apply};
