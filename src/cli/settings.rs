//! The settings that a launch can be given, and the layers that they come from.
//!
//! Precedence: command line, then `PET_<NAME>` (the names that torchrun reads), then the `launch` section
//! of the YAML, then the batch system, then defaults. A layer is one [`Settings`] with holes; [`Settings::or`] fills the holes
//! of a layer from the one below.

use std::path::PathBuf;
use std::time::Duration;

use ddp_launcher::NodeRange;
use serde::Deserialize;
use serde_saphyr::Spanned;

use super::error::CliError;
use super::values::{self, Endpoint, ProcCount, RdzvConf};

/// One layer: what one source says, and nothing where it is silent.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// `--nnodes`
    pub nnodes: Option<NodeRange>,
    /// `--nproc-per-node`
    pub nproc_per_node: Option<ProcCount>,
    /// `--rdzv-endpoint`
    pub rdzv_endpoint: Option<Endpoint>,
    /// `--rdzv-id`
    pub rdzv_id: Option<String>,
    /// `--rdzv-conf`
    pub rdzv_conf: Option<RdzvConf>,
    /// `--node-rank`
    pub node_rank: Option<u32>,
    /// `--standalone`
    pub standalone: Option<bool>,
    /// `--max-restarts`
    pub max_restarts: Option<u32>,
    /// `--log-dir`
    pub log_dir: Option<PathBuf>,
    /// `--local-addr`
    pub local_addr: Option<String>,
    /// `--shutdown-timeout`
    pub shutdown_timeout: Option<Duration>,
}

/// Names of all settings, as the YAML spells them; `PET_<NAME>` and `--<name>` follow from them.
pub const NAMES: &[&str] = &[
    "nnodes",
    "nproc_per_node",
    "rdzv_endpoint",
    "rdzv_id",
    "rdzv_conf",
    "node_rank",
    "standalone",
    "max_restarts",
    "log_dir",
    "local_addr",
    "shutdown_timeout",
];

/// Settings of batch systems, the one that is believed last of each kind.
const SCHEDULERS: &[(&str, &str)] = &[
    ("nnodes", "SLURM_NNODES"),
    ("node_rank", "JOB_COMPLETION_INDEX"),
    ("node_rank", "SLURM_NODEID"),
];

