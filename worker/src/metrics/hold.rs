//! Who has the folder of a run: one process at a time, for as long as it lives.
//!
//! `.run-token` says which run took the folder last, and a lock on that file that the run lives: the system drops it with
//! the process, however that ends. The file is replaced as a whole, by one that is locked before it has its name; so
//! whoever gets the lock of a file looks whether that one still has the name.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::error::{Holder, RunFilesError};

/// First line: the name of the run that took the folder last, or nothing. Second line: a [`Holder`].
const FILE: &str = ".run-token";
/// Longest file that is believed.
const MAX_BYTES: u64 = 64 << 10;
/// A file system tells nobody when a lock is free.
const POLL: Duration = Duration::from_millis(50);

/// The folder is this process's until this is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    path: PathBuf,
    /// Whose lock is ours; none on a file system without locks.
    file: Option<File>,
    /// Nobody has announced a run in it.
    is_empty: bool,
}

/// Who asks for a folder.
#[derive(Clone, Copy)]
pub(super) struct Claim<'a> {
    /// A process that announced this run is a former life of the same one. The launcher has killed it, and what a killed
    /// process still waits for, a disk that hangs, may keep it, and its lock, for ever.
    pub(super) succeeds: Option<&'a str>,
    /// When whoever has it is taken to stay.
    pub(super) deadline: Instant,
}

impl Hold {
    /// Takes the folder, which exists. One that another process has is waited for until the deadline.
    pub(super) fn take(folder: &Path, candidate: Claim<'_>) -> Result<Self, RunFilesError> {
        let path = folder.join(FILE);
        loop {
            if let Some(hold) = Self::try_take(&path)? {
                return Ok(hold);
            }
            if Instant::now() >= candidate.deadline {
                break;
            }
            std::thread::sleep(POLL);
        }
        let (token, holder) = read(&path)?;
        if candidate.succeeds.is_some_and(|own| own == token) {
            tracing::warn!(
                "a process of an earlier life of this job still has `{}` ({}); it was killed, and this life goes on",
                folder.display(),
                holder.map_or_else(
                    || "it has not said who it is".to_owned(),
                    |holder| holder.to_string()
                ),
            );
            return Ok(Self {
                path,
                file: None,
                is_empty: false,
            });
        }
        Err(RunFilesError::InUse {
            path: folder.to_owned(),
            holder,
        })
    }

    /// None if another process has it now.
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
        let file = match lock(&file) {
            Lock::Ours => Some(file),
            Lock::Unknown => None,
            Lock::Held => return Ok(None),
            Lock::Failed(e) => return Err(failed("lock")(e)),
        };
        if let Some(file) = &file
            && !has_name(file, path).map_err(failed("inspect"))?
        {
            return Ok(None);
        }
        if file.is_none() {
            tracing::warn!(
                "the file system of `{}` has no locks: nothing would keep another job out of this folder",
                path.display()
            );
        }
        let path = path.to_owned();
        Ok(Some(Self { path, file, is_empty }))
    }

    /// True if the run called `token` was the last to announce itself.
    pub(super) fn is_of(&self, token: &str) -> Result<bool, RunFilesError> {
        read(&self.path).map(|(found, _)| found == token)
    }

    /// Says who has the folder, and for which run; for none if it is only prepared for one. From here on the later
    /// lives of that run go on with what they find.
    pub(super) fn announce(&mut self, token: Option<&str>, holder: &Holder) -> Result<(), RunFilesError> {
        // Text and numbers only: cannot fail.
        let words = serde_json::to_string(holder).expect("a holder serialises");
        let text = format!("{}\n{words}\n", token.unwrap_or_default());
        let mut locked = false;
        let file = replace_prepared(&self.path, text.as_bytes(), |file| match lock(file) {
            Lock::Ours => {
                locked = true;
                Ok(())
            }
            Lock::Unknown => Ok(()),
            Lock::Held => Err(io::ErrorKind::WouldBlock.into()),
            Lock::Failed(e) => Err(e),
        })?;
        self.file = locked.then_some(file);
        self.is_empty = token.is_none();
        Ok(())
    }

    /// Gives the folder back, as it was found if no run was announced.
    pub(super) fn release(self) {
        if self.is_empty {
            // A file of nobody is in nobody's way.
            let _ = fs::remove_file(&self.path);
        }
    }
}

enum Lock {
    Ours,
    Held,
    /// The file system has none.
    Unknown,
    Failed(io::Error),
}

