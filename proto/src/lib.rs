//! All that two processes of `ddp-run` must agree on.
//!
//! | module | what it fixes | spoken between |
//! |---|---|---|
//! | [`ids`] | newtypes for nodes, ranks, world sizes, generations | everyone |
//! | [`rendezvous`] | the gRPC service, generated from `proto/rendezvous.proto` | daemon ⇄ agent |
//! | [`assignment`] | what an assignment tells of all nodes together | daemon → agent |
//! | [`client`] | the typed client of that service, with deadlines and jittered back-off | agent → daemon |
//! | [`resolver`] | host names to addresses, where threads are scarce: here for the client, and the daemon finds its own address in the same way | – |
//! | [`mounts`] | where control groups can be seen: here because launcher and worker both look for theirs, and know nothing of each other | – |
//! | [`mod@env`] | the environment of a worker, written and parsed in one place | agent → worker |
//! | [`codec`] | how messages of that service become bytes | – |
//! | [`control`] | the messages of the control socket | agent ⇄ worker |
//! | [`utc`] | moments as text: both name files and tell people by them | – |
//! | [`words`] | how many and which, in sentences: all three name the same ranks | – |
//! | [`ports`] | ranges of TCP ports: the command line reads one, a worker listens in it | agent → worker |
//! | [`exit`] | exit codes of the launcher | launcher → its caller |
//!
//! This package knows nothing of processes, tensors or training.
#![forbid(unsafe_code)]

pub mod assignment;
pub mod client;
pub mod codec;
pub mod control;
pub mod env;
pub mod exit;
pub mod ids;
pub mod mounts;
pub mod ports;
pub mod resolver;
pub mod utc;
pub mod words;

/// Messages, client and server of the rendezvous service, generated from `proto/rendezvous.proto`.
#[allow(missing_docs, clippy::pedantic, unreachable_pub)]
pub mod rendezvous {
    tonic::include_proto!("ddp.rendezvous.v1");

    /// Workers of each kind whose ends one `NodeStopped` tells: of those that failed, and of those that were stopped.
    pub const MAX_EXITS_OF_A_KIND: usize = 32;
}