impl Settings {
    /// Gives the setting called `name` (with `_` or `-`) the value that `text` stands for.
    fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
        match name.replace('-', "_").as_str() {
            "nnodes" => self.nnodes = Some(values::node_range(text)?),
            "nproc_per_node" => self.nproc_per_node = Some(values::proc_count(text)?),
            "rdzv_endpoint" => self.rdzv_endpoint = Some(values::endpoint(text)?),
            "rdzv_id" => self.rdzv_id = Some(values::job_id(text)?),
            "rdzv_conf" => self.rdzv_conf = Some(values::rdzv_conf(text)?),
            "node_rank" => self.node_rank = Some(values::whole(text)?),
            "standalone" => self.standalone = Some(values::boolean(text)?),
            "max_restarts" => self.max_restarts = Some(values::whole(text)?),
            "log_dir" => self.log_dir = Some(PathBuf::from(text)),
            "local_addr" => self.local_addr = Some(values::local_addr(text)?),
            "shutdown_timeout" => self.shutdown_timeout = Some(values::seconds(text)?),
            _ => return Err(format!("unknown key, known are `{}`", NAMES.join("`, `"))),
        }
        Ok(())
    }

    /// Number and rank of the nodes as Slurm or Kubernetes tells them, for a job that has a place to meet. Without one
    /// it runs on this node alone, whatever else the batch system has allocated. A rank that the number of nodes does
    /// not allow belongs to something else, and is left alone.
    pub fn or_from_scheduler(self, get: impl Fn(&str) -> Option<String>) -> Result<Self, CliError> {
        if self.rdzv_endpoint.is_none() || self.standalone == Some(true) {
            return Ok(self);
        }
        let mut scheduler = Self::default();
        for (name, variable) in SCHEDULERS {
            let value = get(variable).filter(|value| !value.is_empty());
            if let Some(value) = value {
                scheduler
                    .set(name, &value)
                    .map_err(|message| CliError::BadVariable {
                        variable: (*variable).to_owned(),
                        value,
                        message,
                    })?;
            }
        }
        let nodes = self.nnodes.or(scheduler.nnodes).map_or(1, |nodes| nodes.max);
        scheduler.node_rank = scheduler.node_rank.filter(|rank| *rank < nodes);
        Ok(self.or(scheduler))
    }

    /// The `PET_*` variables. Those of torchrun that this program has no use for are left alone, because
    /// operators of clusters set them for everybody.
    pub fn from_env(get: impl Fn(&str) -> Option<String>) -> Result<Self, CliError> {
        let mut settings = Self::default();
        for name in NAMES {
            let variable = format!("PET_{}", name.to_ascii_uppercase());
            let Some(value) = get(&variable).filter(|value| !value.is_empty()) else {
                continue;
            };
            settings
                .set(name, &value)
                .map_err(|message| CliError::BadVariable {
                    variable,
                    value,
                    message,
                })?;
        }
        Ok(settings)
    }

    /// The `launch` section of `text`, the contents of `file`. Other sections are the worker's business.
    pub fn from_yaml(file: &std::path::Path, text: &str) -> Result<Self, CliError> {
        let document: Document = serde_saphyr::from_str(text).map_err(|error| CliError::Yaml {
            file: file.to_owned(),
            message: error.to_string(),
        })?;
        let mut settings = Self::default();
        for (key, value) in document.launch.unwrap_or_default() {
            let line = value.defined.line();
            scalar(&value.value)
                .and_then(|text| settings.set(&key, &text))
                .map_err(|message| CliError::BadLaunchKey {
                    file: file.to_owned(),
                    line,
                    key,
                    message,
                })?;
        }
        Ok(settings)
    }

    /// This layer, its holes filled from the `lower` one.
    #[must_use]
    pub fn or(self, lower: Self) -> Self {
        Self {
            nnodes: self.nnodes.or(lower.nnodes),
            nproc_per_node: self.nproc_per_node.or(lower.nproc_per_node),
            rdzv_endpoint: self.rdzv_endpoint.or(lower.rdzv_endpoint),
            rdzv_id: self.rdzv_id.or(lower.rdzv_id),
            rdzv_conf: self.rdzv_conf.or(lower.rdzv_conf),
            node_rank: self.node_rank.or(lower.node_rank),
            standalone: self.standalone.or(lower.standalone),
            max_restarts: self.max_restarts.or(lower.max_restarts),
            log_dir: self.log_dir.or(lower.log_dir),
            local_addr: self.local_addr.or(lower.local_addr),
            shutdown_timeout: self.shutdown_timeout.or(lower.shutdown_timeout),
        }
    }
}

/// The part of a train.yaml that concerns the launcher.
#[derive(Deserialize)]
struct Document {
    launch: Option<std::collections::BTreeMap<String, Spanned<serde_json::Value>>>,
}

