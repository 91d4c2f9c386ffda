//! The steps that touch the disk, so that a test can stop after each of them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::sys::signal::{SigHandler, Signal, signal};

use super::CheckpointError;

/// The operations of a save. Each is one step that a crash can come after.
pub trait Storage: Send + Sync {
    /// Creates a folder and those above it; one that exists is fine.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// Writes a new file, or replaces its content. Not yet on the disk.
    fn write(&self, path: &Path, content: &[&[u8]]) -> io::Result<()>;
    /// Writes more at the end of a file. Not yet on the disk.
    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()>;
    /// Puts the content of a file on the disk.
    fn sync_file(&self, path: &Path) -> io::Result<()>;
    /// Puts the names in a folder on the disk.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Puts all that was written to the file system of `opened` on its disk. An error of a write is told to a descriptor
    /// that was open by then.
    fn sync_file_system(&self, opened: &File) -> io::Result<()>;
    /// Renames a file, replacing what is there, or a folder, to a name that is free.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Deletes a file; one that is not there is fine.
    fn remove_file(&self, path: &Path) -> io::Result<()>;
    /// Deletes a folder with all that is in it; one that is not there is fine.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Storage for Disk {
    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn write(&self, path: &Path, content: &[&[u8]]) -> io::Result<()> {
        let mut file = File::create(path)?;
        content.iter().try_for_each(|bytes| file.write_all(bytes))
    }

    fn append(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        OpenOptions::new().append(true).open(path)?.write_all(bytes)
    }

    fn sync_file(&self, path: &Path) -> io::Result<()> {
        // `fsync` concerns the file, whichever descriptor wrote it.
        OpenOptions::new().write(true).open(path)?.sync_all()
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn sync_file_system(&self, opened: &File) -> io::Result<()> {
        Ok(nix::unistd::syncfs(opened)?)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        unless_gone(fs::remove_file(path))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        unless_gone(fs::remove_dir_all(path))
    }
}

fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Opens a file to read it. A pipe would otherwise be waited for until somebody writes to it.
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "not a regular file"));
    }
    Ok(file)
}

/// Writes a file, and puts its content on the disk.
pub(super) fn write_file(
    storage: &dyn Storage,
    path: &Path,
    content: &[&[u8]],
) -> Result<(), CheckpointError> {
    let failed = |doing| move |e: io::Error| CheckpointError::io(doing, path, &e);
    storage.write(path, content).map_err(failed("write"))?;
    storage.sync_file(path).map_err(failed("sync"))
}

/// [`Storage::sync_folder`], with the error that people read.
pub(super) fn sync_folder(storage: &dyn Storage, path: &Path) -> Result<(), CheckpointError> {
    storage
        .sync_folder(path)
        .map_err(|e| CheckpointError::io("sync", path, &e))
}

/// [`Storage::rename`], with the error that people read.
pub(super) fn rename(storage: &dyn Storage, from: &Path, to: &Path) -> Result<(), CheckpointError> {
    storage
        .rename(from, to)
        .map_err(|e| CheckpointError::io("rename to", to, &e))
}

/// Ignores SIGXFSZ in this process and those that it starts, so that a write beyond a limit on file sizes (`ulimit -f`)
/// fails with an error: training must not be lost to a checkpoint that does not fit. For the main of a program that
/// writes checkpoints, before it does.
#[allow(unsafe_code, reason = "signal dispositions")]
pub fn ignore_file_size_signal() {
    // SAFETY: ignoring a signal installs no handler.
    let before = unsafe { signal(Signal::SIGXFSZ, SigHandler::SigIgn) };
    debug_assert!(before.is_ok(), "SIGXFSZ can be ignored");
}
