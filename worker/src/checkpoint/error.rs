//! What can go wrong with a checkpoint.

use std::io;
use std::path::{Path, PathBuf};

use crate::device::DType;

/// A checkpoint could not be written, or cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused.
    #[error("cannot {doing} `{}`: {cause}{}", path.display(), hint_of(*kind))]
    Io {
        /// The operation that failed, as a verb.
        doing: &'static str,
        /// Its path.
        path: PathBuf,
        /// The system's message.
        cause: String,
        /// Its kind, for the hint.
        kind: io::ErrorKind,
    },
    /// The run has no checkpoint.
    #[error("`{}` holds no checkpoint", path.display())]
    None {
        /// The `checkpoints` folder.
        path: PathBuf,
    },
    /// A file of the checkpoint is gone, or holds nothing that can be used.
    #[error(
        "checkpoint file `{}`{what}{}",
        path.display(),
        hint.as_ref().map_or_else(String::new, |hint| format!("\n  hint: {hint}"))
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it: the rest of the sentence.
        what: String,
        /// What to do, if it is a file of a run's checkpoint.
        hint: Option<String>,
    },
    /// The checkpoint has another format, model or optimizer.
    #[error("checkpoint `{}`{what}\n  hint: {hint}", path.display())]
    Foreign {
        /// The checkpoint, or its manifest.
        path: PathBuf,
        /// How it differs: the rest of the sentence.
        what: String,
        /// What to do.
        hint: &'static str,
    },
    /// The path of a new folder is taken.
    #[error(
        "`{}` already exists\n  hint: give a directory that does not exist yet, or delete it",
        path.display()
    )]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// The disk, or the network file system, takes nothing any more.
    #[error(
        "{0}\n  hint: check whether the disk or file server responds (`dmesg`); `train.checkpoint_timeout_s` limits the wait"
    )]
    Stalled(String),
    /// The checkpoint was not saved, and the disk is not to blame: its parts do not make up the state, the state cannot
    /// be read, or the run no longer needs it.
    #[error("{0}")]
    NotSaved(String),
    /// A bug of the caller.
    #[error("{0}")]
    Misuse(String),
}

impl CheckpointError {
    pub(super) fn io(doing: &'static str, path: &Path, error: &io::Error) -> Self {
        Self::Io {
            doing,
            path: path.to_owned(),
            cause: error.to_string(),
            kind: error.kind(),
        }
    }

    /// A file that a checkpoint must have cannot be read.
    pub(super) fn unread(path: &Path, error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Self::of_file(path, " is missing"),
            io::ErrorKind::FileTooLarge | io::ErrorKind::InvalidData => {
                Self::damaged(path, error.to_string())
            }
            _ => Self::io("read", path, error),
        }
    }

    pub(super) fn damaged(path: &Path, what: impl AsRef<str>) -> Self {
        Self::of_file(path, format!(" is damaged: {}", what.as_ref()))
    }

    /// Something is wrong with a file; `what` is the rest of the sentence that begins with its name.
    pub(super) fn of_file(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            what: what.into(),
            hint: out_dir_of(path).map(|out_dir| {
                format!(
                    "restore the file, or go back to the newest complete checkpoint: `ddp-train ckpt rewind {}`",
                    out_dir.display()
                )
            }),
        }
    }

    /// The checkpoint is no longer needed: the generation is over, or the run is.
    pub(crate) fn given_up(step: u64, cause: impl std::fmt::Display) -> Self {
        Self::NotSaved(format!("the checkpoint of step {step} was abandoned: {cause}"))
    }

    /// The file system has not answered a request for the checkpoint of `step` for `seconds`.
    pub(crate) fn stalled(step: u64, request: &str, seconds: f64) -> Self {
        Self::Stalled(format!(
            "cannot write the checkpoint of step {step}: the file system has not responded for {seconds} s to {request}"
        ))
    }

    /// The file system has not answered since the save of step `before`.
    pub(crate) fn stuck(step: u64, before: u64, request: &str) -> Self {
        Self::Stalled(format!(
            "cannot start the checkpoint of step {step}: the file system has still not responded to {request} for that of step {before}"
        ))
    }
}

/// The directory of the run to which a file of a checkpoint belongs; `None` outside of a run.
fn out_dir_of(file: &Path) -> Option<&Path> {
    let root = file.parent()?.parent()?;
    let out_dir = root.parent().filter(|_| root.ends_with("checkpoints"))?;
    Some(ddp_proto::paths::or_here(out_dir))
}

/// `f32[2, 3]`
pub(super) fn type_and_shape(dtype: DType, shape: &[u64]) -> String {
    format!("{dtype}{shape:?}")
}

fn hint_of(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "\n  hint: check its owner and mode: the user of a run must be able to read and write its `run.out_dir`"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "\n  hint: free some space there"
        }
        _ => "",
    }
}
