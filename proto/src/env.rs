//! The environment contract between agent and worker, torchrun's plus variables of our own.
//!
//! This file is the only one that writes or parses these variables.

use std::collections::BTreeMap;
use std::str::FromStr;

use crate::ids::{Generation, GlobalRank, LocalRank, NodeRank, WorldSize};
use crate::ports::PortRange;

/// Address of the control socket: `@name` is an abstract Unix address.
pub const DDP_CONTROL: &str = "DDP_CONTROL";
/// Generation that the worker belongs to.
pub const DDP_GENERATION: &str = "DDP_GENERATION";
/// Random name of this run of the job, which its restarts share and a later run under the same run id does not.
pub const DDP_RUN_TOKEN: &str = "DDP_RUN_TOKEN";
/// Marks every process of one launcher, so that its guardian finds descendants that made a session of their own.
pub const DDP_JOB_MARKER: &str = "DDP_JOB_MARKER";
/// The true local rank, where `LOCAL_RANK` is 0 for every worker (`--virtual-local-rank`).
pub const DDP_LOCAL_RANK: &str = "DDP_LOCAL_RANK";
/// `--worker-ports`: where native workers listen for those of other nodes.
pub const DDP_WORKER_PORTS: &str = "DDP_WORKER_PORTS";
/// Set to `bar` when the launcher draws the progress bar, so that rank 0 prints no step lines.
pub const DDP_PROGRESS: &str = "DDP_PROGRESS";
/// The token of the job, which no process but the launcher is given.
pub const DDP_TOKEN: &str = "DDP_TOKEN";
/// The file that has it.
pub const DDP_TOKEN_FILE: &str = "DDP_TOKEN_FILE";
/// The file with the token that shows the status page and the names of jobs in metrics, and allows nothing else.
pub const DDP_READ_TOKEN_FILE: &str = "DDP_READ_TOKEN_FILE";
/// What no other process is given, whatever it is started for.
pub const SECRETS: [&str; 3] = [DDP_TOKEN, DDP_TOKEN_FILE, DDP_READ_TOKEN_FILE];
/// How PyTorch writes `TORCHELASTIC_USE_AGENT_STORE`; it takes no other word for true.
const PYTHON_TRUE: &str = "True";
const PYTHON_FALSE: &str = "False";

/// Variables that are never inherited from the launcher's own environment.
pub const SCRUBBED: &[&str] = &[
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_USE_AGENT_STORE",
    DDP_LOCAL_RANK,
    DDP_CONTROL,
    DDP_GENERATION,
    DDP_RUN_TOKEN,
    DDP_JOB_MARKER,
    DDP_WORKER_PORTS,
    DDP_PROGRESS,
    DDP_TOKEN,
    DDP_TOKEN_FILE,
    DDP_READ_TOKEN_FILE,
];

/// A worker's place in the job and how to reach its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerEnv {
    /// `RANK`
    pub rank: GlobalRank,
    /// `LOCAL_RANK`
    pub local_rank: LocalRank,
    /// `GROUP_RANK`
    pub node_rank: NodeRank,
    /// `WORLD_SIZE`
    pub world_size: WorldSize,
    /// `LOCAL_WORLD_SIZE`
    pub local_world_size: u32,
    /// `GROUP_WORLD_SIZE`
    pub node_count: u32,
    /// `ROLE_NAME`
    pub role: String,
    /// `ROLE_RANK`: rank among the workers of the same role.
    pub role_rank: u32,
    /// `ROLE_WORLD_SIZE`: number of workers of the same role.
    pub role_world_size: u32,
    /// `MASTER_ADDR`
    pub master_addr: String,
    /// `MASTER_PORT`
    pub master_port: u16,
    /// `TORCHELASTIC_RESTART_COUNT`
    pub restart_count: u32,
    /// `TORCHELASTIC_MAX_RESTARTS`
    pub max_restarts: u32,
    /// `TORCHELASTIC_RUN_ID`
    pub run_id: String,
    /// `TORCHELASTIC_USE_AGENT_STORE`: the agent of node 0 hosts PyTorch's store at `MASTER_PORT`, so rank 0 does not.
    pub agent_store: bool,
    /// `DDP_RUN_TOKEN`; none under another launcher.
    pub run_token: Option<String>,
    /// `TORCHELASTIC_ERROR_FILE`; none when the worker was not started by an agent.
    pub error_file: Option<String>,
    /// `DDP_GENERATION`
    pub generation: Generation,
    /// `DDP_CONTROL`; none when the worker was started by hand or by another launcher.
    pub control: Option<String>,
    /// `DDP_WORKER_PORTS`; none: any free port.
    pub worker_ports: Option<PortRange>,
}