/// A YAML scalar as the text that a flag would have.
fn scalar(value: &serde_json::Value) -> Result<String, String> {
    match value {
        serde_json::Value::String(text) => Ok(text.clone()),
        serde_json::Value::Number(number) => Ok(number.to_string()),
        serde_json::Value::Bool(flag) => Ok(flag.to_string()),
        _ => Err("expected one plain value, as the flag takes it".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_name_can_be_set() {
        for name in NAMES {
            let mut settings = Settings::default();
            let error = settings.set(name, "\u{1}").err().unwrap_or_default();
            assert!(
                !error.contains("unknown key"),
                "`{name}` is listed but not settable"
            );
        }
    }

    #[test]
    fn upper_layers_win() {
        let upper = Settings {
            max_restarts: Some(1),
            ..Settings::default()
        };
        let lower = Settings {
            max_restarts: Some(2),
            node_rank: Some(3),
            ..Settings::default()
        };
        let merged = upper.or(lower);
        assert_eq!((merged.max_restarts, merged.node_rank), (Some(1), Some(3)));
    }

    #[test]
    fn variables_are_named_in_errors() {
        let get = |name: &str| (name == "PET_NNODES").then(|| "0:1".to_owned());
        let error = Settings::from_env(get).expect_err("0 nodes");
        insta::assert_snapshot!(error, @"environment variable `PET_NNODES` is `0:1`: expected `N` or `MIN:MAX` with 1 <= MIN <= MAX, for example `2` or `1:4`");
        let get = |name: &str| (name == "PET_NPROC_PER_NODE").then(|| "4".to_owned());
        let settings = Settings::from_env(get).expect("valid");
        assert_eq!(settings.nproc_per_node, Some(ProcCount::Fixed(4)));
    }

    #[test]
    fn the_batch_system_is_asked_last_and_only_where_nodes_meet() {
        let slurm = |name: &str| match name {
            "SLURM_NNODES" => Some("4".to_owned()),
            "SLURM_NODEID" => Some("3".to_owned()),
            _ => None,
        };
        let places = |settings: Settings| {
            let settings = settings.or_from_scheduler(slurm).expect("valid");
            (settings.nnodes.map(|nodes| nodes.max), settings.node_rank)
        };
        let meeting = Settings {
            rdzv_endpoint: values::endpoint("node0").ok(),
            ..Settings::default()
        };
        assert_eq!(places(Settings::default()), (None, None), "one node alone");
        assert_eq!(places(meeting.clone()), (Some(4), Some(3)));
        let standalone = Settings {
            standalone: Some(true),
            ..meeting.clone()
        };
        assert_eq!(places(standalone), (None, None));
        let asked = Settings {
            nnodes: values::node_range("8").ok(),
            node_rank: Some(7),
            ..meeting.clone()
        };
        assert_eq!(places(asked), (Some(8), Some(7)), "flags win");
        let fewer = Settings {
            nnodes: values::node_range("2").ok(),
            ..meeting.clone()
        };
        assert_eq!(places(fewer), (Some(2), None), "rank 3 is none of this job's");
        let kubernetes = |name: &str| (name == "JOB_COMPLETION_INDEX").then(|| "1".to_owned());
        let pair = Settings {
            nnodes: values::node_range("2").ok(),
            ..meeting.clone()
        };
        let settings = pair.or_from_scheduler(kubernetes).expect("valid");
        assert_eq!(settings.node_rank, Some(1));
        let broken = |name: &str| (name == "SLURM_NNODES").then(|| "many".to_owned());
        let error = meeting.or_from_scheduler(broken).expect_err("no number");
        assert!(error.to_string().contains("`SLURM_NNODES` is `many`"), "{error}");
    }

    #[test]
    fn the_launch_section_is_read_like_flags() {
        let text =
            "model: {kind: mlp}\nlaunch:\n  nproc_per_node: 2\n  max-restarts: 5\n  rdzv_endpoint: node0\n";
        let settings = Settings::from_yaml(Path::new("t.yaml"), text).expect("valid");
        assert_eq!(settings.nproc_per_node, Some(ProcCount::Fixed(2)));
        assert_eq!(settings.max_restarts, Some(5));
        let text = "launch:\n  nproc_per_node: 2\n  nodes: 5\n";
        let error = Settings::from_yaml(Path::new("t.yaml"), text).expect_err("unknown key");
        insta::assert_snapshot!(error, @"t.yaml:3: `launch.nodes`: unknown key, known are `nnodes`, `nproc_per_node`, `rdzv_endpoint`, `rdzv_id`, `rdzv_conf`, `node_rank`, `standalone`, `max_restarts`, `log_dir`, `local_addr`, `shutdown_timeout`");
    }
}
