//! Which checkpoints of a run are kept, and how the others are deleted.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use super::layout::{self, MANIFEST};
use super::reader::read_manifest;
use super::storage::{Disk, Storage};
use super::writer::delete_unfinished;
use super::{CheckpointError, step_name};

/// What `checkpoints` is called while it is deleted as a whole.
const NAMELESS: &str = ".deleting_checkpoints";

/// Which checkpoints are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// So many of the newest; at least 1.
    pub last: usize,
    /// And every one whose step is a multiple of it.
    pub every: Option<u64>,
}

/// The steps that go, of all that are there, ascending. Those behind `latest` belong to a life of the run that is
/// rolled back, or that this one has not heard of: they stay, as does everything `needed`.
fn expired(keep: Keep, steps: &[u64], latest: u64, needed: &[u64]) -> Vec<u64> {
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
    keep: Keep,
    needed: &[u64],
) -> Result<Vec<u64>, CheckpointError> {
    let root = layout::folder(out_dir);
    let read = |e: std::io::Error| CheckpointError::io("read", &root, &e);
    let Some(latest) = layout::latest_step(out_dir).map_err(read)? else {
        return Ok(Vec::new());
    };
    let steps = layout::saved_steps(&root).map_err(read)?;
    let mut gone = expired(keep, &steps, latest, needed);
    gone.retain(|step| is_whole(&root.join(step_name(*step)), *step));
    // Under another name first: a folder that is half deleted must not look like a checkpoint, whatever happens.
    for step in &gone {
        let (path, tombstone) = (
            root.join(step_name(*step)),
            root.join(layout::tombstone_name(*step)),
        );
        remove(storage, &tombstone)?;
        storage
            .rename(&path, &tombstone)
            .map_err(|e| CheckpointError::io("rename to", &tombstone, &e))?;
    }
    if !gone.is_empty() {
        storage
            .sync_folder(&root)
            .map_err(|e| CheckpointError::io("sync", &root, &e))?;
    }
    for step in &gone {
        remove(storage, &root.join(layout::tombstone_name(*step)))?;
    }
    Ok(gone)
}

fn remove(storage: &dyn Storage, path: &Path) -> Result<(), CheckpointError> {
    if fs::symlink_metadata(path).is_err() {
        return Ok(());
    }
    storage
        .remove_folder(path)
        .map_err(|e| CheckpointError::io("delete", path, &e))
}

fn is_whole(path: &Path, step: u64) -> bool {
    read_manifest(&path.join(MANIFEST)).is_ok_and(|manifest| manifest.state.step == step)
}

/// Deletes all checkpoints below the folder of a run, whole or not, and what a deletion that was interrupted left. What
/// no run is called stays, and with it `checkpoints`; a `checkpoints` that is no folder, too. Where there is nothing
/// else, all of them lose their name at once, so that an interruption leaves no run that looks whole.
pub fn delete_all(out_dir: &Path) -> Result<(), CheckpointError> {
    let (root, nameless) = (layout::folder(out_dir), out_dir.join(NAMELESS));
    remove(&Disk, &nameless)?;
    let list = |e: io::Error| CheckpointError::io("list", &root, &e);
    let names: Result<Vec<OsString>, io::Error> = match fs::read_dir(&root) {
        Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(()),
        entries => entries
            .map_err(list)?
            .map(|entry| entry.map(|e| e.file_name()))
            .collect(),
    };
    let (names, is_link) = (names.map_err(list)?, root.is_symlink());
    let is_of_a_run = |name: &OsString| name.to_str().is_some_and(layout::is_of_a_run);
    // Refused where it is a file system of its own.
    if !is_link && names.iter().all(is_of_a_run) && fs::rename(&root, &nameless).is_ok() {
        return remove(&Disk, &nameless);
    }
    for name in [layout::LATEST, layout::LATEST_TEMPORARY] {
        let path = root.join(name);
        Disk.remove_file(&path)
            .map_err(|e| CheckpointError::io("delete", &path, &e))?;
    }
    for step in layout::saved_steps(&root).map_err(list)? {
        let tombstone = root.join(layout::tombstone_name(step));
        remove(&Disk, &tombstone)?;
        fs::rename(root.join(layout::step_name(step)), &tombstone)
            .map_err(|e| CheckpointError::io("rename to", &tombstone, &e))?;
    }
    delete_unfinished(out_dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ones_and_milestones_are_kept() {
        let steps: Vec<u64> = (1..=10).map(|i| i * 10).collect();
        let gone =
            |last, every, latest, needed: &[u64]| expired(Keep { last, every }, &steps, latest, needed);
        assert_eq!(gone(3, None, 100, &[]), [10, 20, 30, 40, 50, 60, 70]);
        assert_eq!(gone(2, Some(40), 100, &[]), [10, 20, 30, 50, 60, 70]);
        assert_eq!(gone(1, None, 100, &[30]), [10, 20, 40, 50, 60, 70, 80, 90]);
        assert_eq!(gone(20, None, 100, &[]), [0; 0]);
        // A run that went back to step 50: what is behind it is not for it to delete.
        assert_eq!(gone(2, None, 50, &[]), [10, 20, 30]);
        assert_eq!(gone(0, Some(0), 10, &[]), [0; 0]);
    }
}
