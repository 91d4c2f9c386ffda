//! What one agent is asked to do: built by the command line, carried out by [`crate::run`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use ddp_proto::ids::NodeRank;

/// Everything the agent of one node needs to know before it joins.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// `--rdzv-id`: name of the job at the daemon.
    pub job_id: String,
    /// `host:port` of the daemon, embedded or not. The launcher never hosts it itself.
    pub endpoint: String,
    /// How many nodes the job may have.
    pub nodes: NodeRange,
    /// `--node-rank`; none: the daemon decides.
    pub node_rank: Option<NodeRank>,
    /// Workers on this node.
    pub workers: u32,
    /// `--max-restarts`: how often the whole job may go to the next generation because a rank died.
    pub max_restarts: u32,
    /// `--local-addr`: address under which peers reach this node; none: the one the daemon sees.
    pub local_addr: Option<String>,
    /// Hash of what the nodes of one job must agree on.
    pub job_signature: String,
    /// The same in words, shown when nodes disagree.
    pub job_description: String,
    /// How long to wait for the other nodes.
    pub join_timeout: Duration,
    /// How long the daemon may stay unreachable before the agent gives up.
    pub connect_timeout: Duration,
    /// `--shutdown-timeout`: from SIGTERM to SIGKILL when workers are stopped.
    pub shutdown_timeout: Duration,
    /// `--log-dir`: below it `attempt_N/<global rank>/{stdout.log,stderr.log,error.json}`; none: no log files.
    pub log_dir: Option<PathBuf>,
    /// The program that every worker runs.
    pub command: WorkerCommand,
    /// Draw a progress bar from the heartbeats of rank 0 (stderr is a terminal, the worker is native).
    pub progress_bar: bool,
}

/// `--nnodes N` or `--nnodes MIN:MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    /// Nodes that are needed to start.
    pub min: u32,
    /// Nodes that are taken.
    pub max: u32,
}

/// A program with its arguments, as given to `execve`.
#[derive(Clone, Debug)]
pub struct WorkerCommand {
    /// File to execute; `/proc/self/fd/N` of a descriptor opened at start for the native worker.
    pub program: PathBuf,
    /// `argv[0]`, if it differs from `program`.
    pub arg0: Option<OsString>,
    /// `argv[1..]`.
    pub args: Vec<OsString>,
    /// Variables on top of the inherited ones; the environment contract wins over them.
    pub env: BTreeMap<String, String>,
    /// How people call it: `train.yaml`, `train.py`, `true`.
    pub display_name: String,
    /// True for the native worker, which stops at a step boundary when asked through the control socket.
    pub native: bool,
}
