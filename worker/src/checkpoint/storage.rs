//! The steps of a save that touch the disk, as data, so that a test can stop after each of them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::sys::signal::{SigHandler, Signal, signal};

use super::CheckpointError;

/// One step of a save that touches the disk. A crash can come after each.
#[derive(Clone, Copy, Debug)]
pub enum DiskStep<'a> {
    /// Creates a folder and those above it; one that exists is fine.
    CreateFolder(&'a Path),
    /// Writes a new file, or replaces its content. Not yet on the disk.
    Write(&'a Path, &'a [u8]),
    /// Writes more at the end of a file. Not yet on the disk.
    Append(&'a Path, &'a [u8]),
    /// Puts the content of a file on the disk.
    SyncFile(&'a Path),
    /// Puts the names in a folder on the disk.
    SyncFolder(&'a Path),
    /// Renames a file, replacing what is there, or a folder, to a name that is free.
    Rename(&'a Path, &'a Path),
    /// Deletes a file, if it exists.
    RemoveFile(&'a Path),
    /// Deletes a folder with its content, if it exists.
    RemoveFolder(&'a Path),
}

impl<'a> DiskStep<'a> {
    /// What the file system is asked for, as in "cannot write", and on which path.
    pub fn words(&self) -> (&'static str, &'a Path) {
        match *self {
            Self::CreateFolder(path) => ("create", path),
            Self::Write(path, _) | Self::Append(path, _) => ("write", path),
            Self::SyncFile(path) | Self::SyncFolder(path) => ("sync", path),
            Self::Rename(_, to) => ("rename to", to),
            Self::RemoveFile(path) | Self::RemoveFolder(path) => ("delete", path),
        }
    }
}

/// Takes the steps of a save.
pub trait Storage: Send + Sync {
    /// Takes one step.
    fn perform(&self, step: DiskStep<'_>) -> io::Result<()>;

    /// [`Storage::perform`], with the error that people read.
    fn run(&self, step: DiskStep<'_>) -> Result<(), CheckpointError> {
        self.perform(step).map_err(|error| {
            let (doing, path) = step.words();
            CheckpointError::io(doing, path, &error)
        })
    }
}

/// The file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl Storage for Disk {
    fn perform(&self, step: DiskStep<'_>) -> io::Result<()> {
        match step {
            DiskStep::CreateFolder(path) => fs::create_dir_all(path),
            DiskStep::Write(path, content) => File::create(path)?.write_all(content),
            DiskStep::Append(path, bytes) => OpenOptions::new().append(true).open(path)?.write_all(bytes),
            // `fsync` concerns the file, whichever descriptor wrote it.
            DiskStep::SyncFile(path) => OpenOptions::new().write(true).open(path)?.sync_all(),
            DiskStep::SyncFolder(path) => File::open(path)?.sync_all(),
            DiskStep::Rename(from, to) => fs::rename(from, to),
            DiskStep::RemoveFile(path) => unless_gone(fs::remove_file(path)),
            DiskStep::RemoveFolder(path) => unless_gone(fs::remove_dir_all(path)),
        }
    }
}

fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Writes a file, and puts its content on the disk.
pub(super) fn write_file(storage: &dyn Storage, path: &Path, content: &[u8]) -> Result<(), CheckpointError> {
    storage.run(DiskStep::Write(path, content))?;
    storage.run(DiskStep::SyncFile(path))
}

/// Opens a regular file to read it, without waiting: opening a pipe would block until another process writes to it.
pub(crate) fn open_to_read(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let file = options.read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidData, "not a regular file"));
    }
    Ok(file)
}

/// Reads a file of at most `most` bytes. A longer one is [`ErrorKind::FileTooLarge`].
pub fn read_bounded(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_to_read(path)?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        let what = format!("it is longer than {most} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
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
