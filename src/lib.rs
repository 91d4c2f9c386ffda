//! The parts of `ddp-run` that are neither launcher nor worker.
//!
//! | module | what it is |
//! |---|---|
//! | [`rendezvous`] | the daemon: brings the nodes of a job together, decides on failures and restarts |
#![forbid(unsafe_code)]

pub mod rendezvous;
