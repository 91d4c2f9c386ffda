//! A save that is stopped after each of its steps.

use std::collections::HashSet;
use std::sync::Mutex;

use super::super::{Keep, retain};
use super::*;

/// A disk that stops after a number of steps. What was not synced by then may be lost.
struct Faulty {
    state: Mutex<FaultyState>,
}

#[derive(Default)]
struct FaultyState {
    steps_left: usize,
    stopped: bool,
    /// Files whose content may be lost.
    unsynced: HashSet<PathBuf>,
    /// Renames whose folder was not synced: the file as it was before, and where it is now.
    renamed: Vec<(PathBuf, PathBuf, Option<Vec<u8>>)>,
}

impl Faulty {
    fn after(steps: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::new(FaultyState {
                steps_left: steps,
                ..FaultyState::default()
            }),
        })
    }

    /// Takes a step, or fails from now on.
    fn step(&self, apply: impl FnOnce(&mut FaultyState) -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if state.steps_left == 0 {
            state.stopped = true;
            return Err(io::Error::new(io::ErrorKind::StorageFull, "stopped by the test"));
        }
        state.steps_left -= 1;
        apply(&mut state)
    }

    fn stopped(&self) -> bool {
        self.state.lock().unwrap().stopped
    }

    /// The power goes: renames that were not synced are undone, unsynced content is cut in half.
    fn lose_unsynced(&self) {
        let state = std::mem::take(&mut *self.state.lock().unwrap());
        for (from, to, before) in state.renamed.into_iter().rev() {
            fs::rename(&to, &from).unwrap();
            if let Some(before) = before {
                fs::write(&to, before).unwrap();
            }
        }
        for path in state.unsynced {
            if let Ok(content) = fs::read(&path) {
                fs::write(&path, &content[..content.len() / 2]).unwrap();
            }
        }
    }
}

impl Storage for Faulty {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.step(|_| Disk.create_folder(path))
    }

    fn write(&self, path: &Path, content: &[&[u8]]) -> io::Result<()> {
        let mut half = content.concat();
        half.truncate(half.len() / 2);
        let wrote = self.step(|state| {
            state.unsynced.insert(path.to_owned());
            Disk.write(path, content)
        });
        if wrote.is_err() && path.parent().is_some_and(Path::exists) {
            // A full disk leaves what fitted.
            Disk.write(path, &[&half])?;
        }
        wrote
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let wrote = self.step(|state| {
            state.unsynced.insert(path.to_owned());
            Disk.append(path, bytes)
        });
        if wrote.is_err() && path.exists() {
            Disk.append(path, &bytes[..bytes.len() / 2])?;
        }
        wrote
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        self.step(|state| {
            state.unsynced.remove(path);
            Disk.sync_file(path)
        })
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.step(|state| {
            state.renamed.retain(|(_, to, _)| to.parent() != Some(path));
            Disk.sync_folder(path)
        })
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(|state| {
            let before = fs::read(to).ok();
            Disk.rename(from, to)?;
            state.renamed.push((from.to_owned(), to.to_owned(), before));
            let moved = |path: PathBuf| path.strip_prefix(from).map_or(path.clone(), |rest| to.join(rest));
            state.unsynced = state.unsynced.drain().map(moved).collect();
            Ok(())
        })
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step(|_| Disk.remove_file(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.step(|_| Disk.remove_folder(path))
    }
}

/// Stops a save after each of its steps in turn. After each, the latest checkpoint opens and verifies, and
/// the next save succeeds and leaves nothing of the failed one.
fn stop_after_each_step(power_cut: bool) {
    let mut stops = 0;
    loop {
        let folder = tempfile::tempdir().unwrap();
        save(folder.path(), 10);
        let storage = Faulty::after(stops);
        let result = save_on(storage.clone(), folder.path(), 20);
        let finished = !storage.stopped();
        if power_cut && !finished {
            storage.lose_unsynced();
        }
        let latest = check_latest(folder.path());
        assert!(
            latest == 10 || latest == 20,
            "after {stops} steps the latest is {latest}"
        );
        if finished {
            result.unwrap();
            assert_eq!(latest, 20);
            break;
        }
        result.unwrap_err();
        save(folder.path(), 20);
        assert_eq!(check_latest(folder.path()), 20, "after {stops} steps");
        let left = names(&folder.path().join("checkpoints"));
        assert_eq!(
            left,
            ["latest", "step_00000010", "step_00000020"],
            "after {stops} steps"
        );
        save(folder.path(), 30);
        assert_eq!(check_latest(folder.path()), 30, "after {stops} steps");
        stops += 1;
    }
    assert!(stops > 15, "a save has more than {stops} steps");
}

#[test]
fn a_process_that_dies_after_any_step_leaves_a_usable_checkpoint() {
    stop_after_each_step(false);
}

#[test]
fn a_power_cut_after_any_step_leaves_a_usable_checkpoint() {
    stop_after_each_step(true);
}

/// Stops the deletion of old checkpoints after each of its steps in turn. What is left of them is whole, or no
/// checkpoint by name; the latest is never touched, and the next time cleans up.
fn stop_a_deletion_after_each_step(power_cut: bool) {
    const KEEP: Keep = Keep { last: 1, every: None };
    for stops in 0.. {
        let folder = tempfile::tempdir().unwrap();
        for step in [10, 20, 30] {
            save(folder.path(), step);
        }
        let storage = Faulty::after(stops);
        let result = retain(storage.as_ref(), folder.path(), KEEP, &[]);
        let finished = !storage.stopped();
        if power_cut && !finished {
            storage.lose_unsynced();
        }
        assert_eq!(check_latest(folder.path()), 30, "after {stops} steps");
        let root = folder.path().join("checkpoints");
        for name in names(&root).iter().filter(|name| name.starts_with("step_")) {
            Reader::open_folder(&root.join(name)).unwrap().verify().unwrap();
        }
        assert_eq!(result.is_ok(), finished);
        save(folder.path(), 40);
        retain(&Disk, folder.path(), KEEP, &[]).unwrap();
        assert_eq!(names(&root), ["latest", "step_00000040"], "after {stops} steps");
        if finished {
            assert!(
                stops >= 5,
                "two renames, a sync and two deletions are more than {stops} steps"
            );
            break;
        }
    }
}

#[test]
fn a_process_that_dies_while_it_deletes_old_checkpoints_leaves_no_half_of_one() {
    stop_a_deletion_after_each_step(false);
}

#[test]
fn a_power_cut_while_old_checkpoints_are_deleted_leaves_no_half_of_one() {
    stop_a_deletion_after_each_step(true);
}
