//! The lock of a run's folder: one process at a time holds it, for as long as it lives.
//!
//! `.run-token` names the run that took the folder last, and a lock on that file shows that the run lives: the system drops it with
//! the process, however that ends. The file is replaced as a whole, by one that is locked before it has its name; so
//! a process that gets the lock of a file checks that this file still has the name.

use std::fmt;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use ddp_proto::utc;
use serde::{Deserialize, Serialize};

use super::run_file::{RunFilesError, replace_prepared};
use crate::checkpoint::Fence;

/// First line: the name of the run that took the folder last, or nothing. Second line: a [`Holder`].
const FILE: &str = ".run-token";
/// Longest file that is believed.
const MAX_BYTES: u64 = 64 << 10;
/// A file system reports no event when a lock is free.
const POLL: Duration = Duration::from_millis(50);

/// The process that holds the folder of a run, as it describes itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Holder {
    /// Name of its machine.
    host: String,
    /// Its process id there.
    pid: u32,
    /// Run id of its job.
    run_id: String,
    /// The generation that it belongs to; 0 without a launcher.
    #[serde(default)]
    generation: u64,
    /// When it took the folder, in seconds since the epoch.
    since: u64,
}

impl Holder {
    /// This process, for a generation of the job called `run_id`.
    pub(super) fn here(run_id: &str, generation: u64) -> Self {
        Self {
            host: host_name(),
            pid: std::process::id(),
            run_id: run_id.to_owned(),
            generation,
            since: utc::seconds_of(SystemTime::now()),
        }
    }
}

/// Name of this machine; empty if it has none.
pub(crate) fn host_name() -> String {
    let name = nix::unistd::gethostname().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (since, host) = (utc::written(self.since), &self.host);
        write!(
            f,
            "job `{}`, process {} on `{host}`, since {since}",
            self.run_id, self.pid
        )
    }
}

/// This process holds the folder until this is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    path: PathBuf,
    /// The locked file; `None` on a file system without locks.
    file: Option<File>,
    /// No run was announced in it.
    is_empty: bool,
}

impl Hold {
    /// Takes the folder, which exists. If another process holds it, waits for it until the deadline.
    ///
    /// `succeeds` is the name of this run and the own generation. A process of an earlier one may hold the lock for ever:
    /// it was killed while a disk hangs, or it is stopped. Its [`Fence`] keeps it from replacing `latest`.
    pub(super) fn take(
        folder: &Path,
        succeeds: Option<(&str, u64)>,
        deadline: Instant,
    ) -> Result<Self, RunFilesError> {
        let path = folder.join(FILE);
        loop {
            if let Some(hold) = Self::try_take(&path)? {
                return Ok(hold);
            }
            if Instant::now() >= deadline {
                break;
            }
            std::thread::sleep(POLL);
        }
        let (token, holder) = read(&path)?;
        let folder = folder.display();
        let is_earlier = |own| holder.as_ref().is_none_or(|holder| holder.generation < own);
        if succeeds.is_some_and(|(name, generation)| name == token && is_earlier(generation)) {
            tracing::warn!(
                "a process from before the restart still holds `{folder}` ({}); it can no longer save a checkpoint; continuing",
                holder.map_or_else(|| "its owner is unknown".into(), |holder| holder.to_string()),
            );
            return Ok(Self {
                path,
                file: None,
                is_empty: false,
            });
        }
        let holder = holder.map_or_else(|| "locked by another job".into(), |holder| holder.to_string());
        Err(RunFilesError::InUse(format!(
            "`{folder}` is in use: {holder}\n  hint: wait until that job has ended, or stop it; or set a different `run.out_dir`"
        )))
    }

