//! `ddp-train ckpt`: shows checkpoints, checks them, and exports them for other tools.
//!
//! | file | what it holds |
//! |---|---|
//! | `find.rs` | from what the user names to one checkpoint |
//! | `inspect.rs` | what a checkpoint holds, as a table |
//! | `rewind.rs` | makes a run resume from another of its checkpoints |

mod find;
mod inspect;
mod rewind;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use ddp_proto::{exit, printable};
use ddp_worker::checkpoint::{
    CheckpointError, Disk, ExportedTokenizer, Reader, export, ignore_file_size_signal,
};

use crate::cli::answer::{self, print_error};
use crate::cli::native::{FAILED, RunSettings};

/// Damages that are named one by one.
const MAX_NAMED: usize = 20;

/// What to do with a checkpoint.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show what a checkpoint holds: step, model, tensors with their types, shapes, regions and ranges
    Inspect(Which),
    /// Check a whole checkpoint: sizes, hashes, and that regions and ranges cover every tensor; exits with 1 if damaged
    Verify(Which),
    /// Write `model.safetensors`, `config.json` and `tokenizer.json` for other tools and `model.init_from`
    Export {
        #[command(flatten)]
        which: Which,
        /// Directory to create
        #[arg(short = 'o', long, value_name = "DIR")]
        to: PathBuf,
    },
    /// Verify the newest complete checkpoint, or that of `--step`, and make the run resume from it
    Rewind(Which),
}

/// Which checkpoint.
#[derive(Debug, Args)]
pub(super) struct Which {
    /// A run's `out_dir`, its `checkpoints` directory, or one `step_…` directory
    #[arg(value_name = "PATH")]
    path: PathBuf,
    /// The checkpoint of this step instead of the latest
    #[arg(long, value_name = "N")]
    step: Option<u64>,
}

impl Which {
    /// Opens it.
    pub(super) fn open(&self) -> Result<Reader, CheckpointError> {
        find::open(&self.path, self.step)
    }
}

/// Main of `ddp-train ckpt`.
pub(super) fn run(command: &Command) -> ExitCode {
    ignore_file_size_signal();
    match execute(command) {
        // The manifest may come from anywhere.
        Ok(text) => answer::give(printable::text(&text).as_bytes()),
        Err(mut problems) => {
            // One hint is enough.
            let hints = problems.iter_mut().filter_map(|problem| match problem {
                CheckpointError::Damaged { hint, .. } => Some(hint),
                _ => None,
            });
            hints.skip(1).for_each(|hint| *hint = None);
            let named = problems.iter().take(MAX_NAMED);
            named.for_each(|problem| print_error(problem));
            if problems.len() > MAX_NAMED {
                print_error(&format!("and {} more", problems.len() - MAX_NAMED));
            }
            ExitCode::from(exit_code(&problems))
        }
    }
}

/// What is to be printed, or all that is wrong.
fn execute(command: &Command) -> Result<String, Vec<CheckpointError>> {
    let open = |which: &Which| -> Result<Reader, Vec<CheckpointError>> { which.open().map_err(|e| vec![e]) };
    match command {
        Command::Inspect(which) => Ok(inspect::table(&open(which)?)),
        Command::Verify(which) => {
            let reader = open(which).and_then(find::verified)?;
            Ok(inspect::sound(&reader))
        }
        Command::Export { which, to } => {
            let reader = open(which)?;
            let (tokenizer, note) = tokenizer(&reader);
            export(&Disk, &reader, to, &tokenizer).map_err(|e| vec![e])?;
            let step = reader.manifest().state.step;
            Ok(format!(
                "the checkpoint of step {step} is written to `{}`\n{note}",
                to.display()
            ))
        }
        Command::Rewind(which) => rewind::rewind(&which.path, which.step),
    }
}

/// The tokenizer that goes with an export, and what to say if its file does not.
fn tokenizer(reader: &Reader) -> (ExportedTokenizer, String) {
    let (tokenizer, cause) = match RunSettings::of(reader).exported_tokenizer() {
        Ok(tokenizer) if tokenizer.json.is_some() => return (tokenizer, String::new()),
        Ok(tokenizer) => (tokenizer, "the run's tokenizer is built in".to_owned()),
        Err(error) => (ExportedTokenizer::default(), error.to_string()),
    };
    let cause = cause.lines().next().unwrap_or_default();
    (
        tokenizer,
        format!("without `tokenizer.json`, which other tools need: {cause}\n"),
    )
}

/// Separates mistakes of the command line from damage of a checkpoint.
pub(super) fn exit_code(problems: &[CheckpointError]) -> u8 {
    match problems {
        [CheckpointError::None { .. } | CheckpointError::Occupied { .. } | CheckpointError::Misuse(_)] => {
            exit::USAGE
        }
        _ => FAILED,
    }
}
