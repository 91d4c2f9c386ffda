//! The parts of `ddp-run` that are neither launcher nor worker.
//!
//! | module | what it is | what it must not know |
//! |---|---|---|
//! | [`rendezvous`] | the daemon: brings the nodes of a job together, decides on failures and restarts | processes, tensors |
//! | [`cli`] | arguments, configuration layers, who hosts the daemon, reports | how a gradient is reduced |
//!
//! The binaries in `src/bin` are wiring. Agents live in [`ddp_launcher`], training in [`ddp_worker`], and
//! what two processes must agree on in [`ddp_proto`].
#![forbid(unsafe_code)]

pub mod cli;
pub mod rendezvous;
