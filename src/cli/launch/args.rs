//! Stage one: the command line as it was typed, each value checked alone. No file, socket or
//! variable is looked at here; that is the business of [`super::plan`].

use std::ffi::OsString;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser};
use clap_complete::Shell;

use super::target::TargetKind;
use crate::cli::settings::{NAMES, Settings, nearest};
use crate::cli::values;
use crate::cli::{LONG_VERSION, VERSION};

/// Launch distributed training and restart it after failures.
///
/// TARGET is a `.yaml` configuration (trained by the native worker), a `.py` script (run by $PYTHON_EXEC or `python3`
/// of PATH, with `-u`) or any program. Everything after a script or a program is passed to it; after a
/// `.yaml`, more flags may follow. Flags may be spelled with `-` or `_`. A flag that is not given is taken from
/// `PET_<NAME>`, then from the YAML's `launch` section, then from Slurm (`srun --ntasks-per-node=1` needs no flags) or,
/// with `--rdzv-endpoint`, from Kubernetes (JOB_COMPLETION_INDEX). If a flag is repeated, the last one counts.
#[derive(Debug, Parser)]
#[command(name = "ddp-run", version = VERSION, long_version = LONG_VERSION, max_term_width = 100, after_help = EXAMPLES, after_long_help = EXIT_CODES, infer_long_args = true, args_override_self = true)]
pub struct Args {
    #[command(flatten)]
    pub(super) settings: Settings,

    /// Show what would be started, without starting it
    ///
    /// Also shows where each value comes from.
    #[arg(long, alias = "dry_run")]
    pub dry_run: bool,

    /// Print completions for a shell (bash, zsh, fish, elvish, powershell); no other flags allowed
    #[arg(
        long,
        visible_alias = "print-completion",
        alias = "print_completion",
        value_name = "SHELL",
        exclusive = true,
        hide_short_help = true
    )]
    pub(super) completions: Option<Shell>,

    /// Override a value of the YAML: `--set train.steps=20`
    ///
    /// May be repeated.
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = values::assignment)]
    pub overrides: Vec<String>,

    /// A `.yaml`, a `.py` or any program, and its arguments
    ///
    /// After a `.yaml`, flags of ddp-run may follow.
    #[arg(value_name = "TARGET", required = true, num_args = 1.., trailing_var_arg = true)]
    command: Vec<OsString>,

    /// The target: the first of `command`.
    #[arg(skip)]
    pub target: OsString,

    /// What belongs to the target.
    #[arg(skip)]
    pub target_args: Vec<OsString>,
}

/// Ends `-h`, which has the flags that most launches need.
const EXAMPLES: &str = "\
Examples:
  ddp-run --nproc-per-node 2 train.py --lr 3e-4
  ddp-run --nproc-per-node gpu train.yaml --set train.steps=20
  ddp-run --nnodes 2 --rdzv-endpoint node0:29400 train.yaml  # on each node

`--help` lists all flags and the exit codes.";

const EXIT_CODES: &str = "\
Exit codes: 0 success; the first failing worker's own code, or 128 + signal; 130/143 stopped by \
SIGINT/SIGTERM; 2 usage or configuration; 69 rendezvous unreachable; 70 the launcher itself failed; \
71 the GPU of a node is gone; 73 the run's directory is in use; 74 its disk is full; 75 rendezvous \
timed out; 76 nodes disagree on the job; 77 refused; 78 an operator closed the job; 93 a worker failed \
and asked not to be restarted; 126, 127 the program cannot be executed, or does not exist.";

/// Flags of other launchers, with the one that does the same here.
const FLAGS_OF_OTHERS: [(&str, &str); 11] = [
    ("--gpus", "--nproc-per-node"),
    ("--gpus-per-node", "--nproc-per-node"),
    ("--machine-rank", "--node-rank"),
    ("--ngpu", "--nproc-per-node"),
    ("--ngpus", "--nproc-per-node"),
    ("--nodes", "--nnodes"),
    ("--num-gpus", "--nproc-per-node"),
    ("--num-machines", "--nnodes"),
    ("--num-nodes", "--nnodes"),
    ("--num-processes", "--nproc-per-node"),
    ("--num-workers", "--nproc-per-node"),
];

