//! The folder `checkpoints/` of a run: its names, the steps that it holds, and which of them stay.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use super::CheckpointError;
use super::manifest::{Manifest, TensorKind};
use super::storage::{Disk, DiskStep, Storage, read_bounded, write_file};
use crate::config::CheckpointKeep;

pub(super) const LATEST: &str = "latest";
/// What it is called while it is written.
const LATEST_TEMPORARY: &str = ".latest.tmp";
pub(super) const MANIFEST: &str = "manifest.json";
/// What `checkpoints` is called while it is deleted as a whole.
const NAMELESS: &str = ".deleting_checkpoints";
const DATA_ENDING: &str = ".safetensors";
const STEP_PREFIX: &str = "step_";
const TEMPORARY_PREFIX: &str = ".saving_";
const TOMBSTONE_PREFIX: &str = ".deleting_";
/// Longest `latest` that is read.
const MAX_LATEST_BYTES: u64 = 1 << 20;

/// Name of the file, without its ending, of one of several writers: `state-exp_avg-0-of-2`.
pub fn file_stem(kind: &TensorKind, writer: usize, writers: usize) -> String {
    let stem = match kind {
        TensorKind::Parameter => "parameters".to_owned(),
        TensorKind::State(slot) => format!("state-{slot}"),
    };
    match writers {
        1 => stem,
        _ => format!("{stem}-{writer}-of-{writers}"),
    }
}

/// Name of a file of tensors, by its stem.
pub(super) fn data_name(stem: &str) -> String {
    format!("{stem}{DATA_ENDING}")
}

/// `<out_dir>/checkpoints`
pub(super) fn checkpoints(out_dir: &Path) -> PathBuf {
    out_dir.join("checkpoints")
}

/// Name of the folder of a step: `step_00000120`.
pub fn step_name(step: u64) -> String {
    format!("{STEP_PREFIX}{step:08}")
}

/// The step whose folder has this name.
pub(super) fn parse_step(name: &str) -> Option<u64> {
    let digits = name.strip_prefix(STEP_PREFIX)?;
    let step = digits.parse().ok()?;
    (step_name(step) == name).then_some(step)
}

/// Folder of a checkpoint that is being written. The generation keeps a rank of an earlier life of the job,
/// that has not yet noticed its end, out of it.
pub(super) fn temporary_name(step: u64, generation: u64) -> String {
    format!("{TEMPORARY_PREFIX}{}.g{generation}", step_name(step))
}

/// What the folder of a step is called while it is being deleted.
fn tombstone_name(step: u64) -> String {
    format!("{TOMBSTONE_PREFIX}{}", step_name(step))
}

/// Generation in the name of a temporary folder; `None` for every other name. A name that only begins like
/// one, and what was being deleted, belongs to generation 0, so that any generation may delete it.
fn generation_of_temporary(name: &str) -> Option<u64> {
    // A name that is not UTF-8: a run gives none.
    if name.contains(char::REPLACEMENT_CHARACTER) {
        return None;
    }
    if name.starts_with(TOMBSTONE_PREFIX) {
        return Some(0);
    }
    let rest = name.strip_prefix(TEMPORARY_PREFIX)?;
    let generation = rest.rsplit_once(".g").and_then(|(_, digits)| digits.parse().ok());
    Some(generation.unwrap_or(0))
}

/// Whether a run calls something so below its `checkpoints`.
fn is_of_a_run(name: &str) -> bool {
    matches!(name, LATEST | LATEST_TEMPORARY)
        || parse_step(name).is_some()
        || generation_of_temporary(name).is_some()
}

/// The names in a folder. One that is no UTF-8 comes out as another, which no run gives; a folder that is not there has
/// none.
fn list(folder: &Path) -> io::Result<Vec<String>> {
    let name = |entry: io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    match fs::read_dir(folder) {
        Err(e) if is_absent(&e) => Ok(Vec::new()),
        entries => entries?.map(name).collect(),
    }
}

fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}

/// [`list`], with the error that people read.
pub(super) fn names(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    list(folder).map_err(|e| CheckpointError::io("list", folder, &e))
}

/// The steps that have a folder, ascending. Links and names that only resemble one do not count.
fn saved_steps(root: &Path) -> io::Result<Vec<u64>> {
    let mut steps = Vec::new();
    for step in list(root)?.iter().filter_map(|name| parse_step(name)) {
        match root.join(step_name(step)).symlink_metadata() {
            Ok(found) if found.is_dir() => steps.push(step),
            Err(e) if !is_absent(&e) => return Err(e),
            _ => {}
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The step that `checkpoints/latest` of a run's folder names; `None` without that file.
pub fn latest_step(out_dir: &Path) -> io::Result<Option<u64>> {
    let path = checkpoints(out_dir).join(LATEST);
    let names_none = |found: String| {
        let (name, example) = (path.display(), step_name(40));
        io::Error::new(
            ErrorKind::InvalidData,
            format!(
                "`{name}` does not name a checkpoint: {found}\n  hint: write the name of a checkpoint into it, such as `{example}`, or delete it to use the newest one"
            ),
        )
    };
    let bytes = match read_bounded(&path, MAX_LATEST_BYTES) {
        Err(e) if is_absent(&e) => return Ok(None),
        Err(e) if matches!(e.kind(), ErrorKind::FileTooLarge | ErrorKind::InvalidData) => {
            return Err(names_none(e.to_string()));
        }
        read => read?,
    };
    let text = String::from_utf8_lossy(&bytes);
    let step = parse_step(text.trim());
    step.map(Some)
        .ok_or_else(|| names_none(format!("`{}`", text.trim())))
}

/// Steps before `end` that have the folder of a checkpoint, whole or not, newest first.
pub fn steps_before(out_dir: &Path, end: u64) -> Result<Vec<u64>, CheckpointError> {
    let root = checkpoints(out_dir);
    let mut steps = saved_steps(&root).map_err(|e| CheckpointError::io("list", &root, &e))?;
    steps.retain(|step| *step < end);
    steps.reverse();
    Ok(steps)
}

/// The folder of the run that a checkpoint's folder belongs to, and its step; `None` where it lies elsewhere.
pub fn run_of(checkpoint: &Path) -> Option<(&Path, u64)> {
    let step = parse_step(checkpoint.file_name()?.to_str()?)?;
    let root = checkpoint.parent()?;
    let out_dir = root.parent().filter(|out_dir| checkpoints(out_dir) == root)?;
    Some((ddp_proto::paths::or_here(out_dir), step))
}

/// Names the checkpoint of a step in `latest`, when its folder has its name on the disk. After a crash at any point
/// `latest` names this one or the one before.
pub fn point_latest(storage: &dyn Storage, out_dir: &Path, step: u64) -> Result<(), CheckpointError> {
    let root = checkpoints(out_dir);
    let temporary = root.join(LATEST_TEMPORARY);
    let name = format!("{}\n", step_name(step));
    let pointed = write_file(storage, &temporary, name.as_bytes())
        .and_then(|()| storage.run(DiskStep::Rename(&temporary, &root.join(LATEST))));
    if pointed.is_err() {
        // The error that counts is on its way; what is left is overwritten the next time.
        let _ = storage.run(DiskStep::RemoveFile(&temporary));
    }
    pointed?;
    storage.run(DiskStep::SyncFolder(&root))
}

/// The newest step that has a whole checkpoint, whatever `latest` says; `None` if no step has one. A folder has its
/// name only once all of it is written.
pub(super) fn newest_step(out_dir: &Path) -> io::Result<Option<u64>> {
    let root = checkpoints(out_dir);
    let is_whole = |step: &u64| root.join(step_name(*step)).join(MANIFEST).is_file();
    Ok(saved_steps(&root)?.into_iter().rev().find(is_whole))
}

/// The step that a run goes on from: what `latest` names. Where that is lost, or was never written because the run died
/// with its first checkpoint just complete, the newest one, so that no saved step is trained again.
pub fn step_to_go_on_from(out_dir: &Path) -> io::Result<Option<u64>> {
    if let Some(step) = latest_step(out_dir)? {
        return Ok(Some(step));
    }
    let newest = newest_step(out_dir)?;
    if let Some(step) = newest {
        tracing::warn!(
            "`{}` has no `latest` file: using its newest checkpoint, of step {step}",
            checkpoints(out_dir).display()
        );
    }
    Ok(newest)
}

/// The steps that go, of all that are there, ascending. Those behind `latest` belong to a life of the run that is
/// rolled back, or that this one has not heard of: they stay, as does everything `needed`.
fn expired(keep: CheckpointKeep, steps: &[u64], latest: u64, needed: &[u64]) -> Vec<u64> {
    let of_this_life: Vec<u64> = steps.iter().copied().filter(|step| *step <= latest).collect();
    let old = of_this_life.len().saturating_sub(keep.last.max(1));
    let is_kept = |step: &u64| {
        *step == latest
            || needed.contains(step)
            || keep
                .every
                .is_some_and(|every| every > 0 && step.is_multiple_of(every))
    };
    let mut gone = of_this_life[..old].to_vec();
    gone.retain(|step| !is_kept(step));
    gone
}

/// Deletes what `keep` does not keep, after the checkpoint that `latest` names is on the disk. What another program
/// put there stays: only folders of a whole checkpoint of the very step that they are named for are touched.
/// `needed` are steps that stay in any case. Returns the steps that were deleted.
pub fn retain(
    storage: &dyn Storage,
    out_dir: &Path,
    keep: CheckpointKeep,
    needed: &[u64],
) -> Result<Vec<u64>, CheckpointError> {
    let root = checkpoints(out_dir);
    let read = |e: io::Error| CheckpointError::io("read", &root, &e);
    let Some(latest) = latest_step(out_dir).map_err(read)? else {
        return Ok(Vec::new());
    };
    let is_whole = |step: &u64| {
        let manifest = Manifest::read(&root.join(step_name(*step)).join(MANIFEST));
        manifest.is_ok_and(|manifest| manifest.state.step == *step)
    };
    let mut gone = expired(keep, &saved_steps(&root).map_err(read)?, latest, needed);
    gone.retain(is_whole);
    let doomed = gone.iter().map(|step| unname(storage, &root, *step));
    let doomed = doomed.collect::<Result<Vec<PathBuf>, _>>()?;
    if !gone.is_empty() {
        storage.run(DiskStep::SyncFolder(&root))?;
    }
    doomed
        .iter()
        .try_for_each(|path| storage.run(DiskStep::RemoveFolder(path)))?;
    Ok(gone)
}

/// Takes its name from the folder of a step before it is deleted: a folder that is half deleted must not look like a
/// checkpoint, whatever happens. Returns where it is now.
fn unname(storage: &dyn Storage, root: &Path, step: u64) -> Result<PathBuf, CheckpointError> {
    let tombstone = root.join(tombstone_name(step));
    storage.run(DiskStep::RemoveFolder(&tombstone))?;
    storage.run(DiskStep::Rename(&root.join(step_name(step)), &tombstone))?;
    Ok(tombstone)
}

/// Deletes all checkpoints below the folder of a run, whole or not, and what a deletion that was interrupted left. What
/// no run is called stays, and with it `checkpoints`; a `checkpoints` that is no folder, too. Where there is nothing
/// else, all of them lose their name at once, so that an interruption leaves no run that looks whole.
pub fn delete_all(out_dir: &Path) -> Result<(), CheckpointError> {
    let (root, nameless) = (checkpoints(out_dir), out_dir.join(NAMELESS));
    Disk.run(DiskStep::RemoveFolder(&nameless))?;
    let is_all_ours = names(&root)?.iter().all(|name| is_of_a_run(name));
    if !root.is_dir() {
        return Ok(());
    }
    // Refused where it is a file system of its own.
    if !root.is_symlink() && is_all_ours && fs::rename(&root, &nameless).is_ok() {
        return Disk.run(DiskStep::RemoveFolder(&nameless));
    }
    for name in [LATEST, LATEST_TEMPORARY] {
        Disk.run(DiskStep::RemoveFile(&root.join(name)))?;
    }
    for step in saved_steps(&root).map_err(|e| CheckpointError::io("list", &root, &e))? {
        unname(&Disk, &root, step)?;
    }
    delete_unfinished(out_dir)
}

/// Deletes all saves below the folder of a run that never ended, whatever their generation: for a job that
/// begins, before it writes.
pub fn delete_unfinished(out_dir: &Path) -> Result<(), CheckpointError> {
    delete_stale(&Disk, &checkpoints(out_dir), |_, _| true)
}

/// Deletes the temporary folders for whose name and generation `stale` says so.
pub(super) fn delete_stale(
    storage: &dyn Storage,
    root: &Path,
    stale: impl Fn(&str, u64) -> bool,
) -> Result<(), CheckpointError> {
    let mut names = names(root)?;
    names.retain(|name| generation_of_temporary(name).is_some_and(|generation| stale(name, generation)));
    names
        .iter()
        .try_for_each(|name| storage.run(DiskStep::RemoveFolder(&root.join(name))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_names_round_trip_and_nothing_else_is_one() {
        for step in [0, 7, 99_999_999, 100_000_000, u64::MAX] {
            assert_eq!(parse_step(&step_name(step)), Some(step));
        }
        for name in [
            "",
            "step_",
            "step_7",
            "step_-0000007",
            "../step_00000007",
            "step_00000007/x",
            "step_+0000007",
        ] {
            assert_eq!(parse_step(name), None, "{name}");
        }
        assert_eq!(generation_of_temporary(&temporary_name(3, 12)), Some(12));
        assert_eq!(generation_of_temporary(".saving_"), Some(0));
        assert_eq!(generation_of_temporary(&tombstone_name(3)), Some(0));
        assert_eq!(generation_of_temporary(&step_name(3)), None);
    }

    #[test]
    fn the_run_of_a_checkpoint_is_two_folders_above() {
        let run_of = |path: &'static str| run_of(Path::new(path));
        assert_eq!(
            run_of("a/b/checkpoints/step_00000007"),
            Some((Path::new("a/b"), 7))
        );
        assert_eq!(run_of("checkpoints/step_00000007"), Some((Path::new("."), 7)));
        for elsewhere in ["step_00000007", "a/step_00000007", "a/checkpoints/best", "/"] {
            assert_eq!(run_of(elsewhere), None, "{elsewhere}");
        }
    }

    #[test]
    fn the_last_ones_and_milestones_are_kept() {
        let steps: Vec<u64> = (1..=10).map(|i| i * 10).collect();
        let gone = |last, every, latest, needed: &[u64]| {
            expired(CheckpointKeep { last, every }, &steps, latest, needed)
        };
        assert_eq!(gone(3, None, 100, &[]), [10, 20, 30, 40, 50, 60, 70]);
        assert_eq!(gone(2, Some(40), 100, &[]), [10, 20, 30, 50, 60, 70]);
        assert_eq!(gone(1, None, 100, &[30]), [10, 20, 40, 50, 60, 70, 80, 90]);
        assert_eq!(gone(20, None, 100, &[]), [0; 0]);
        // A run that went back to step 50: what is behind it is not for it to delete.
        assert_eq!(gone(2, None, 50, &[]), [10, 20, 30]);
        assert_eq!(gone(0, Some(0), 10, &[]), [0; 0]);
    }
}
