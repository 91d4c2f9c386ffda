//! The parts of `ddp-run` that only it needs: the rendezvous daemon and the command line.
//!
//! | module | what lives there | what it must not know |
//! |---|---|---|
//! | [`cli`] | arguments, configuration layers, hosting decision, reports | how a gradient is reduced |
//!
//! The binaries in `src/bin` are wiring. Agents live in [`ddp_launcher`], training in [`ddp_worker`], and
//! what two processes must agree on in [`ddp_proto`].
#![forbid(unsafe_code)]

pub mod cli;
