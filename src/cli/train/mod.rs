//! `ddp-train`: the native worker in the foreground, plans, token files, checkpoints, trained models, and the doctor.
//! Each subcommand has its module.

mod ckpt;
pub mod doctor;
mod inference;
mod planner;
mod runs;
mod schedule;
mod tokenize;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue};
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::cli::settings::nearest;
use crate::cli::{LONG_VERSION, VERSION, answer, native, values};
use doctor::gpus;

/// Train a model in the foreground, plan a run, make token files, manage checkpoints, use trained models, and check the
/// machine.
#[derive(Debug, Parser)]
#[command(name = "ddp-train", version = VERSION, long_version = LONG_VERSION, max_term_width = 100)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

// A variant without words has those of its arguments, which `--help` prints in full.
#[derive(Debug, Subcommand)]
enum Command {
    /// Train one configuration as one rank, alone or as a worker of `ddp-run`
    Run {
        /// The configuration
        #[arg(value_name = "FILE.yaml")]
        config: PathBuf,
        /// Override one value, for example `--set train.steps=20`; may be repeated
        #[arg(long = "set", value_name = "KEY=VALUE", value_parser = values::assignment)]
        overrides: Vec<String>,
    },
    /// Estimate memory, traffic and the shortest step time of a run, on hardware that this machine need not have
    Plan(planner::PlanArgs),
    Schedule(schedule::ScheduleArgs),
    Tokenize(tokenize::Args),
    /// Inspect, verify and export checkpoints, or go back to an older one
    #[command(subcommand)]
    Ckpt(ckpt::Command),
    Generate(inference::GenerateArgs),
    Eval(inference::EvalArgs),
    /// Check this machine: CPU, memory, GPUs, libraries, and what is missing
    Doctor,
    /// Print the completions of a shell
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// The command line, for its manual pages.
pub fn command() -> clap::Command {
    Args::command()
}

/// Main of `ddp-train`.
pub fn main(argv: Vec<OsString>) -> ExitCode {
    let first = argv.get(1).cloned();
    if first
        .as_ref()
        .is_some_and(|word| word == gpus::GPU_DESCRIBE_SUBCOMMAND)
    {
        return gpus::describe_main();
    }
    let args = match Args::try_parse_from(argv) {
        Ok(args) => args,
        Err(words) => return answer::instead_of_arguments(&with_nearest(words, first.as_ref()), ""),
    };
    match args.command {
        Command::Run { config, overrides } => native::run(&config, &overrides),
        Command::Plan(args) => planner::run(&args),
        Command::Schedule(args) => schedule::run(&args),
        Command::Tokenize(args) => tokenize::run(&args),
        Command::Ckpt(command) => ckpt::run(&command),
        Command::Generate(args) => inference::generate(&args),
        Command::Eval(args) => inference::evaluate(&args),
        Command::Doctor => answer::give_report(&doctor::render(&doctor::Facts::gather())),
        Command::Completions { shell } => answer::completions(shell, command()),
    }
}

/// Suggests the subcommand of which the `first` word is a misspelling, where the parser has no idea.
fn with_nearest(mut error: clap::Error, first: Option<&OsString>) -> clap::Error {
    let typed = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(typed)) if first.is_some_and(|word| word == typed.as_str()) => typed,
        _ => return error,
    };
    let extension = Path::new(typed).extension();
    if extension.is_some_and(|extension| extension == "yaml" || extension == "yml") {
        let subcommand = ContextValue::Strings(vec![format!("run {typed}")]);
        error.insert(ContextKind::SuggestedSubcommand, subcommand);
        return error;
    }
    let command = command();
    let meant = nearest(typed, command.get_subcommands().map(clap::Command::get_name));
    if let (Some(name), None) = (meant, error.get(ContextKind::SuggestedSubcommand)) {
        let name = ContextValue::Strings(vec![name.to_owned()]);
        error.insert(ContextKind::SuggestedSubcommand, name);
    }
    error
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_subcommand_leads_to_the_one_that_is_meant() {
        let words = |typed: &str| {
            let error = Args::try_parse_from(["ddp-train", typed]).expect_err("no such subcommand");
            with_nearest(error, Some(&OsString::from(typed))).to_string()
        };
        assert!(words("rnu").contains("'run'"), "{}", words("rnu"));
        assert!(words("doctr").contains("'doctor'"), "{}", words("doctr"));
        assert!(words("a.yaml").contains("'run a.yaml'"), "{}", words("a.yaml"));
        assert!(!words("xyzzy").contains("similar"), "{}", words("xyzzy"));
    }
}