/// Parses a command line, `argv[0]` included. The error is clap's: it prints itself and knows its exit code.
pub fn parse(argv: impl IntoIterator<Item = OsString>) -> Result<Args, clap::Error> {
    let argv: Vec<OsString> = argv.into_iter().collect();
    let mut parsed = read(command(), &argv)?;
    let place = argv.len() - parsed.target_args.len() - 1;
    if argv[place - 1] == "--" {
        // An explicit end of the flags is meant.
        return Ok(parsed);
    }
    if TargetKind::of(&parsed.target) != TargetKind::Native {
        // As torchrun: the target may be told apart from its arguments.
        if parsed.target_args.first().is_some_and(|word| word == "--") {
            parsed.target_args.remove(0);
        }
        return Ok(parsed);
    }
    if parsed.target_args.is_empty() {
        return Ok(parsed);
    }
    let mut flags = argv;
    flags.remove(place);
    let reread = read(command().mut_arg("command", |arg| arg.required(false)), &flags);
    let reread = reread.map_err(with_set)?;
    let strays = std::iter::once(reread.target).chain(reread.target_args);
    Ok(Args {
        target: parsed.target,
        target_args: strays.filter(|word| !word.is_empty()).collect(),
        ..reread
    })
}

/// The flags, with both spellings.
pub fn command() -> clap::Command {
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

fn read(command: clap::Command, argv: &[OsString]) -> Result<Args, clap::Error> {
    let line = command.try_get_matches_from(argv);
    let line = line.map_err(with_our_flag)?;
    let mut args = Args::from_arg_matches(&line)?;
    args.settings.keep_words(&line);
    let mut words = std::mem::take(&mut args.command).into_iter();
    args.target = words.next().unwrap_or_default();
    args.target_args = words.collect();
    Ok(args)
}

/// Suggests what a flag of another launcher is called here, or which flags begin with one that is too short.
fn with_our_flag(mut error: clap::Error) -> clap::Error {
    let unknown = match (error.kind(), error.get(ContextKind::InvalidArg)) {
        (ErrorKind::UnknownArgument, Some(ContextValue::String(flag))) => flag.replace('_', "-"),
        _ => return error,
    };
    let mut similar = match error.remove(ContextKind::SuggestedArg) {
        Some(ContextValue::String(flag)) => vec![flag.replace('_', "-")],
        _ => Vec::new(),
    };
    // The parser takes `--lr` for `--local-ranks-filter`.
    similar.retain(|flag| nearest(&unknown, std::iter::once(&**flag)).is_some());
    // "To pass it as a value, use `-- FLAG`": the flag would be the target.
    error.remove(ContextKind::Suggested);
    let of_others = FLAGS_OF_OTHERS.iter().find(|(flag, _)| *flag == unknown);
    let meant = match of_others {
        Some((_, ours)) => vec![(*ours).to_owned()],
        None => flags_that_begin_with(&unknown),
    };
    let meant = if meant.is_empty() { similar } else { meant };
    if !meant.is_empty() {
        error.insert(ContextKind::SuggestedArg, ContextValue::Strings(meant));
    }
    error
}

/// After a configuration, a flag that resembles none of ours may be meant for one of its values.
fn with_set(mut error: clap::Error) -> clap::Error {
    if error.kind() == ErrorKind::UnknownArgument && error.get(ContextKind::SuggestedArg).is_none() {
        let tip = "`--set` changes values of the configuration: `--set train.optimizer.lr=1e-3`";
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![tip.into()]));
    }
    error
}

