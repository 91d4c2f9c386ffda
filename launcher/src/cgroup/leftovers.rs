//! Removes the groups of launchers that are gone.
//!
//! A group stays behind when a process in it could not be killed, or when launcher and guardian were both killed. Each
//! launcher holds a lock on the folder of its group for as long as it lives: numbers of processes are used again, and
//! are others in another container, but a lock goes with its holder.

use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::group::{is_populated, remove_tree};

/// Begins the names of the groups that launchers make.
const PREFIX: &str = "ddp-";

/// Opens the folder of a group, and holds its lock until the file is closed.
///
/// # Errors
/// When there is no such folder, or another process holds it.
pub(super) fn hold(group: &Path) -> io::Result<File> {
    let folder = File::open(group)?;
    folder.try_lock()?;
    Ok(folder)
}

/// Removes the empty groups of dead launchers below `own`; returns their number. Those that hold a process stay.
pub(super) fn remove_leftovers(own: &Path) -> usize {
    let groups = fs::read_dir(own).into_iter().flatten().flatten();
    groups
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX))
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter(|entry| {
            let group = entry.path();
            let lock = hold(&group);
            // Whoever comes in now, or makes a group below, makes the removal fail.
            lock.is_ok() && !is_populated(&group) && remove_tree(&group).is_ok()
        })
        .count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_nobody_holds_is_removed() {
        let own = tempfile::tempdir().unwrap();
        for name in ["ddp-1-dead", "ddp-1-dead/inner", "ddp-1-alive", "other"] {
            fs::create_dir(own.path().join(name)).unwrap();
        }
        let alive = own.path().join("ddp-1-alive");
        let lock = hold(&alive).unwrap();
        assert_eq!(remove_leftovers(own.path()), 1);
        assert!(!own.path().join("ddp-1-dead").exists());
        assert!(own.path().join("other").exists());
        assert!(alive.exists(), "its launcher lives");
        drop(lock);
        assert_eq!(remove_leftovers(own.path()), 1);
        assert!(!alive.exists());
    }

    #[test]
    fn a_group_with_a_process_stays_with_all_below_it() {
        let own = tempfile::tempdir().unwrap();
        let group = own.path().join("ddp-1-stuck");
        fs::create_dir_all(group.join("ddp-2-inner")).unwrap();
        fs::write(group.join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        assert_eq!(remove_leftovers(own.path()), 0);
        assert!(
            group.join("ddp-2-inner").exists(),
            "its launcher lives, in the group above"
        );
    }
}
