//! Stage one: the command line as it was typed, each value checked by itself. No file, socket or
//! variable is looked at here; that is the business of [`super::plan`].

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgAction, CommandFactory, FromArgMatches, Parser};
use ddp_launcher::NodeRange;

use super::settings::{NAMES, Settings};
use super::target::TargetKind;
use super::values::{self, Endpoint, ProcCount, RdzvConf};

/// Start, synchronise and keep alive data-parallel training.
///
/// TARGET is a `.yaml` configuration (trained by the native worker), a `.py` script (run by `python3 -u`,
/// or by $PYTHON_EXEC) or any program. Everything after a script or a program belongs to it; after a `.yaml`,
/// flags may go on. Flags may be spelled with `-` or `_`; a flag that is not given is taken from
/// `PET_<NAME>`, then from the YAML's `launch` section. With `--rdzv-endpoint`, number and rank of the nodes
/// are taken from Slurm (SLURM_NNODES, SLURM_NODEID) or Kubernetes (JOB_COMPLETION_INDEX) last of all.
#[derive(Debug, Parser)]
#[command(name = "ddp-run", version, max_term_width = 100, after_help = AFTER_HELP)]
pub struct Args {
    /// Number of nodes, or the range within which the job may run [default: 1]
    #[arg(long, value_name = "N|MIN:MAX", value_parser = values::node_range)]
    nnodes: Option<NodeRange>,

    /// Workers on this node: a number, `gpu`, `cpu`, or `auto` (GPUs where there are some, else cores) [default: 1]
    #[arg(long, value_name = "N|auto|cpu|gpu", value_parser = values::proc_count)]
    nproc_per_node: Option<ProcCount>,

    /// Address of the rendezvous, needed for several nodes; an IPv6 address in brackets [default port: 29400]
    #[arg(long, value_name = "HOST[:PORT]", value_parser = values::endpoint)]
    rdzv_endpoint: Option<Endpoint>,

    /// Name of the job, the same on all nodes [default: `none`; for one node, the time and a random part]
    #[arg(long, value_name = "ID", value_parser = values::job_id)]
    rdzv_id: Option<String>,

    /// Details of the rendezvous: `is_host=BOOL`, `join_timeout=S` [600], `connect_timeout=S` [60]
    #[arg(long, value_name = "KEY=VALUE[,...]", value_parser = values::rdzv_conf)]
    rdzv_conf: Option<RdzvConf>,

    /// Rank of this node; without it the ranks follow the host names
    #[arg(long, value_name = "N", value_parser = values::whole)]
    node_rank: Option<u32>,

    /// One node with a rendezvous of its own, whatever else is configured
    #[arg(long, action = ArgAction::SetTrue)]
    standalone: bool,

    /// How often the whole job may restart because a rank died [default: 3 for YAML targets, else 0]
    #[arg(long, value_name = "N", value_parser = values::whole)]
    max_restarts: Option<u32>,

    /// Write each worker's output below this directory [default for YAML targets: `logs` in the run's directory]
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,

    /// Address under which the other nodes reach this one [default: the one that the rendezvous sees]
    #[arg(long, value_name = "ADDR", value_parser = values::local_addr)]
    local_addr: Option<String>,

    /// Seconds that workers get between SIGTERM and SIGKILL [default: 30]
    #[arg(long, value_name = "S", value_parser = values::seconds)]
    shutdown_timeout: Option<Duration>,

    /// Override one value of the YAML, for example `--set train.steps=20`; may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = values::assignment)]
    overrides: Vec<String>,

    /// The target and its arguments; flags of ddp-run may follow a `.yaml`
    #[arg(value_name = "TARGET", required = true, num_args = 1.., trailing_var_arg = true)]
    command: Vec<OsString>,
}

const AFTER_HELP: &str = "\
Exit codes: 0 success; the first failing worker's own code, or 128 + signal; 130/143 stopped by \
SIGINT/SIGTERM; 2 usage or configuration; 69 rendezvous unreachable; 75 rendezvous timed out; \
76 nodes disagree on the job; 77 refused.";

/// What stage two works on.
#[derive(Debug)]
pub struct ParsedArgs {
    /// The uppermost layer of settings.
    pub settings: Settings,
    /// `--set`, in order, each of the form `key=value`.
    pub overrides: Vec<String>,
    /// The target.
    pub target: OsString,
    /// What belongs to the target.
    pub target_args: Vec<OsString>,
}

/// Parses a command line, `argv[0]` included. The error is clap's: it prints itself and knows its exit code.
pub fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<ParsedArgs, clap::Error> {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let parsed = read(command(), &argv)?;
    if TargetKind::of(&parsed.target) != TargetKind::Native || parsed.target_args.is_empty() {
        return Ok(parsed);
    }
    let place = argv.len() - parsed.target_args.len() - 1;
    if argv[place - 1] == "--" {
        // Whoever ends the flags means it.
        return Ok(parsed);
    }
    let mut flags = argv;
    flags.remove(place);
    let reread = read(command().mut_arg("command", |arg| arg.required(false)), &flags)?;
    let strays = std::iter::once(reread.target).chain(reread.target_args);
    Ok(ParsedArgs {
        target: parsed.target,
        target_args: strays.filter(|word| !word.is_empty()).collect(),
        ..reread
    })
}