/// A variable of the contract is missing or malformed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvError {
    /// Not set at all.
    #[error("environment variable `{0}` is not set\n  hint: start the program with `ddp-run`, which sets it")]
    Missing(&'static str),
    /// Set to something that cannot be read.
    #[error("environment variable `{name}` is `{value}`, expected {expected}")]
    Malformed {
        /// Name of the variable.
        name: &'static str,
        /// What it is set to.
        value: String,
        /// What it should look like.
        expected: &'static str,
    },
    /// Two variables contradict each other.
    #[error("environment variables contradict each other: {0}")]
    Inconsistent(String),
}

impl WorkerEnv {
    /// The place of a program that was started alone, without a launcher.
    pub fn single() -> Self {
        Self {
            world_size: WorldSize(1),
            local_world_size: 1,
            node_count: 1,
            role: "default".into(),
            role_world_size: 1,
            master_addr: "127.0.0.1".into(),
            run_id: "single".into(),
            generation: Generation(1),
            ..Self::default()
        }
    }

    /// The variables as the agent sets them.
    pub fn to_vars(&self) -> BTreeMap<String, String> {
        let mut vars = BTreeMap::new();
        let mut set = |name: &str, value: String| {
            vars.insert(name.to_owned(), value);
        };
        set("RANK", self.rank.to_string());
        set("LOCAL_RANK", self.local_rank.to_string());
        set("GROUP_RANK", self.node_rank.to_string());
        set("ROLE_RANK", self.role_rank.to_string());
        set("ROLE_NAME", self.role.clone());
        set("WORLD_SIZE", self.world_size.to_string());
        set("LOCAL_WORLD_SIZE", self.local_world_size.to_string());
        set("GROUP_WORLD_SIZE", self.node_count.to_string());
        set("ROLE_WORLD_SIZE", self.role_world_size.to_string());
        set("MASTER_ADDR", self.master_addr.clone());
        set("MASTER_PORT", self.master_port.to_string());
        set("TORCHELASTIC_RESTART_COUNT", self.restart_count.to_string());
        set("TORCHELASTIC_MAX_RESTARTS", self.max_restarts.to_string());
        set("TORCHELASTIC_RUN_ID", self.run_id.clone());
        let agent_store = if self.agent_store {
            PYTHON_TRUE
        } else {
            PYTHON_FALSE
        };
        set("TORCHELASTIC_USE_AGENT_STORE", agent_store.into());
        if let Some(file) = &self.error_file {
            set("TORCHELASTIC_ERROR_FILE", file.clone());
        }
        set(DDP_GENERATION, self.generation.to_string());
        if let Some(token) = &self.run_token {
            set(DDP_RUN_TOKEN, token.clone());
        }
        if let Some(control) = &self.control {
            set(DDP_CONTROL, control.clone());
        }
        if let Some(ports) = self.worker_ports {
            set(DDP_WORKER_PORTS, ports.to_string());
        }
        vars
    }

