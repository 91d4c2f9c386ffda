//! Removes the groups of launchers that are gone.
//!
//! A group stays behind when a process in it could not be killed, or when launcher and guardian were both killed. Each
//! launcher holds a lock on the folder of its group for as long as it lives: numbers of processes are used again, and
//! are others in another container, but a lock goes with its holder.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};
use std::{io, thread};

use super::group::{is_populated, remove_tree};

/// Begins the names of the groups that launchers make.
const PREFIX: &str = "ddp-";

/// Longest wait for another launcher that looks whether a group is a leftover.
const LOOK_BOUND: Duration = Duration::from_millis(200);
/// Between two looks whether it is through: a lock has no event with a deadline.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Opens the folder of a group, and holds its lock until the file is closed. A launcher that removes a group holds its
/// lock.
///
/// # Errors
/// When there is no such folder, or another process holds it.
fn hold(group: &Path) -> io::Result<File> {
    lock(File::open(group)?, group)
}

fn lock(folder: File, group: &Path) -> io::Result<File> {
    folder.try_lock()?;
    // The one that was opened may have been removed before it was locked, and another have come to its place.
    let (held, there) = (folder.metadata()?, fs::metadata(group)?);
    if (held.dev(), held.ino()) != (there.dev(), there.ino()) {
        return Err(io::ErrorKind::NotFound.into());
    }
    Ok(folder)
}

/// As [`hold`], for the group of this launcher, which others may just be looking at.
pub(super) fn hold_own(group: &Path) -> io::Result<File> {
    let deadline = Instant::now() + LOOK_BOUND;
    loop {
        match hold(group) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                thread::sleep(LOOK_INTERVAL);
            }
            outcome => return outcome,
        }
    }
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
            // A process that comes in now, or a group that is made below, makes the removal fail.
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
        // A process that another test has just forked holds the lock too, until its program runs.
        let deadline = Instant::now() + Duration::from_secs(20);
        while remove_leftovers(own.path()) == 0 {
            assert!(Instant::now() < deadline, "the lock is free");
            thread::yield_now();
        }
        assert!(!alive.exists());
    }

    #[test]
    fn a_group_that_came_to_the_place_of_another_is_not_held_by_the_others_lock() {
        let own = tempfile::tempdir().unwrap();
        let group = own.path().join("ddp-1-new");
        fs::create_dir(&group).unwrap();
        let before = File::open(&group).unwrap();
        fs::remove_dir(&group).unwrap();
        // Keeps the number of the old one from being used again.
        fs::create_dir(own.path().join("between")).unwrap();
        assert!(
            lock(before.try_clone().unwrap(), &group).is_err(),
            "nothing is there"
        );
        fs::create_dir(&group).unwrap();
        assert!(lock(before, &group).is_err(), "another one is there");
        assert!(hold_own(&group).is_ok());
    }

    #[test]
    fn a_launcher_waits_for_those_who_only_look() {
        let own = tempfile::tempdir().unwrap();
        let group = own.path().join("ddp-1-new");
        fs::create_dir(&group).unwrap();
        let looking = hold(&group).unwrap();
        thread::scope(|scope| {
            let held = scope.spawn(|| hold_own(&group).is_ok());
            drop(looking);
            assert!(held.join().unwrap());
        });
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