/// The flags, with both spellings.
fn command() -> clap::Command {
    Args::command().mut_args(|arg| {
        let long = arg.get_long().unwrap_or_default();
        let underscored = NAMES
            .iter()
            .find(|name| name.replace('_', "-") == long && **name != long);
        match underscored {
            Some(name) => arg.alias(*name),
            None => arg,
        }
    })
}

fn read(command: clap::Command, argv: &[OsString]) -> Result<ParsedArgs, clap::Error> {
    let args = Args::from_arg_matches(&command.try_get_matches_from(argv)?)?;
    let mut words = args.command.into_iter();
    Ok(ParsedArgs {
        settings: Settings {
            nnodes: args.nnodes,
            nproc_per_node: args.nproc_per_node,
            rdzv_endpoint: args.rdzv_endpoint,
            rdzv_id: args.rdzv_id,
            rdzv_conf: args.rdzv_conf,
            node_rank: args.node_rank,
            standalone: args.standalone.then_some(true),
            max_restarts: args.max_restarts,
            log_dir: args.log_dir,
            local_addr: args.local_addr,
            shutdown_timeout: args.shutdown_timeout,
        },
        overrides: args.overrides,
        target: words.next().unwrap_or_default(),
        target_args: words.collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(words: &[&str]) -> Result<ParsedArgs, String> {
        let argv = std::iter::once("ddp-run")
            .chain(words.iter().copied())
            .map(OsString::from);
        parse(argv).map_err(|error| error.to_string())
    }

    #[test]
    fn hyphen_and_underscore_mean_the_same() {
        let hyphens = parse_words(&["--nproc-per-node", "2", "--rdzv-endpoint=a", "x"]).expect("valid");
        let underscores = parse_words(&["--nproc_per_node", "2", "--rdzv_endpoint=a", "x"]).expect("valid");
        assert_eq!(hyphens.settings, underscores.settings);
        assert_eq!(hyphens.settings.nproc_per_node, Some(ProcCount::Fixed(2)));
    }

    #[test]
    fn everything_after_the_target_belongs_to_it() {
        let args = parse_words(&["--set", "a.b=1", "train.py", "--set", "x", "--nnodes", "--", "-h"])
            .expect("valid");
        assert_eq!(args.target, "train.py");
        assert_eq!(args.target_args, ["--set", "x", "--nnodes", "--", "-h"]);
        assert_eq!(args.overrides, ["a.b=1"]);
    }

    #[test]
    fn flags_may_follow_a_configuration() {
        let before = parse_words(&["--nproc_per_node=2", "--set", "a.b=1", "t.yaml"]).expect("valid");
        for words in [
            &["t.yaml", "--nproc-per-node", "2", "--set", "a.b=1"][..],
            &["--nproc-per-node", "2", "t.yaml", "--set=a.b=1"],
            &["--set", "a.b=1", "t.yaml", "--nproc_per_node", "2"],
        ] {
            let after = parse_words(words).expect("valid");
            assert_eq!(after.settings, before.settings, "{words:?}");
            assert_eq!(after.overrides, before.overrides, "{words:?}");
            assert_eq!(
                (after.target, after.target_args),
                ("t.yaml".into(), vec![]),
                "{words:?}"
            );
        }
        let order = parse_words(&["--set", "a.b=1", "t.yml", "--set", "a.b=2"]).expect("valid");
        assert_eq!(order.overrides, ["a.b=1", "a.b=2"]);
    }

    #[test]
    fn other_words_after_a_configuration_are_named() {
        for (words, strays) in [
            (&["t.yaml", "x", "--standalone"][..], &["x", "--standalone"][..]),
            (&["t.yaml", "--standalone", "x"], &["x"]),
            (&["t.yaml", "--", "--standalone"], &["--standalone"]),
            (&["--", "t.yaml", "--standalone"], &["--standalone"]),
        ] {
            let args = parse_words(words).expect("refused later, by name");
            assert_eq!(
                (args.target, args.target_args),
                ("t.yaml".into(), strays.iter().map(Into::into).collect())
            );
        }
        let error = parse_words(&["t.yaml", "--bogus"]).expect_err("must be refused");
        assert!(error.contains("unexpected argument '--bogus'"), "{error}");
        let error = parse_words(&["t.yaml", "--nnodes"]).expect_err("no value");
        assert!(error.contains("a value is required for '--nnodes"), "{error}");
    }

    #[test]
    fn a_double_dash_ends_our_flags() {
        let args = parse_words(&["--nproc-per-node", "2", "--", "--weird-name", "--", "y"]).expect("valid");
        assert_eq!(args.target, "--weird-name");
        assert_eq!(args.target_args, ["--", "y"]);
    }

    #[test]
    fn unknown_flags_are_not_taken_for_a_target() {
        let error = parse_words(&["--bogus", "train.py"]).expect_err("must be refused");
        assert!(error.contains("unexpected argument '--bogus'"), "{error}");
        let error = parse_words(&["--nnodes", "2"]).expect_err("no target");
        assert!(error.contains("TARGET"), "{error}");
    }

    #[test]
    fn bad_values_name_the_flag_and_what_it_takes() {
        let error = parse_words(&["--nnodes", "4:2", "x"]).expect_err("must be refused");
        let first_line = error.lines().next().unwrap_or_default();
        insta::assert_snapshot!(first_line, @"error: invalid value '4:2' for '--nnodes <N|MIN:MAX>': MIN is 4, but MAX is 2: expected `N` or `MIN:MAX` with 1 <= MIN <= MAX, for example `2` or `1:4`");
    }

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }
}
