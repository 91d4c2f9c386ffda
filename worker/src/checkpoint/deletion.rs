//! All checkpoints of a run deleted, for another run that takes its folder.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use super::CheckpointError;
use super::layout;
use super::storage::{Disk, Storage as _};
use super::writer::delete_unfinished;

/// What `checkpoints` is called while it is deleted as a whole.
const NAMELESS: &str = ".deleting_checkpoints";

/// Deletes all checkpoints below the folder of a run, whole or not, and what a deletion that was interrupted left. What
/// no run is called stays, and with it `checkpoints`; a `checkpoints` that is no folder, too. Where there is nothing
/// else, all of them lose their name at once, so that an interruption leaves no run that looks whole.
pub fn delete_all(out_dir: &Path) -> Result<(), CheckpointError> {
    let (root, nameless) = (layout::folder(out_dir), out_dir.join(NAMELESS));
    remove(&nameless)?;
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
        return remove(&nameless);
    }
    for name in [layout::LATEST, layout::LATEST_TEMPORARY] {
        let path = root.join(name);
        Disk.remove_file(&path)
            .map_err(|e| CheckpointError::io("delete", &path, &e))?;
    }
    for step in layout::saved_steps(&root).map_err(list)? {
        let tombstone = root.join(layout::tombstone_name(step));
        remove(&tombstone)?;
        fs::rename(root.join(layout::step_name(step)), &tombstone)
            .map_err(|e| CheckpointError::io("rename to", &tombstone, &e))?;
    }
    delete_unfinished(out_dir)
}

fn remove(path: &Path) -> Result<(), CheckpointError> {
    Disk.remove_folder(path)
        .map_err(|e| CheckpointError::io("delete", path, &e))
}
