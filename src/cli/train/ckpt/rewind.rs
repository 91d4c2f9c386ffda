//! A run that is to resume from another of its checkpoints: that one is verified first, then named by `latest`.
//!
//! `latest` is replaced by one rename, as after a save. No checkpoint is deleted, so the way back to a newer one is the
//! same command. The directory is not locked: a job that saves at this moment may fail to, and names its next one again.

use std::path::Path;

use ddp_worker::checkpoint::{
    CheckpointError, Disk, Reader, Which, latest_step, point_latest, run_of, steps_before,
};

use super::find::{self, verified};
use super::inspect;
use crate::cli::train::runs::CHECKPOINTS;

/// Makes the run at `path` resume from the checkpoint of a step, or of `path` itself, or else from the newest whole one.
/// Returns what was done, or all that is wrong.
pub(super) fn rewind(path: &Path, asked: Option<u64>) -> Result<String, Vec<CheckpointError>> {
    let reader = if asked.is_some() || find::is_one(path) {
        find::open(path, asked).map_err(|e| vec![e]).and_then(verified)?
    } else {
        newest_whole(find::run_at(path).map_err(|e| vec![e])?)?
    };
    let (run, step) = run_of(reader.path()).ok_or_else(|| vec![not_of_a_run(reader.path())])?;
    // One that names no checkpoint is replaced.
    let before = latest_step(run).ok().flatten();
    let done = if before == Some(step) {
        "already resumes"
    } else {
        point_latest(&Disk, run, step).map_err(|e| vec![e])?;
        "now resumes"
    };
    let before = match before {
        Some(before) if before != step => format!(", not from step {before}"),
        _ => String::new(),
    };
    let (sound, run) = (inspect::sound(&reader), run.display());
    Ok(format!("{sound}`{run}` {done} from step {step}{before}\n"))
}

/// The newest whole checkpoint up to the one that the run would resume from. Those behind it are of a life of the run
/// that went back. If none is whole, the damages of the newest.
fn newest_whole(run: &Path) -> Result<Reader, Vec<CheckpointError>> {
    let latest = latest_step(run).ok().flatten();
    let end = latest.map_or(u64::MAX, |latest| latest.saturating_add(1));
    let mut problems = None;
    for step in steps_before(run, end).map_err(|e| vec![e])? {
        let opened = Reader::open(run, Which::Step(step)).map_err(|e| vec![e]);
        match opened.and_then(verified) {
            Ok(reader) => return Ok(reader),
            Err(found) => problems = problems.or(Some(found)),
        }
    }
    let path = run.join(CHECKPOINTS);
    Err(problems.unwrap_or_else(|| vec![CheckpointError::None { path }]))
}

fn not_of_a_run(path: &Path) -> CheckpointError {
    CheckpointError::Misuse(format!(
        "`{}` is not in the `checkpoints` directory of a run\n  hint: give the run's `out_dir`, and the step with `--step`",
        path.display()
    ))
}
