//! From what the user names to one checkpoint.

use std::fmt;
use std::path::{Component, Path};

use ddp_worker::checkpoint::{CheckpointError, Reader, Which, step_name};

/// Folder of the checkpoints of a run.
const CHECKPOINTS: &str = "checkpoints";
/// File of a checkpoint, by which it is known.
const MANIFEST: &str = "manifest.json";

/// Opens the checkpoint at `path`: a run's folder, its `checkpoints`, or a single checkpoint.
pub(super) fn open(path: &Path, step: Option<u64>) -> Result<Reader, CheckpointError> {
    let which = step.map_or(Which::Latest, Which::Step);
    if path.join(MANIFEST).exists() {
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
    if path.join(CHECKPOINTS).is_dir() {
        return open_of_run(path, which);
    }
    let is_checkpoints = path.components().next_back() == Some(Component::Normal(CHECKPOINTS.as_ref()));
    match path.parent() {
        Some(run) if is_checkpoints && path.is_dir() => {
            let run = if run.as_os_str().is_empty() {
                Path::new(".")
            } else {
                run
            };
            open_of_run(run, which)
        }
        _ => Err(CheckpointError::Misuse(format!(
            "`{}` {}\n  hint: give a run's `out_dir`, its `checkpoints` directory, or one `step_…` directory",
            path.display(),
            if path.exists() {
                "holds no checkpoint"
            } else {
                "does not exist"
            }
        ))),
    }
}

fn open_of_run(run: &Path, which: Which) -> Result<Reader, CheckpointError> {
    if let Which::Step(step) = which {
        let path = run.join(CHECKPOINTS).join(step_name(step));
        if !path.exists() {
            return Err(CheckpointError::None { path });
        }
    }
    Reader::open(run, which)
}

/// `the checkpoint of step 20`
pub(super) struct Named<'a>(pub(super) &'a Reader);

impl fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the checkpoint of step {}", self.0.manifest().state.step)
    }
}
