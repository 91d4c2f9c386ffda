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
//! | [`trust`] | the token of a job, TLS from it, the key of data connections | everyone with it |
//! | [`utc`] | moments as text: both name files and tell people by them | – |
//! | [`words`] | how many and which, in sentences: all three name the same ranks | – |
//! | [`printable`] | words of peers without control characters: all of them arrive in this package's messages | – |
//! | [`ports`] | ranges of TCP ports: the command line reads one, a worker listens in it | agent → worker |
//! | [`exit`] | exit codes of the launcher | launcher → its caller |
//!
//! This package knows nothing of processes, tensors or training.
#![forbid(unsafe_code)]

pub mod assignment;
pub mod client;
pub mod codec;
#[cfg(test)]
#[path = "compatibility_tests.rs"]
mod compatibility;
pub mod control;
pub mod env;
pub mod exit;
pub mod ids;
pub mod mounts;
pub mod ports;
pub mod printable;
pub mod resolver;
pub mod trust;
pub mod utc;
pub mod words;

/// Messages, client and server of the rendezvous service, generated from `proto/rendezvous.proto`. The generated code is
/// committed, so that a build needs no compiler of protocols; a test compares the two.
#[allow(missing_docs, clippy::pedantic, unreachable_pub)]
pub mod rendezvous {
    include!("../proto/generated.rs");

    /// Workers of each kind whose ends one `NodeStopped` tells: of those that failed, and of those that were stopped.
    pub const MAX_EXITS_OF_A_KIND: usize = 32;

    /// Without the data key.
    impl std::fmt::Debug for Assignment {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.debug_struct("Assignment")
                .field("node_rank", &self.node_rank)
                .field("restart_count", &self.restart_count)
                .field("max_restarts", &self.max_restarts)
                .field("nodes", &self.nodes)
                .field("master_addr", &self.master_addr)
                .field("master_port", &self.master_port)
                .field("lease_ms", &self.lease_ms)
                .field("reason", &self.reason)
                .field("run_token", &self.run_token)
                .field("attempt", &self.attempt)
                .field("best_step", &self.best_step)
                .field("quick_failures", &self.quick_failures)
                .field("ports_taken", &self.ports_taken)
                .field("assignment_id", &self.assignment_id)
                .field("own", &self.own)
                .field("node_count", &self.node_count)
                .field("world_size", &self.world_size)
                .field("role_first_rank", &self.role_first_rank)
                .field("role_world_size", &self.role_world_size)
                .field("nodes_digest", &self.nodes_digest)
                .finish_non_exhaustive()
        }
    }
}
