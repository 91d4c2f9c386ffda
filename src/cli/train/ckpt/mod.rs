//! `ddp-train ckpt`: looks at checkpoints, checks them, and rewrites them for other tools and other numbers of ranks.
//!
//! | file | what it holds |
//! |---|---|
//! | `find.rs` | from what the user names to one checkpoint |
//! | `inspect.rs` | what a checkpoint holds, as a table or as JSON |
//! | `rewind.rs` | makes a run resume from another of its checkpoints |

mod find;
mod inspect;
mod rewind;

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand};
use ddp_proto::exit;
use ddp_worker::checkpoint::{
    CheckpointError, Disk, Reader, Storage, export, ignore_file_size_signal, name_older, reshard,
};

use crate::cli::answer::{self, print_error};
use crate::cli::values::one_or_more;
use find::Named;

/// Exit code where a checkpoint is damaged, or could not be rewritten.
const FAILED: u8 = 1;
/// Damages that are named one by one.
const MAX_NAMED: usize = 20;
/// More ranks than anybody has: a mistake.
const MAX_RANKS: usize = 1 << 16;

/// What to do with a checkpoint.
#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Show what a checkpoint holds: step, model, tensors with their types, shapes, regions and ranges
    Inspect {
        #[command(flatten)]
        which: Which,
        /// Print JSON, for programs
        #[arg(long)]
        json: bool,
    },
    /// Check a whole checkpoint: sizes, hashes, and that regions and ranges cover every tensor; exits with 1 if damaged
    Verify {
        #[command(flatten)]
        which: Which,
    },
    /// Write the parameters as one `model.safetensors` with a `config.json`, for other tools and `model.init_from`
    Export {
        #[command(flatten)]
        which: Which,
        /// Directory to create
        #[arg(short = 'o', long, value_name = "DIR")]
        to: PathBuf,
    },
    /// Rewrite a checkpoint in files of equal size for a different number of ranks (not needed for resuming)
    Reshard {
        #[command(flatten)]
        which: Which,
        /// Number of ranks to write for
        #[arg(long, value_name = "N", value_parser = one_or_more::<NonZeroUsize>)]
        ranks: NonZeroUsize,
        /// Run directory to create, for `run.out_dir` with `run.resume: require`
        #[arg(short = 'o', long, value_name = "DIR")]
        to: PathBuf,
    },
    /// Verify the newest complete checkpoint, or that of `--step`, and make the run resume from it
    Rewind {
        #[command(flatten)]
        which: Which,
    },
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
        Ok(text) => answer::give(text),
        Err(mut problems) => {
            // One hint is enough.
            let is_damage =
                |problem: &&mut CheckpointError| matches!(problem, CheckpointError::Damaged { .. });
            if let Some(first) = problems.iter_mut().find(is_damage) {
                *first = name_older(first.clone());
            }
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
        Command::Inspect { which, json } => {
            let reader = open(which)?;
            Ok(if *json {
                format!("{:#}\n", inspect::json(&reader))
            } else {
                inspect::table(&reader)
            })
        }
        Command::Verify { which } => {
            let reader = open(which).and_then(find::verified)?;
            Ok(inspect::sound(&reader))
        }
        Command::Export { which, to } => {
            let reader = open(which)?;
            export(&disk(), &reader, to).map_err(|e| vec![e])?;
            Ok(format!("{} is written to `{}`\n", Named(&reader), to.display()))
        }
        Command::Rewind { which } => rewind::rewind(&which.path, which.step),
        Command::Reshard { which, ranks, to } => {
            if ranks.get() > MAX_RANKS {
                let what = format!("`--ranks {ranks}` is above the limit of {MAX_RANKS}");
                return Err(vec![CheckpointError::Misuse(what)]);
            }
            let reader = open(which)?;
            let folder = reshard(&disk(), &reader, to, ranks.get()).map_err(|e| vec![e])?;
            Ok(format!(
                "{} is written for {ranks} ranks to `{}`\n",
                Named(&reader),
                folder.display()
            ))
        }
    }
}

fn disk() -> Arc<dyn Storage> {
    Arc::new(Disk)
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