    /// Reads the contract through `get`, usually `|name| std::env::var(name).ok()`.
    ///
    /// `DDP_GENERATION`, `DDP_CONTROL`, `GROUP_*` and `TORCHELASTIC_*` may be missing, so that a worker
    /// also starts under another launcher.
    pub fn parse(get: impl Fn(&str) -> Option<String>) -> Result<Self, EnvError> {
        let number = |name| -> Result<Option<u32>, EnvError> { parsed(name, get(name), "a whole number") };
        let required = |name: &'static str| number(name).and_then(|n| n.ok_or(EnvError::Missing(name)));

        let master_port = parsed("MASTER_PORT", get("MASTER_PORT"), "a port below 65536")?;
        let (rank, world_size) = (required("RANK")?, required("WORLD_SIZE")?);
        let env = Self {
            rank: GlobalRank(rank),
            local_rank: LocalRank(required("LOCAL_RANK")?),
            node_rank: NodeRank(number("GROUP_RANK")?.unwrap_or(0)),
            world_size: WorldSize(world_size),
            local_world_size: required("LOCAL_WORLD_SIZE")?,
            node_count: number("GROUP_WORLD_SIZE")?.unwrap_or(1),
            role: get("ROLE_NAME").unwrap_or_else(|| "default".into()),
            role_rank: number("ROLE_RANK")?.unwrap_or(rank),
            role_world_size: number("ROLE_WORLD_SIZE")?.unwrap_or(world_size),
            master_addr: get("MASTER_ADDR").ok_or(EnvError::Missing("MASTER_ADDR"))?,
            master_port: master_port.ok_or(EnvError::Missing("MASTER_PORT"))?,
            restart_count: number("TORCHELASTIC_RESTART_COUNT")?.unwrap_or(0),
            max_restarts: number("TORCHELASTIC_MAX_RESTARTS")?.unwrap_or(0),
            run_id: get("TORCHELASTIC_RUN_ID").unwrap_or_else(|| "none".into()),
            agent_store: get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == PYTHON_TRUE),
            run_token: get(DDP_RUN_TOKEN),
            error_file: get("TORCHELASTIC_ERROR_FILE"),
            generation: Generation(u64::from(number(DDP_GENERATION)?.unwrap_or(1))),
            control: get(DDP_CONTROL),
            worker_ports: parsed(DDP_WORKER_PORTS, get(DDP_WORKER_PORTS), "`FIRST-LAST`")?,
        };
        env.check()?;
        Ok(env)
    }

    fn check(&self) -> Result<(), EnvError> {
        let (ranks, local_ranks) = (self.world_size.0, self.local_world_size);
        let conflict = |name, value: u32, bound, most: u32| {
            let words = format!("`{name}` is {value}, but `{bound}` is {most}");
            Err(EnvError::Inconsistent(words))
        };
        if self.rank.0 >= ranks {
            return conflict("RANK", self.rank.0, "WORLD_SIZE", ranks);
        }
        if local_ranks > ranks {
            return conflict("LOCAL_WORLD_SIZE", local_ranks, "WORLD_SIZE", ranks);
        }
        if self.local_rank.0 >= local_ranks {
            return conflict("LOCAL_RANK", self.local_rank.0, "LOCAL_WORLD_SIZE", local_ranks);
        }
        Ok(())
    }
}

/// The value of a variable that may be missing.
fn parsed<T: FromStr>(
    name: &'static str,
    value: Option<String>,
    expected: &'static str,
) -> Result<Option<T>, EnvError> {
    let parse = |value: String| {
        value.parse().map_err(|_| EnvError::Malformed {
            name,
            value,
            expected,
        })
    };
    value.map(parse).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_agent_writes_the_worker_reads() {
        let mut env = WorkerEnv::single();
        env.rank = GlobalRank(3);
        env.local_rank = LocalRank(1);
        env.node_rank = NodeRank(1);
        env.world_size = WorldSize(4);
        env.local_world_size = 2;
        env.node_count = 2;
        env.master_port = 29_500;
        env.agent_store = true;
        env.generation = Generation(7);
        env.control = Some("@ddp-x".into());
        env.error_file = Some("/tmp/e.json".into());
        env.worker_ports = Some("29500-29600".parse().unwrap());
        let vars = env.to_vars();
        assert_eq!(WorkerEnv::parse(|n| vars.get(n).cloned()), Ok(env));
        for name in vars.keys() {
            assert!(SCRUBBED.contains(&name.as_str()), "`{name}` would be inherited");
        }
    }

    #[test]
    fn errors_name_the_variable() {
        let vars = WorkerEnv::single().to_vars();
        let without = |gone: &'static str| {
            let vars = vars.clone();
            move |n: &str| (n != gone).then(|| vars.get(n).cloned()).flatten()
        };
        assert_eq!(WorkerEnv::parse(without("RANK")), Err(EnvError::Missing("RANK")));
        let error = WorkerEnv::parse(|n| {
            if n == "RANK" {
                Some("x".into())
            } else {
                without("")(n)
            }
        });
        assert!(matches!(error, Err(EnvError::Malformed { name: "RANK", .. })));
        let error = WorkerEnv::parse(|n| {
            if n == "RANK" {
                Some("9".into())
            } else {
                without("")(n)
            }
        });
        assert!(matches!(error, Err(EnvError::Inconsistent(_))));
    }
}
