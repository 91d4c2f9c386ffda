//! The settings that a launch can be given, and the layers that they come from.
//!
//! Precedence: command line, then `PET_<NAME>` (the names that torchrun reads), then the `launch` section of the YAML,
//! then the batch system, then defaults. A layer is one [`Settings`] with holes; [`Settings::or`] fills the holes of a
//! layer from the one below.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use ddp_launcher::{NodeRange, PrefixTemplate, SignalScope, StreamsByRank};
use ddp_proto::ports::PortRange;
use serde::Deserialize;
use serde_saphyr::Spanned;

use super::streams::{self, OutputStyle, Signals, Words};
use crate::cli::error::CliError;
use crate::cli::machine::numa::Binding;
use crate::cli::values::{self, Endpoint, EventLog, ProcCount, RdzvConf};

/// Variables that are read beside `PET_<NAME>`, torchrun's and one for administrators, with the settings that they give.
const OTHER_VARIABLES: [(&str, &str); 3] = [
    ("metrics_file", "DDP_METRICS_FILE"),
    (
        "log_line_prefix_template",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
    ),
    ("shutdown_timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
];

/// Headings of `--help`.
const NODES: &str = "Nodes and ranks";
const WORKERS: &str = "Workers";
const LIFE: &str = "Failures and shutdown";
const OUTPUT: &str = "Output";

/// Declares [`Settings`]: the name of each setting as the YAML spells it, its type, how its text is read, its help, and
/// after `=>` the variables of a worker that it decides. `--dry-run` has a row for each setting that is given.
macro_rules! settings {
    ($($(#[$meta:meta])* $name:ident: $type:ty = $parse:path $(=> $($variable:literal)+)?,)*) => {
        /// One layer: what one source says, and nothing where it is silent.
        #[derive(Clone, Debug, Default, PartialEq, clap::Args)]
        pub struct Settings {
            $($(#[$meta])* #[arg(long, value_parser = $parse)] pub $name: Option<$type>,)*

            /// Text of each setting, as typed.
            #[arg(skip)]
            pub(in crate::cli) words: BTreeMap<&'static str, String>,
        }

        /// Names of all settings, as the YAML spells them; `PET_<NAME>` and `--<name>` follow from them.
        pub const NAMES: &[&str] = &[$(stringify!($name)),*];

        /// Variables of a worker, each with the setting that decides it.
        pub(in crate::cli) const DECIDED: &[(&str, &str)] = &[$($($(($variable, stringify!($name)),)+)?)*];

        impl Settings {
            /// Gives the setting called `name` (with `_` or `-`) the value that `text` stands for.
            pub(in crate::cli) fn set(&mut self, name: &str, text: &str) -> Result<(), String> {
                let name = match name.replace('-', "_").as_str() {
                    $(stringify!($name) => {
                        self.$name = Some($parse(text)?);
                        stringify!($name)
                    })*
                    unknown => return Err(unknown_key(unknown)),
                };
                self.words.insert(name, text.to_owned());
                Ok(())
            }

            /// This layer, its holes filled from the `lower` one.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                // Of two words of one setting, the later ones are kept.
                let words = lower.words.into_iter().chain(self.words).collect();
                Self { $($name: self.$name.or(lower.$name),)* words }
            }

            /// Names of the settings that this layer gives.
            pub fn given(&self) -> impl Iterator<Item = &'static str> {
                [$(self.$name.is_some().then_some(stringify!($name))),*].into_iter().flatten()
            }
        }
    };
}

settings! {
    /// Number of nodes or range [default: 1]
    ///
    /// With MIN:MAX, nodes may join and leave while the job runs, within this range.
    #[arg(value_name = "N|MIN:MAX", help_heading = NODES, allow_negative_numbers = true)]
    nnodes: NodeRange = values::node_range,

    /// Workers on this node [default: 1]
    ///
    /// A number, or one worker per `gpu` or per `cpu` core; `auto` is `gpu` if the node has GPUs, else `cpu`.
    #[arg(value_name = "N|auto|cpu|gpu", help_heading = NODES, allow_negative_numbers = true)]
    nproc_per_node: ProcCount = values::proc_count => "LOCAL_WORLD_SIZE",

    /// Rendezvous address [port: 29400]
    ///
    /// Required for several nodes. Write IPv6 addresses in brackets. Port 0 picks a free port, for one node only.
    #[arg(value_name = "HOST[:PORT]", help_heading = NODES)]
    rdzv_endpoint: Endpoint = values::endpoint,

    /// Name of the job, the same on all nodes
    ///
    /// [default: `none`; for one node, the time and a random part]
    #[arg(value_name = "ID", help_heading = NODES)]
    rdzv_id: String = values::job_id => "TORCHELASTIC_RUN_ID",

    /// Rendezvous options: `is_host=BOOL`, `join_timeout=S` (600), `connect_timeout=S` (60), `outage_timeout=S`
    /// (600), `takeover_timeout=S` (15), `last_call_timeout=S` (10)
    #[arg(value_name = "KEY=VALUE[,...]", help_heading = NODES, hide_short_help = true)]
    rdzv_conf: RdzvConf = values::rdzv_conf,

    /// `c10d`, `static` or `grpc`: accepted, but all use the rendezvous of ddp-run
    #[arg(value_name = "NAME", help_heading = NODES, hide_short_help = true)]
    rdzv_backend: String = values::backend,

    /// Node rank [default: by host name]
    ///
    /// Without it, node ranks follow the order of the host names.
    #[arg(value_name = "N", help_heading = NODES, allow_negative_numbers = true)]
    node_rank: u32 = values::whole => "GROUP_RANK",

    /// Run on this node only
    ///
    /// The node hosts its own rendezvous. Overrides node settings from `PET_*` variables, the YAML and Slurm.
    #[arg(num_args = 0, default_missing_value = "true", help_heading = NODES)]
    standalone: bool = values::boolean,

    /// Do without the token and TLS between nodes
    ///
    /// Every host that reaches the rendezvous can then join jobs, read their data and stop them. Needed on all nodes.
    #[arg(num_args = 0, default_missing_value = "true", help_heading = NODES, hide_short_help = true)]
    insecure: bool = values::boolean,

    /// Address at which the other nodes reach this one [default: the one that the rendezvous sees]
    #[arg(value_name = "ADDR", help_heading = NODES, hide_short_help = true)]
    local_addr: String = values::local_addr,

    /// MASTER_ADDR for the workers; without `--rdzv-endpoint`, also the rendezvous address
    #[arg(value_name = "ADDR", help_heading = NODES, hide_short_help = true)]
    master_addr: String = values::local_addr => "MASTER_ADDR",

    /// MASTER_PORT for the workers [default: a free port, a new one at each restart]
    #[arg(value_name = "PORT", help_heading = NODES, hide_short_help = true, allow_negative_numbers = true)]
    master_port: u16 = values::port => "MASTER_PORT",

    /// Ports at which workers of several nodes meet, for firewalls [default: any free ports]
    ///
    /// Each native worker listens at one of them for those of other nodes. For programs, MASTER_PORT is one of them,
    /// unless `--master-port` is given. Ports that are taken are skipped.
    #[arg(value_name = "FIRST-LAST", help_heading = NODES, hide_short_help = true, allow_negative_numbers = true)]
    worker_ports: PortRange = values::port_range => "DDP_WORKER_PORTS",

    /// Restarts after failures [default: 0, YAML: 3]
    ///
    /// How many times in a row the whole job may restart after a worker fails; training progress resets the count. YAML
    /// targets default to 3.
    #[arg(value_name = "N", help_heading = LIFE, allow_negative_numbers = true)]
    max_restarts: u32 = values::whole => "TORCHELASTIC_MAX_RESTARTS",

    /// Seconds from SIGTERM to SIGKILL [default: 30]
    ///
    /// The time that workers get to exit on their own when they are stopped.
    #[arg(value_name = "S", help_heading = LIFE, allow_negative_numbers = true)]
    shutdown_timeout: Duration = values::seconds,

    /// Fail a worker after this many seconds without progress [default: 0, never]
    ///
    /// Only workers that send heartbeats are watched.
    #[arg(value_name = "S", help_heading = LIFE, hide_short_help = true, allow_negative_numbers = true)]
    hang_timeout: Duration = values::seconds,

    /// Signals that stop the job [default: SIGTERM,SIGINT,SIGHUP,SIGQUIT]
    #[arg(value_name = "SIG[,...]", help_heading = LIFE, hide_short_help = true)]
    signals_to_handle: Signals = streams::signals,

    /// Signals to pass on to each worker without stopping the job
    #[arg(value_name = "SIG[,...]", help_heading = LIFE, hide_short_help = true)]
    forward_signals: Signals = streams::signals,

    /// Processes that get a worker's stop signal: its process `group`, or the `rank` process alone [default: group]
    ///
    /// With `rank`, the children of a worker, such as PyTorch's data loaders, live until it has exited.
    #[arg(value_name = "group|rank", help_heading = LIFE, hide_short_help = true)]
    signal_scope: SignalScope = streams::signal_scope,

    /// TARGET is a Python module, run by `python3 -u -m`
    #[arg(short = 'm', num_args = 0, default_missing_value = "true", help_heading = WORKERS)]
    module: bool = values::boolean,

    /// Run TARGET directly, even if it ends with `.py`
    #[arg(num_args = 0, default_missing_value = "true", help_heading = WORKERS)]
    no_python: bool = values::boolean,

    /// Role name of the workers on this node; ROLE_RANK counts per role [default: default]
    #[arg(value_name = "NAME", help_heading = WORKERS, hide_short_help = true)]
    role: String = values::role => "ROLE_NAME",

    /// Give every worker LOCAL_RANK 0 and only its own GPU; DDP_LOCAL_RANK has the real local rank
    #[arg(num_args = 0, default_missing_value = "true", help_heading = WORKERS, hide_short_help = true)]
    virtual_local_rank: bool = values::boolean => "CUDA_VISIBLE_DEVICES" "DDP_LOCAL_RANK",

    /// Bind each worker to cores near its GPU: all cores of its NUMA node, of its CPU socket, an exclusive share of the
    /// NUMA node's cores, or the cores of one cache [default: node for native workers on GPUs]
    #[arg(value_name = "node|socket|exclusive|core-complex", help_heading = WORKERS, hide_short_help = true)]
    numa_binding: Binding = values::binding,

    /// Write worker output to this directory
    ///
    /// [default for YAML targets: `logs` in the run's directory]
    #[arg(value_name = "DIR", help_heading = OUTPUT)]
    log_dir: PathBuf = values::path,

    /// To files only: 1 stdout, 2 stderr, 3 both
    ///
    /// 0 is neither. N applies to all workers, RANK:N to one local rank.
    #[arg(short = 'r', value_name = "N|RANK:N[,...]", help_heading = OUTPUT)]
    redirects: StreamsByRank = streams::streams_by_rank,

    /// To files and the console, numbers as above
    #[arg(short = 't', value_name = "N|RANK:N[,...]", help_heading = OUTPUT)]
    tee: StreamsByRank = streams::streams_by_rank,

    /// Show only these local ranks on the console
    #[arg(value_name = "RANK[,...]", help_heading = OUTPUT, hide_short_help = true)]
    local_ranks_filter: BTreeSet<u32> = streams::ranks,

    /// Show only these ranks of the job on the console
    #[arg(value_name = "RANK[,...]", help_heading = OUTPUT, hide_short_help = true)]
    global_ranks_filter: BTreeSet<u32> = streams::ranks,

    /// `prefixed` lines of all ranks, or the `raw` bytes of one [default: prefixed]
    ///
    /// With `raw`, one rank is given the standard output and error of ddp-run: there is no prefix, and no byte changes.
    /// With several ranks, `--local-ranks-filter` chooses one.
    #[arg(value_name = "prefixed|raw", help_heading = OUTPUT, hide_short_help = true)]
    output: OutputStyle = streams::output_style,

    /// Prefix of each line: text with `${rank}`, `${local_rank}`, `${role_name}`, `${hostname}`, `${time}` (in
    /// log files too) [default: `[${rank}] `]
    #[arg(value_name = "TEMPLATE", help_heading = OUTPUT, hide_short_help = true)]
    log_line_prefix_template: PrefixTemplate = values::prefix_template,

    /// Begin a log file anew at this size, and keep its predecessor as `.1` [default: no limit]
    #[arg(value_name = "N", help_heading = OUTPUT, hide_short_help = true, allow_negative_numbers = true)]
    log_max_mb: NonZeroU32 = values::one_or_more::<NonZeroU32>,

    /// Also copy stdout lines with one of these words to `filtered_stdout.log`; write a comma in a word as `,,`
    #[arg(value_name = "WORD[,...]", help_heading = OUTPUT, hide_short_help = true)]
    duplicate_stdout_filters: Words = streams::words,

    /// Also copy stderr lines with one of these words to `filtered_stderr.log`; write a comma in a word as `,,`
    #[arg(value_name = "WORD[,...]", help_heading = OUTPUT, hide_short_help = true)]
    duplicate_stderr_filters: Words = streams::words,

    /// Append events as JSON lines to this file; or `console`, or `null`
    #[arg(value_name = "FILE", help_heading = OUTPUT, hide_short_help = true)]
    event_log_handler: EventLog = values::event_log,

    /// Keep the job's metrics in this file, for the textfile collector of node_exporter
    ///
    /// The node that hosts the rendezvous writes it every 15 s, and removes it at the end. `%j` in the name is the job's
    /// name. DDP_METRICS_FILE gives it too.
    #[arg(value_name = "FILE", help_heading = OUTPUT, hide_short_help = true)]
    metrics_file: PathBuf = values::path,

    /// Show the job at this port of this machine, in a browser
    ///
    /// Only on the node that hosts the rendezvous, and only for connections from that machine: `http://localhost:PORT/`.
    #[arg(value_name = "PORT", help_heading = OUTPUT, hide_short_help = true, allow_negative_numbers = true)]
    status_port: u16 = values::port,

    /// Accepted: deaths are never polled for
    #[arg(hide = true)]
    monitor_interval: Duration = values::seconds,

    /// Accepted: workers are always programs of their own
    #[arg(hide = true)]
    start_method: String = values::text,

    /// Accepted: a script always runs as `__main__` of its own interpreter
    #[arg(hide = true, num_args = 0, default_missing_value = "true")]
    run_path: bool = values::boolean,

    /// Accepted: workers find their rank in the environment anyway
    #[arg(hide = true, num_args = 0, default_missing_value = "true")]
    use_env: bool = values::boolean,

    /// Accepted: there is one layout of log files
    #[arg(hide = true)]
    logs_specs: String = values::text,
}

impl Settings {
    /// Keeps the words that a command line has for the settings that it gives.
    pub(in crate::cli) fn keep_words(&mut self, line: &clap::ArgMatches) {
        let given: Vec<_> = self.given().collect();
        let words = |name| Some(line.get_raw(name)?.next_back()?.to_string_lossy().into_owned());
        self.words = (given.into_iter())
            .filter_map(|name| Some((name, words(name)?)))
            .collect();
    }

    /// The `PET_*` variables. Those of torchrun that this program has no use for are left alone, because
    /// operators of clusters set them for everybody.
    pub fn from_env(get: impl Fn(&str) -> Option<String>) -> Result<Self, CliError> {
        let mut settings = Self::default();
        for name in NAMES {
            let Some((variable, value)) = variable(name, &get) else {
                continue;
            };
            settings
                .set(name, &value)
                .map_err(|message| CliError::bad_variable(&variable, &value, &message))?;
        }
        Ok(settings)
    }

    /// The `launch` section of `text`, the contents of `file`. Other sections are the worker's business.
    pub fn from_yaml(file: &std::path::Path, text: &str) -> Result<Self, CliError> {
        let document: Document = serde_saphyr::from_str(text)
            .map_err(|error| CliError::Config(format!("{}: {error}", file.display())))?;
        let mut settings = Self::default();
        for (key, value) in document.launch.unwrap_or_default() {
            let line = value.defined.line();
            let refused = |problem: String| {
                CliError::Config(format!("{}:{line}: `launch.{key}`{problem}", file.display()))
            };
            if !NAMES.contains(&key.replace('-', "_").as_str()) {
                return Err(refused(format!(": {}", unknown_key(&key))));
            }
            let text = scalar(&value.value)
                .map_err(|found| refused(format!(" is {found}, expected a single value, as for the flag")))?;
            settings
                .set(&key, &text)
                .map_err(|message| refused(format!(" is `{text}`: {message}")))?;
        }
        Ok(settings)
    }
}

/// The variable that gives this setting, and its value: `PET_<NAME>`, or another name of it.
pub(in crate::cli) fn variable(name: &str, get: impl Fn(&str) -> Option<String>) -> Option<(String, String)> {
    let own = format!("PET_{}", name.to_ascii_uppercase());
    let other = OTHER_VARIABLES.iter().find(|(setting, _)| *setting == name);
    let given = |name: String| {
        let value = get(&name).filter(|value| !value.is_empty())?;
        Some((name, value))
    };
    given(own).or_else(|| given(other?.1.to_owned()))
}

fn unknown_key(name: &str) -> String {
    match nearest(name, NAMES.iter().copied()) {
        Some(known) => format!("unknown key, did you mean `{known}`?"),
        None => "unknown key; the keys are the flags of `ddp-run --help`".to_owned(),
    }
}

/// The one of `known` that `name` is most likely a misspelling of.
pub(in crate::cli) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let distances = known.map(|known| (strsim::damerau_levenshtein(known, name), known));
    let (distance, near) = distances.min()?;
    (distance <= (name.chars().count() / 3).max(1)).then_some(near)
}

/// The part of a train.yaml that concerns the launcher.
#[derive(Deserialize)]
struct Document {
    launch: Option<std::collections::BTreeMap<String, Spanned<serde_json::Value>>>,
}

/// One plain value of the YAML as the text that a flag would have; otherwise what it is instead.
fn scalar(value: &serde_json::Value) -> Result<String, &'static str> {
    match value {
        serde_json::Value::String(text) => Ok(text.clone()),
        serde_json::Value::Number(number) => Ok(number.to_string()),
        serde_json::Value::Bool(flag) => Ok(flag.to_string()),
        serde_json::Value::Null => Err("empty"),
        serde_json::Value::Array(_) => Err("a list"),
        serde_json::Value::Object(_) => Err("a section"),
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
        insta::assert_snapshot!(error, @"environment variable `PET_NNODES` is `0:1`: expected `N` or `MIN:MAX` with 1 <= MIN <= MAX <= 16384, for example `2` or `1:4`");
        let get = |name: &str| (name == "PET_NPROC_PER_NODE").then(|| "4".to_owned());
        let settings = Settings::from_env(get).expect("valid");
        assert_eq!(settings.nproc_per_node, Some(ProcCount::Fixed(4)));
    }

    #[test]
    fn torchruns_variables_are_read() {
        let get = |name: &str| match name {
            "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE" => Some("${rank}: ".to_owned()),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" => Some("7".to_owned()),
            _ => None,
        };
        let settings = Settings::from_env(get).expect("valid");
        assert_eq!(
            settings.log_line_prefix_template,
            Some(PrefixTemplate::new("${rank}: "))
        );
        assert_eq!(settings.shutdown_timeout, Some(Duration::from_secs(7)));
        let both = |name: &str| name.ends_with("SHUTDOWN_TIMEOUT").then(|| name.to_owned());
        let (name, _) = variable("shutdown_timeout", both).expect("given");
        assert_eq!(name, "PET_SHUTDOWN_TIMEOUT", "the general rule goes first");
    }

    #[test]
    fn the_launch_section_is_read_like_flags() {
        let text =
            "model: {kind: mlp}\nlaunch:\n  nproc_per_node: 2\n  max-restarts: 5\n  rdzv_endpoint: node0\n";
        let settings = Settings::from_yaml(Path::new("t.yaml"), text).expect("valid");
        assert_eq!(settings.nproc_per_node, Some(ProcCount::Fixed(2)));
        assert_eq!(settings.max_restarts, Some(5));
        let text = "launch:\n  nproc_per_node: 2\n  nnode: 5\n";
        let error = Settings::from_yaml(Path::new("t.yaml"), text).expect_err("unknown key");
        insta::assert_snapshot!(error, @"t.yaml:3: `launch.nnode`: unknown key, did you mean `nnodes`?");
    }
}
