//! Why a worker could not take its place in the job.

use ddp_proto::env::EnvError;

/// A session could not begin.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The environment contract is incomplete or contradicts itself.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// Several ranks, and no store at which they can meet.
    #[error(
        "`WORLD_SIZE` is {world_size}, but `DDP_CONTROL` is not set: the ranks cannot find each other\n  hint: start the program with `ddp-run --nproc-per-node {world_size}`; other launchers have no control socket"
    )]
    NoAgent {
        /// Size of the world.
        world_size: u32,
    },
    /// The control socket cannot be reached.
    #[error(
        "cannot connect to the agent at `{address}`: {cause}\n  hint: `DDP_CONTROL` is only valid below the `ddp-run` that set it"
    )]
    Connect {
        /// `DDP_CONTROL`.
        address: String,
        /// The system's words.
        cause: String,
    },
    /// The socket belongs to another user.
    #[error("the agent at `{address}` runs under user id {found}, this worker under {expected}: refused")]
    Stranger {
        /// `DDP_CONTROL`.
        address: String,
        /// Who listens there.
        found: u32,
        /// Who we are.
        expected: u32,
    },
    /// The agent did not send an assignment.
    #[error("the agent at `{address}` sent no assignment: {cause}")]
    NoAssignment {
        /// `DDP_CONTROL`.
        address: String,
        /// What happened instead.
        cause: String,
    },
    /// The agent's assignment cannot be used.
    #[error("the agent's assignment cannot be used: {0}")]
    BadAssignment(EnvError),
    /// The agent speaks another protocol.
    #[error(
        "the agent speaks version {found} of the control protocol, this worker {expected}\n  hint: start the worker with the `ddp-run` of its own release"
    )]
    Protocol {
        /// Version of the agent.
        found: u32,
        /// Version of this build.
        expected: u32,
    },
    /// The generation ended before the worker had begun.
    #[error("the generation was over before this worker had begun: {0}")]
    Superseded(String),
    /// The system refused a thread.
    #[error("cannot start thread `{name}`: {cause}")]
    Thread {
        /// Name of the thread.
        name: &'static str,
        /// The system's words.
        cause: String,
    },
}
