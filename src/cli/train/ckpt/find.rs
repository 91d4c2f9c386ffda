//! From what the user names to one checkpoint.

use std::path::{Component, Path};

use ddp_proto::words::numbered;
use ddp_worker::checkpoint::{CheckpointError, Reader, Which, step_name, steps_before};

use crate::cli::train::runs::{self, CHECKPOINTS};

/// File of a checkpoint, by which it is known.
const MANIFEST: &str = "manifest.json";
/// Most steps that an error names: the newest ones.
const MAX_STEPS: usize = 10;

/// Whether `path` is a single checkpoint.
pub(super) fn is_one(path: &Path) -> bool {
    path.join(MANIFEST).exists()
}

/// Opens the checkpoint at `path`: a run's folder, its `checkpoints`, or a single checkpoint.
pub(super) fn open(path: &Path, step: Option<u64>) -> Result<Reader, CheckpointError> {
    let which = step.map_or(Which::Latest, Which::Step);
    if is_one(path) {
        return match step {
            Some(step) if path.file_name() != Some(step_name(step).as_ref()) => {
                Err(CheckpointError::Misuse(format!(
                    "`{}` is a single checkpoint of a different step than {step}\n  hint: omit `--step`, or give the run's directory",
                    path.display()
                )))
            }
            _ => Reader::open_folder(path),
        };
    }
    open_of_run(run_at(path)?, which)
}

/// The folder of the run at `path`, which is that folder, or its `checkpoints`.
pub(super) fn run_at(path: &Path) -> Result<&Path, CheckpointError> {
    if path.join(CHECKPOINTS).is_dir() {
        return Ok(path);
    }
    let is_checkpoints = path.components().next_back() == Some(Component::Normal(CHECKPOINTS.as_ref()));
    match path.parent() {
        Some(run) if is_checkpoints && path.is_dir() => Ok(ddp_proto::paths::or_here(run)),
        _ => Err(CheckpointError::Misuse(without_checkpoint(path))),
    }
}

/// The error of a path that leads to no checkpoint, with the runs below it, if any.
fn without_checkpoint(path: &Path) -> String {
    let problem = if path.exists() {
        "holds no checkpoint"
    } else {
        "does not exist"
    };
    let mut hint = runs::hint(path);
    if hint.is_empty() {
        hint.push_str(
            "\n  hint: give a run's `out_dir`, its `checkpoints` directory, or one `step_…` directory",
        );
    }
    format!("`{}` {problem}{hint}", path.display())
}

fn open_of_run(run: &Path, which: Which) -> Result<Reader, CheckpointError> {
    if let Which::Step(step) = which {
        let path = run.join(CHECKPOINTS).join(step_name(step));
        if !path.exists() {
            let mut words = format!("`{}` holds no checkpoint", path.display());
            let mut steps = steps_before(run, u64::MAX)?;
            steps.truncate(MAX_STEPS);
            steps.reverse();
            if !steps.is_empty() {
                words.push_str("\n  hint: there are checkpoints of ");
                words.push_str(&numbered("step", &steps));
            }
            return Err(CheckpointError::Misuse(words));
        }
    }
    Reader::open(run, which)
}

/// A checkpoint with which nothing is wrong, or all that is.
pub(super) fn verified(reader: Reader) -> Result<Reader, Vec<CheckpointError>> {
    let damages = reader.damages();
    if damages.is_empty() {
        Ok(reader)
    } else {
        Err(damages)
    }
}