    /// `None` if another process holds it now.
    fn try_take(path: &Path) -> Result<Option<Self>, RunFilesError> {
        let failed = |doing| move |e: io::Error| RunFilesError::io(doing, path, &e);
        let mut options = OpenOptions::new();
        // Exclusive locks of a network file system need the right to write.
        options.read(true).write(true);
        let (file, is_empty) = match options.open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => match options.create_new(true).open(path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => return Ok(None),
                created => (created.map_err(failed("create"))?, true),
            },
            opened => (opened.map_err(failed("open"))?, false),
        };
        let is_locked = match lock(&file) {
            Err(TryLockError::WouldBlock) => return Ok(None),
            locked => locked.map_err(|e| failed("lock")(e.into()))?,
        };
        if is_locked && !has_name(&file, path).map_err(failed("inspect"))? {
            return Ok(None);
        }
        if !is_locked {
            tracing::warn!(
                "the file system of `{}` does not support locks: nothing keeps other jobs out of this directory",
                path.display()
            );
        }
        Ok(Some(Self {
            path: path.to_owned(),
            file: is_locked.then_some(file),
            is_empty,
        }))
    }

    /// True if the run called `token` was the last to announce itself.
    pub(super) fn is_of(&self, token: &str) -> Result<bool, RunFilesError> {
        read(&self.path).map(|(found, _)| found == token)
    }

    /// Writes which process holds the folder, and for which run; `None` if it is only prepared for one. From here on,
    /// later lives of that run continue with what they find.
    pub(super) fn announce(&mut self, token: Option<&str>, holder: &Holder) -> Result<Fence, RunFilesError> {
        // Text and numbers only: cannot fail.
        let words = serde_json::to_string(holder).expect("a holder serialises");
        let text = format!("{}\n{words}\n", token.unwrap_or_default());
        let mut locked = false;
        let file = replace_prepared(&self.path, text.as_bytes(), |file| {
            locked = lock(file)?;
            Ok(())
        })?;
        self.file = locked.then_some(file);
        self.is_empty = token.is_none();
        Ok(Fence::new(self.path.clone(), text))
    }

    /// Gives the folder back, as it was found if no run was announced.
    pub(super) fn release(self) {
        if self.is_empty {
            // A file that names no run blocks no job.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// True if the lock is ours, false on a file system without locks.
fn lock(file: &File) -> Result<bool, TryLockError> {
    match file.try_lock() {
        Ok(()) => Ok(true),
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Interrupted => {
            Err(TryLockError::WouldBlock)
        }
        Err(TryLockError::Error(e)) if is_without_locks(&e) => Ok(false),
        Err(e) => Err(e),
    }
}

/// Lustre without `flock`, NFS without its lock manager.
fn is_without_locks(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::Unsupported || error.raw_os_error() == Some(libc::ENOLCK)
}

/// False if another file has the name, or none.
fn has_name(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// The run that was announced last and its holder, as far as they can be read. A missing file gives an empty name.
fn read(path: &Path) -> Result<(String, Option<Holder>), RunFilesError> {
    let mut bytes = Vec::new();
    let found = File::open(path).and_then(|file| file.take(MAX_BYTES).read_to_end(&mut bytes));
    match found {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(RunFilesError::io("read", path, &e)),
        _ => {
            let text = String::from_utf8_lossy(&bytes);
            let (token, holder) = text.split_once('\n').unwrap_or((text.as_ref(), ""));
            Ok((token.to_owned(), serde_json::from_str(holder).ok()))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without waiting.
    fn take(folder: &Path, succeeds: Option<(&str, u64)>) -> Result<Hold, RunFilesError> {
        Hold::take(folder, succeeds, Instant::now())
    }

    fn holder() -> Holder {
        holder_of(1)
    }

    fn holder_of(generation: u64) -> Holder {
        Holder {
            generation,
            host: "node-7".into(),
            pid: 4711,
            run_id: "nightly".into(),
            since: 1_795_171_516,
        }
    }

    #[test]
    fn a_folder_is_of_one_process_and_others_are_told_whose() {
        let folder = tempfile::tempdir().unwrap();
        let mut hold = take(folder.path(), None).unwrap();
        hold.announce(Some("a"), &holder()).unwrap();
        let refused = take(folder.path(), Some(("b", 2))).unwrap_err();
        let words = refused
            .to_string()
            .replace(folder.path().to_str().unwrap(), "DIR");
        insta::assert_snapshot!(words, @r"
        `DIR` is in use: job `nightly`, process 4711 on `node-7`, since 2026-11-20 10:45:16 UTC
          hint: wait until that job has ended, or stop it; or set a different `run.out_dir`
        ");
        drop(hold);
        let hold = take(folder.path(), None).unwrap();
        assert!(hold.is_of("a").unwrap(), "what was announced stays");
    }

    #[test]
    fn whoever_waits_gets_a_folder_that_becomes_free() {
        let folder = tempfile::tempdir().unwrap();
        let mut hold = take(folder.path(), None).unwrap();
        std::thread::scope(|scope| {
            let patience = Instant::now() + Duration::from_mins(1);
            let path = folder.path();
            let waiting = scope.spawn(move || Hold::take(path, None, patience).map(drop));
            let waited_for = File::open(path.join(FILE)).unwrap();
            hold.announce(Some("a"), &holder()).unwrap();
            // Who waits for the lock of this one is not to believe it.
            assert!(!has_name(&waited_for, &path.join(FILE)).unwrap());
            drop(hold);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_later_generation_takes_the_folder_and_the_earlier_one_can_save_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let mut killed = take(folder.path(), None).unwrap();
        let earlier = killed.announce(Some("a"), &holder_of(1)).unwrap();
        earlier.check().unwrap();
        let mut heir = take(folder.path(), Some(("a", 2))).unwrap();
        let later = heir.announce(Some("a"), &holder_of(2)).unwrap();
        later.check().unwrap();
        let words = earlier.check().unwrap_err().to_string();
        assert!(
            words.starts_with("another process has taken the directory"),
            "{words}"
        );
        drop(killed);
        for other in [("b", 3), ("a", 1), ("a", 2)] {
            let refused = take(folder.path(), Some(other));
            assert!(matches!(refused, Err(RunFilesError::InUse { .. })), "{other:?}");
        }
        drop(heir);
        assert!(take(folder.path(), Some(("b", 1))).is_ok());
    }

    #[test]
    fn a_hold_without_a_run_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut hold = take(folder.path(), None).unwrap();
        hold.announce(None, &holder()).unwrap();
        hold.release();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
