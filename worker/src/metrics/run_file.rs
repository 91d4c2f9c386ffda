//! A file of a run: replaced as a whole, or deleted; and what can be wrong with the files of a run.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use crate::checkpoint;
use crate::session::StoreError;

/// The folder of a run, or a file in it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RunFilesError {
    /// The system refused.
    #[error("cannot {doing} `{}`: {cause}{}", path.display(), hint_of(*kind))]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's words.
        cause: String,
        /// Its kind, for the hint.
        kind: io::ErrorKind,
    },
    /// A file that is being written was deleted or moved, perhaps with its directory.
    #[error("`{}` was deleted or moved during the run\n  hint: keep the run's directory until the run has ended", .0.display())]
    Gone(PathBuf),
    /// Another process has the folder.
    #[error("{0}")]
    InUse(String),
    /// The folder is not one that this run may have, or not the same on all ranks. The sentence has the next step.
    #[error("{0}")]
    Refused(String),
    /// `run.resume: require`, but there is nothing to resume.
    #[error(
        "`run.resume` is `require`, but `{}` holds no checkpoint\n  hint: set `run.out_dir` to the directory of the run to continue, or `run.resume: auto` to start a new one",
        .0.display()
    )]
    NothingToResume(PathBuf),
    /// The checkpoints in it cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::CheckpointError),
    /// Rank 0 could not prepare the folder.
    #[error("rank 0 could not prepare the run's directory: {0}")]
    RankZero(String),
    /// The ranks could not talk to each other.
    #[error("ranks could not agree on the run's directory: {0}")]
    Store(#[from] StoreError),
}

impl RunFilesError {
    pub(super) fn io(doing: &'static str, path: &Path, error: &io::Error) -> Self {
        Self::Io {
            doing,
            path: path.to_owned(),
            cause: error.to_string(),
            kind: error.kind(),
        }
    }
}

fn hint_of(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "\n  hint: set `run.out_dir` to a directory that this user may write to"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "\n  hint: a file exists where a directory is needed; set a different `run.out_dir`"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "\n  hint: free some space there, or set `run.out_dir` to a different disk"
        }
        _ => "",
    }
}

/// Writes `bytes` beside `path`, syncs them, and renames them over it. After a crash at any point `path`
/// has the old content or the new one.
pub(super) fn replace_file(path: &Path, bytes: &[u8]) -> Result<(), RunFilesError> {
    replace_prepared(path, bytes, |_| Ok(())).map(drop)
}

/// Replaces the file as [`replace_file`] does, after `prepare` was called with the new file, which no other process can see yet. Returns it.
pub(super) fn replace_prepared(
    path: &Path,
    bytes: &[u8],
    prepare: impl FnOnce(&File) -> io::Result<()>,
) -> Result<File, RunFilesError> {
    let temporary = path.with_added_extension("tmp");
    let write = || {
        // Left by a crash, and perhaps still held open by a process that is dying.
        let _ = fs::remove_file(&temporary);
        let mut file = File::create(&temporary)?;
        prepare(&file)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)?;
        File::open(ddp_proto::paths::folder_of(path))?.sync_all()?;
        Ok(file)
    };
    write().map_err(|e| {
        // The error that counts is on its way; a left-over would only be overwritten next time.
        let _ = fs::remove_file(&temporary);
        RunFilesError::io("write", path, &e)
    })
}

/// Deletes a file; one that is not there is fine.
pub(super) fn delete_file(path: &Path) -> Result<(), RunFilesError> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(RunFilesError::io("delete", path, &e)),
        _ => Ok(()),
    }
}