fn lock(file: &File) -> Lock {
    match file.try_lock() {
        Ok(()) => Lock::Ours,
        Err(TryLockError::WouldBlock) => Lock::Held,
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Interrupted => Lock::Held,
        Err(TryLockError::Error(e)) if is_without_locks(&e) => Lock::Unknown,
        Err(TryLockError::Error(e)) => Lock::Failed(e),
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

/// The run that was announced last, and by whom, as far as it can be read. A file that is gone, or no text, is of nobody.
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

/// Writes `bytes` beside `path`, syncs them, and renames them over it. After a crash at any point `path`
/// has the old content or the new one.
pub(super) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    replace_prepared(path, bytes, |_| Ok(())).map(drop)
}

/// The same with a file that `prepare` has had before anybody else can see it. Returns the new file.
fn replace_prepared(
    path: &Path,
    bytes: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> Result<File, RunFilesError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".tmp");
    let temporary = path.with_file_name(name);
    let written = write_and_rename(path, &temporary, bytes, prepare);
    if written.is_err() {
        // The error that counts is on its way; a left-over would only be overwritten next time.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(|e| RunFilesError::io("write", path, &e))
}

fn write_and_rename(
    path: &Path,
    temporary: &Path,
    bytes: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> io::Result<File> {
    // Left by a crash, and perhaps still held open by a process that is dying.
    let _ = fs::remove_file(temporary);
    let mut file = File::create(temporary)?;
    prepare(&file)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(temporary, path)?;
    let folder = path
        .parent()
        .filter(|p| !p.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    File::open(folder)?.sync_all()?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at_once(succeeds: Option<&str>) -> Claim<'_> {
        Claim {
            succeeds,
            deadline: Instant::now(),
        }
    }

    fn holder() -> Holder {
        Holder {
            host: "node-7".into(),
            pid: 4711,
            run_id: "nightly".into(),
            since: 1_795_171_516,
        }
    }

    #[test]
    fn a_folder_is_of_one_process_and_others_are_told_whose() {
        let folder = tempfile::tempdir().unwrap();
        let mut hold = Hold::take(folder.path(), at_once(None)).unwrap();
        hold.announce(Some("a"), &holder()).unwrap();
        let refused = Hold::take(folder.path(), at_once(Some("b"))).unwrap_err();
        let words = refused
            .to_string()
            .replace(folder.path().to_str().unwrap(), "DIR");
        insta::assert_snapshot!(words, @r"
        `DIR` is in use: job `nightly`, process 4711 on `node-7`, since 2026-11-20 10:45:16 UTC
          hint: wait until that job has ended, or stop it; or set another `run.out_dir`
        ");
        drop(hold);
        let hold = Hold::take(folder.path(), at_once(None)).unwrap();
        assert!(hold.is_of("a").unwrap(), "what was announced stays");
    }

    #[test]
    fn whoever_waits_gets_a_folder_that_becomes_free() {
        let folder = tempfile::tempdir().unwrap();
        let mut hold = Hold::take(folder.path(), at_once(None)).unwrap();
        std::thread::scope(|scope| {
            let patient = Claim {
                succeeds: None,
                deadline: Instant::now() + Duration::from_mins(1),
            };
            let path = folder.path();
            let waiting = scope.spawn(move || Hold::take(path, patient).map(drop));
            let waited_for = File::open(path.join(FILE)).unwrap();
            hold.announce(Some("a"), &holder()).unwrap();
            // Who waits for the lock of this one is not to believe it.
            assert!(!has_name(&waited_for, &path.join(FILE)).unwrap());
            drop(hold);
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_killed_life_of_the_same_run_that_keeps_its_lock_is_succeeded_and_nobody_else_comes_in() {
        let folder = tempfile::tempdir().unwrap();
        let mut killed = Hold::take(folder.path(), at_once(None)).unwrap();
        killed.announce(Some("a"), &holder()).unwrap();
        let mut heir = Hold::take(folder.path(), at_once(Some("a"))).unwrap();
        heir.announce(Some("a"), &holder()).unwrap();
        drop(killed);
        assert!(matches!(
            Hold::take(folder.path(), at_once(Some("b"))),
            Err(RunFilesError::InUse { .. })
        ));
        drop(heir);
        assert!(Hold::take(folder.path(), at_once(Some("b"))).is_ok());
    }

    #[test]
    fn a_hold_without_a_run_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut hold = Hold::take(folder.path(), at_once(None)).unwrap();
        hold.announce(None, &holder()).unwrap();
        hold.release();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
