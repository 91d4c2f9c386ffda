//! What one agent is asked to do: built by the command line, carried out by [`crate::run`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::ops::Deref;
use std::path::PathBuf;
use std::time::Duration;

use ddp_proto::client::Access;
use ddp_proto::ids::NodeRank;
use ddp_proto::ports::PortRange;

use crate::output::plan::OutputPlan;

/// A value that all nodes of a job must have alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreedValue {
    /// What the other nodes receive of it.
    pub hash: u64,
    /// What this launcher prints where it differs from another node's.
    pub shown: String,
}

/// A plan, and what binding it to this machine gave: everything that the agent of one node needs.
#[derive(Clone, Debug)]
pub struct BoundPlan {
    /// What was decided before anything was bound.
    pub plan: LaunchPlan,
    /// `host:port` of the daemon or `unix:@NAME`, embedded or not. The launcher never hosts it itself.
    pub endpoint: String,
    /// What this node and the daemon prove to each other.
    pub access: Access,
    /// Random name of this launcher, which only the daemon gets.
    pub incarnation: String,
    /// Soft limit of the workers' open files, if it differs from the launcher's, which may have raised its own.
    pub open_files: Option<u64>,
}

impl Deref for BoundPlan {
    type Target = LaunchPlan;

    fn deref(&self) -> &LaunchPlan {
        &self.plan
    }
}

/// What the settings of one node come to. Nothing is bound yet, and no field waits for a later value.
#[derive(Clone, Debug)]
pub struct LaunchPlan {
    /// `--rdzv-id`: name of the job at the daemon.
    pub job_id: String,
    /// Name of the run, which its directory has: that of the job, or one of its configuration without `--rdzv-id`.
    pub run_id: String,
    /// How many nodes the job may have.
    pub nodes: NodeRange,
    /// `--node-rank`; without it the daemon decides.
    pub node_rank: Option<NodeRank>,
    /// Workers on this node.
    pub workers: u32,
    /// `--max-restarts`: how often the whole job may go to the next generation because a rank died.
    pub max_restarts: u32,
    /// `--local-addr`: address at which peers reach this node; without it the one that the daemon sees.
    pub local_addr: Option<String>,
    /// By key: what all nodes of the job must have alike.
    pub agreed: BTreeMap<String, AgreedValue>,
    /// How long to wait for the other nodes.
    pub join_timeout: Duration,
    /// How long to wait for more nodes than the minimum; without it the daemon decides.
    pub last_call: Option<Duration>,
    /// How long a node may train without the daemon where others can take its place; without it the daemon decides.
    pub takeover: Option<Duration>,
    /// How long the daemon may stay unreachable before the agent gives up, while it has no workers that run.
    pub connect_timeout: Duration,
    /// The same while workers run.
    pub outage_timeout: Duration,
    /// `--shutdown-timeout`: from SIGTERM to SIGKILL when workers are stopped.
    pub shutdown_timeout: Duration,
    /// `--hang-timeout`: a worker that has sent heartbeats is examined after this silence, and ended if it is the cause. `None` disables the check.
    pub hang_timeout: Option<Duration>,
    /// `--log-dir`, with `attempt_N/<global rank>/{stdout.log,stderr.log,error.json}` below it. `None` writes no log files.
    pub log_dir: Option<PathBuf>,
    /// What to add to the command to resume a stopped native job. Other programs have none.
    pub resume_hint: Option<String>,
    /// What happens to the workers' output.
    pub output: OutputPlan,
    /// `--role`: what ranks of this node are called, and counted by.
    pub role: String,
    /// `--master-addr`: MASTER_ADDR of the workers; without it the address at which the others reach node 0.
    pub master_addr: Option<String>,
    /// `--master-port`: MASTER_PORT of the workers, if this node becomes node 0; without it each generation
    /// takes a free one.
    pub master_port: Option<u16>,
    /// `--worker-ports`: where native workers listen, and MASTER_PORT of other programs is, unless that is given; without it
    /// any free ports.
    pub worker_ports: Option<PortRange>,
    /// `--virtual-local-rank`: every worker is local rank 0, and sees its own GPU only.
    pub virtual_local_rank: bool,
    /// Signals that stop the job, and those that are passed on to the workers.
    pub signals: SignalPlan,
    /// `--numa-binding`: cores of each worker, by local rank; empty: not bound.
    pub cores: Vec<CoreSet>,
    /// `--event-log-handler`: a file that takes one JSON object for each thing that happens.
    pub event_log: Option<PathBuf>,
    /// The program that every worker runs.
    pub command: WorkerCommand,
    /// Draw a progress bar from the heartbeats of rank 0 (stderr is a terminal, the worker is native).
    pub progress_bar: bool,
}

/// Cores that a worker may run on, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CoreSet(pub std::collections::BTreeSet<usize>);

/// What signals to the launcher mean, by number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignalPlan {
    /// `--signals-to-handle`: the workers are stopped, and the launcher ends with 128 + signal.
    pub stop: Vec<i32>,
    /// `--forward-signals`: each worker gets it, and goes on.
    pub forward: Vec<i32>,
    /// `--signal-scope`: the processes that get the signal that stops a worker.
    pub scope: SignalScope,
}

/// The processes of a worker that get its stop signal. SIGKILL always goes to all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SignalScope {
    /// Its process group: itself and its children, such as data loaders.
    #[default]
    Group,
    /// Itself. Its children live until it has ended, or its grace has.
    Rank,
}

impl Default for SignalPlan {
    fn default() -> Self {
        Self {
            stop: vec![libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT],
            forward: Vec::new(),
            scope: SignalScope::default(),
        }
    }
}

/// `--nnodes N` or `--nnodes MIN:MAX`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRange {
    /// Fewest nodes of a job.
    pub min: u32,
    /// Most nodes of a job.
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
    /// How people call it: `train.yaml`, `train.py`, `true`.
    pub display_name: String,
    /// True for the native worker, which stops at a step boundary when asked through the control socket.
    pub native: bool,
    /// The agent of node 0 hosts PyTorch's store for it at `MASTER_PORT`; otherwise the port is free for rank 0.
    pub agent_store: bool,
    /// `$local_rank` and `${local_rank}` in `args` are replaced for each worker, as torchrun does.
    pub macros: bool,
}
