//! What can go wrong with a checkpoint.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::device::DType;

/// A checkpoint could not be written, or cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CheckpointError {
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
    /// There is none.
    #[error("`{}` holds no checkpoint", path.display())]
    None {
        /// The `checkpoints` folder.
        path: PathBuf,
    },
    /// A file of the checkpoint says nothing that can be used.
    #[error("checkpoint file `{}` is damaged: {what}\n  hint: {}", path.display(), RESTORE)]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// A file of the checkpoint is gone.
    #[error("checkpoint file `{}` is missing\n  hint: {}", path.display(), RESTORE)]
    Lost {
        /// The file.
        path: PathBuf,
    },
    /// Written by a build that we cannot read.
    #[error(
        "checkpoint `{}` has format version {found}, this build reads up to {newest}\n  hint: resume with the release that wrote it, or a newer one",
        path.display()
    )]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The newest version that this build reads.
        newest: u32,
    },
    /// A file is shorter or longer than it was when it was written.
    #[error("checkpoint file `{}` has {found} bytes, expected {expected}: truncated or overwritten\n  hint: {}", path.display(), RESTORE)]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes now.
        found: u64,
        /// Bytes when it was written.
        expected: u64,
    },
    /// The content changed.
    #[error(
        "checkpoint file `{}`: the content of tensor `{tensor}`, elements {}..{}, does not match its hash\n  hint: {}",
        path.display(), range.start, range.end, RESTORE
    )]
    Hash {
        /// The file.
        path: PathBuf,
        /// Name of the tensor, and the region, unless that is the whole.
        tensor: String,
        /// Damaged elements of its region.
        range: Range<u64>,
    },
    /// The checkpoint has no tensor of this name.
    #[error("checkpoint `{}` has no tensor `{tensor}`\n  hint: it belongs to another model or optimizer", path.display())]
    Missing {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// The checkpoint has a tensor that nobody asks for.
    #[error("checkpoint `{}` has a tensor `{tensor}`, which this model does not have\n  hint: it belongs to another model or optimizer", path.display())]
    Unexpected {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// A tensor has another shape or type.
    #[error(
        "checkpoint `{}`: tensor `{tensor}` is {found}, this model's is {expected}\n  hint: resume with the model section that it was written with",
        path.display()
    )]
    Differs {
        /// The checkpoint.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Type and shape in the checkpoint.
        found: String,
        /// Type and shape of the model.
        expected: String,
    },
    /// What the ranks wrote does not make up the tensors.
    #[error("the regions and ranges of tensor `{tensor}` do not make it up: {what}")]
    Coverage {
        /// Name of the tensor.
        tensor: String,
        /// Where is the gap or the overlap.
        what: String,
    },
    /// Where a new folder is to be, there is something already.
    #[error(
        "`{}` exists already\n  hint: name a folder that does not exist yet, or delete it",
        path.display()
    )]
    Occupied {
        /// The folder.
        path: PathBuf,
    },
    /// The run has gone on without this rank.
    #[error(
        "the checkpoint of step {step} is older than the latest, of step {latest}: a later life of the job wrote that one"
    )]
    Overtaken {
        /// The step that was to be saved.
        step: u64,
        /// The step that `latest` names.
        latest: u64,
    },
    /// The disk, or the network file system, takes nothing any more.
    #[error(
        "the checkpoint of step {step} cannot be written: the file system was asked to {doing} `{}` and has not answered for {seconds} s\n  hint: {}",
        path.display(), ALIVE
    )]
    Stalled {
        /// The step that was to be saved.
        step: u64,
        /// What was tried.
        doing: &'static str,
        /// On which path.
        path: PathBuf,
        /// How long, in seconds.
        seconds: f64,
    },
    /// It has not come back since an earlier save.
    #[error(
        "the checkpoint of step {step} cannot begin: for that of step {before} the file system was asked to {doing} `{}`, and it has still not answered\n  hint: {}",
        path.display(), ALIVE
    )]
    Stuck {
        /// The step that was to be saved.
        step: u64,
        /// The step whose save hangs.
        before: u64,
        /// What was tried.
        doing: &'static str,
        /// On which path.
        path: PathBuf,
    },
    /// Nobody wants the checkpoint any more: the generation is over, or the run is.
    #[error("the checkpoint of step {step} was given up: {cause}")]
    GivenUp {
        /// The step that was to be saved.
        step: u64,
        /// Why.
        cause: String,
    },
    /// The state of a rank cannot be copied to the host.
    #[error("the state of step {step} cannot be read for its checkpoint: {cause}")]
    Source {
        /// The step that was to be saved.
        step: u64,
        /// The device's words.
        cause: String,
    },
    /// A bug of the caller.
    #[error("{0}")]
    Misuse(String),
}

const RESTORE: &str =
    "restore the file, or write the name of an older `step_…` folder into `checkpoints/latest`";

const ALIVE: &str = "see whether the disk, or the server of the file system, is alive (`dmesg`); `train.checkpoint_timeout_s` says how long it is waited for";

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
            io::ErrorKind::NotFound => Self::Lost {
                path: path.to_owned(),
            },
            _ => Self::io("read", path, error),
        }
    }

    pub(super) fn damaged(path: &Path, what: impl Into<String>) -> Self {
        Self::Damaged {
            path: path.to_owned(),
            what: what.into(),
        }
    }
}

/// `f32[2, 3]`
pub(super) fn type_and_shape(dtype: DType, shape: &[u64]) -> String {
    format!("{dtype}{shape:?}")
}

fn hint_of(kind: io::ErrorKind) -> &'static str {
    match kind {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "\n  hint: see who owns it and what its mode allows: a run needs a `run.out_dir` that its user may read and write"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => {
            "\n  hint: free space there"
        }
        _ => "",
    }
}
