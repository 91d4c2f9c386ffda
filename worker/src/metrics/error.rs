//! What can be wrong with the files of a run.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ddp_proto::utc;
use serde::{Deserialize, Serialize};

use crate::checkpoint;
use crate::session::StoreError;

/// A process that has the folder of a run, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Name of its machine.
    pub host: String,
    /// Its process id there.
    pub pid: u32,
    /// Run id of its job.
    pub run_id: String,
    /// When it took the folder, in seconds since the epoch.
    pub since: u64,
}

impl Holder {
    /// This process, for the job called `run_id`.
    pub(super) fn here(run_id: &str) -> Self {
        Self {
            host: host_name(),
            pid: std::process::id(),
            run_id: run_id.to_owned(),
            since: utc::seconds_of(SystemTime::now()),
        }
    }
}

/// Of this machine; empty if it has none.
pub(crate) fn host_name() -> String {
    let name = nix::unistd::gethostname().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            host,
            pid,
            run_id,
            since,
        } = self;
        let since = utc::written(*since);
        write!(f, "job `{run_id}`, process {pid} on `{host}`, since {since}")
    }
}

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
    /// The folder holds a run already.
    #[error(
        "`{}` already holds a run (found `{found}`)\n  hint: set `run.resume: auto` to continue it, `run.overwrite: true` to delete it, or another `run.out_dir`",
        path.display()
    )]
    HoldsRun {
        /// The folder.
        path: PathBuf,
        /// By which file it was noticed.
        found: &'static str,
    },
    /// Another process has the folder.
    #[error(
        "`{}` is in use: {}\n  hint: wait until that job has ended, or stop it; or set another `run.out_dir`",
        path.display(),
        holder.as_ref().map_or_else(|| "another job has locked it".into(), Holder::to_string)
    )]
    InUse {
        /// The folder.
        path: PathBuf,
        /// Who has it, if it has said so.
        holder: Option<Holder>,
    },
    /// `run.resume: require`, but there is nothing to resume.
    #[error(
        "`run.resume` is `require`, but `{}` holds no checkpoint\n  hint: set `run.resume: auto` to start where there is nothing to resume",
        path.display()
    )]
    NothingToResume {
        /// The folder.
        path: PathBuf,
    },
    /// The checkpoints in it cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::CheckpointError),
    /// Rank 0 could not prepare the folder.
    #[error("rank 0 could not prepare the folder of the run: {0}")]
    RankZero(String),
    /// This rank looks at another file system than rank 0.
    #[error(
        "rank {rank} does not see what rank 0 wrote to `{}` ({cause})\n  hint: all ranks must see the same `run.out_dir`: use a folder on a shared file system, by its absolute path",
        path.display()
    )]
    NotShared {
        /// The rank that does not see it.
        rank: u32,
        /// The folder, as that rank sees it.
        path: PathBuf,
        /// What it found instead.
        cause: String,
    },
    /// The ranks could not talk to each other.
    #[error("ranks could not agree on the folder of the run: {0}")]
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
            "\n  hint: set `run.out_dir` to a folder that this user may write to"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "\n  hint: a file stands where a folder is needed; set another `run.out_dir`"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "\n  hint: free space there, or set `run.out_dir` to another disk"
        }
        _ => "",
    }
}