fn flags_that_begin_with(start: &str) -> Vec<String> {
    let mut known = command();
    // Adds `--help` and `--version`.
    known.build();
    let shown = known.get_arguments().filter(|arg| !arg.is_hide_set());
    let flags = shown.filter_map(|arg| Some(format!("--{}", arg.get_long()?)));
    flags.filter(|flag| flag.starts_with(start)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::values::ProcCount;

    fn parse_words(words: &[&str]) -> Result<Args, String> {
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
    fn flags_may_be_abbreviated_as_far_as_they_stay_unique() {
        // As with Python's argparse, and so with torchrun.
        let args = parse_words(&["--nproc", "2", "--max_res", "1", "--dry_run", "x"]).expect("valid");
        assert_eq!(args.settings.nproc_per_node, Some(ProcCount::Fixed(2)));
        assert_eq!(args.settings.max_restarts, Some(1));
        assert!(args.dry_run);
        parse_words(&["--no", "2", "x"]).expect_err("`--node-rank`, or `--no-python`?");
    }

    #[test]
    fn a_flag_that_is_given_twice_counts_as_given_last() {
        // Scripts append to the flags that they were given.
        let args = parse_words(&[
            "--nproc-per-node",
            "1",
            "--standalone",
            "--nproc_per_node=2",
            "--standalone",
            "x",
        ])
        .expect("valid");
        assert_eq!(args.settings.nproc_per_node, Some(ProcCount::Fixed(2)));
        let sets = parse_words(&["--set", "a.b=1", "--set", "c.d=2", "x.yaml"]).expect("valid");
        assert_eq!(sets.overrides, ["a.b=1", "c.d=2"]);
    }

    #[test]
    fn completions_stand_alone_under_torchruns_name_too() {
        let shell = |words: &[&str]| parse_words(words).ok().and_then(|args| args.completions);
        assert_eq!(shell(&["--completions", "bash"]), Some(Shell::Bash));
        assert_eq!(shell(&["--print-completion=zsh"]), Some(Shell::Zsh));
        assert_eq!(shell(&["--print_completion", "fish"]), Some(Shell::Fish));
        assert_eq!(shell(&["train.py", "bash"]), None);
        for words in [
            &["--completions", "tcsh"][..],
            &["--completions", "bash", "x"],
            &[],
        ] {
            parse_words(words).expect_err("no shell, or not alone");
        }
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
    fn a_double_dash_may_part_a_target_from_its_arguments() {
        let args = |words: &[&str]| parse_words(words).expect("valid").target_args;
        assert_eq!(args(&["main.py", "--", "--b", "--"]), ["--b", "--"]);
        assert_eq!(args(&["-m", "pkg", "--", "--", "x"]), ["--", "x"]);
        assert_eq!(args(&["main.py", "a", "--", "--b"]), ["a", "--", "--b"]);
        assert!(args(&["main.py", "--"]).is_empty());
    }

    #[test]
    fn unknown_flags_are_not_taken_for_a_target() {
        let error = parse_words(&["--bogus", "train.py"]).expect_err("must be refused");
        assert!(error.contains("unexpected argument '--bogus'"), "{error}");
        let error = parse_words(&["--nnodes", "2"]).expect_err("no target");
        assert!(error.contains("TARGET"), "{error}");
    }

    #[test]
    fn flags_of_other_launchers_lead_to_ours() {
        for flag in ["--num-gpus", "--num_gpus", "--ngpu=2", "--gpus"] {
            let error = parse_words(&[flag, "2", "train.py"]).expect_err("must be refused");
            assert!(
                error.contains("a similar argument exists: '--nproc-per-node'"),
                "{error}"
            );
        }
        let error = parse_words(&["--num-gpus", "2", "train.py"]).expect_err("must be refused");
        assert!(!error.contains("to pass '"), "the flag is no target: {error}");
        let error = parse_words(&["t.yaml", "--num-nodes", "2"]).expect_err("must be refused");
        assert!(error.contains("a similar argument exists: '--nnodes'"), "{error}");
        let command = command();
        let known: Vec<_> = command.get_arguments().filter_map(clap::Arg::get_long).collect();
        for (theirs, ours) in FLAGS_OF_OTHERS {
            assert!(
                known.contains(&&ours[2..]) && !known.contains(&&theirs[2..]),
                "{theirs}"
            );
        }
    }

    #[test]
    fn wrong_flags_lead_to_all_that_may_be_meant() {
        let error = parse_words(&["--n", "2", "train.py"]).expect_err("ambiguous");
        for flag in ["some similar arguments exist", "'--nnodes'", "'--node-rank'"] {
            assert!(error.contains(flag), "{flag} is not in {error}");
        }
        let error = parse_words(&["--hangtimeout", "5", "train.py"]).expect_err("must be refused");
        assert!(
            error.contains("a similar argument exists: '--hang-timeout'"),
            "{error}"
        );
    }

    #[test]
    fn a_flag_that_resembles_none_leads_to_the_values_of_a_configuration() {
        let error = parse_words(&["train.yaml", "--lr", "3"]).expect_err("must be refused");
        assert!(!error.contains("similar"), "{error}");
        assert!(
            error.contains("tip: `--set` changes values of the configuration: "),
            "{error}"
        );
        let error = parse_words(&["train.yaml", "--nnods", "2"]).expect_err("must be refused");
        assert!(
            error.contains("'--nnodes'") && !error.contains("--set"),
            "{error}"
        );
        let error = parse_words(&["--lr", "3", "train.py"]).expect_err("must be refused");
        assert!(!error.contains("tip: "), "{error}");
    }

    #[test]
    fn bad_values_name_the_flag_and_what_it_takes() {
        let error = parse_words(&["--nnodes", "4:2", "x"]).expect_err("must be refused");
        let first_line = error.lines().next().unwrap_or_default();
        insta::assert_snapshot!(first_line, @"error: invalid value '4:2' for '--nnodes <N|MIN:MAX>': MIN is 4, but MAX is 2: expected `N` or `MIN:MAX` with 1 <= MIN <= MAX <= 16384, for example `2` or `1:4`");
    }

    /// Lines of `ddp-run -h` or `--help`, in a terminal of 80 columns.
    fn help(flag: &str) -> Vec<String> {
        let shown = command().term_width(80).try_get_matches_from(["ddp-run", flag]);
        let text = shown.expect_err("help ends the program").to_string();
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn the_short_help_fits_a_screen_and_leads_to_the_whole() {
        let short = help("-h");
        assert!(short.len() <= 45, "{} lines:\n{}", short.len(), short.join("\n"));
        assert!(
            short
                .last()
                .is_some_and(|line| line.starts_with("`--help` lists all"))
        );
        let frequent = [
            "--nnodes",
            "--nproc-per-node",
            "--rdzv-endpoint",
            "--max-restarts",
            "--set",
        ];
        for flag in frequent {
            let line = short.iter().find(|line| line.trim_start().starts_with(flag));
            let has_words =
                line.is_some_and(|line| line.split("  ").filter(|part| !part.is_empty()).count() == 2);
            assert!(has_words, "`{flag}` on one line:\n{}", short.join("\n"));
        }
    }

    #[test]
    fn the_whole_help_has_every_flag() {
        let whole = help("--help");
        let command = command();
        let flags = command.get_arguments().filter(|arg| !arg.is_hide_set());
        let longs: Vec<&str> = flags.filter_map(clap::Arg::get_long).collect();
        assert!(longs.len() > 30, "{longs:?}");
        for long in longs {
            let flag = format!("--{long}");
            let has_it = |line: &String| line.split([' ', ',']).any(|word| word == flag);
            assert!(
                whole.iter().any(has_it),
                "`{flag}` is missing:\n{}",
                whole.join("\n")
            );
        }
        assert!(whole.iter().any(|line| line.starts_with("Exit codes: ")));
        let mut sections = include_str!("../../../docs/launching.md").split("## ");
        let table = sections.find(|section| section.starts_with("Exit codes"));
        let table = table.expect("a section");
        let codes = table
            .lines()
            .filter_map(|line| line.strip_prefix("| ")?.split(' ').next());
        for code in codes.filter(|code| code.parse::<u8>().is_ok()) {
            let has_it = EXIT_CODES.split([' ', ',', '/']).any(|word| word == code);
            assert!(has_it, "{code}");
        }
    }

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }
}
