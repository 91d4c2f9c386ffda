//! The parts of a launch that exist from its beginning to its end.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;

use super::blocking_thread::BlockingThread;
use crate::cgroup::WorkerCgroup;
use crate::output::console::Console;
use crate::output::logs::LogError;
use crate::output::streams::Output;
use crate::plan::BoundPlan;
use crate::supervise::guardian::Guardian;

/// The launcher itself failed, not a worker.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The workers' program cannot be started.
    #[error(transparent)]
    Program(#[from] crate::spawn::program::SpawnError),
    /// The log directory, or the event log, cannot be used.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The system gives it no thread.
    #[error(
        "cannot start a thread: {0}\n  hint: raise `ulimit -u`, and the pids limit of the control group if there is one"
    )]
    Thread(#[source] io::Error),
    /// It may open no more files.
    #[error("cannot set up the launcher: {0}\n  hint: check `ulimit -n`")]
    Files(#[source] io::Error),
    /// The system refused something essential.
    #[error("cannot set up the launcher: {0}")]
    System(#[source] io::Error),
}

impl From<io::Error> for LaunchError {
    fn from(error: io::Error) -> Self {
        // Of all that is set up, only a thread is refused for now.
        match error.raw_os_error() {
            Some(libc::EAGAIN) => Self::Thread(error),
            Some(libc::EMFILE) => Self::Files(error),
            _ => Self::System(error),
        }
    }
}

/// What a launch has from its beginning to its very end.
#[derive(Clone)]
pub(super) struct LaunchContext<'a> {
    pub(super) plan: Arc<BoundPlan>,
    pub(super) guardian: &'a Guardian,
    /// Of this node.
    pub(super) hostname: String,
    /// Environment of the launcher itself.
    pub(super) inherited: Arc<[(OsString, OsString)]>,
    pub(super) console: Console,
    /// For processes, and for what is written about them.
    pub(super) processes: BlockingThread,
    /// For files of workers and for the error files: the loop waits for no file system once the launch has begun.
    pub(super) files: BlockingThread,
    pub(super) group: Option<Arc<WorkerCgroup>>,
}

impl<'a> LaunchContext<'a> {
    pub(super) fn new(plan: BoundPlan, guardian: &'a Guardian) -> io::Result<Self> {
        let hostname = nix::unistd::gethostname().map_err(io::Error::from)?;
        Ok(Self {
            processes: BlockingThread::start("processes")?,
            files: BlockingThread::start("files")?,
            console: Console::start(Output::standard(), plan.progress_bar)?,
            group: guardian.group().and_then(group_of_workers),
            plan: Arc::new(plan),
            guardian,
            hostname: hostname.to_string_lossy().into_owned(),
            inherited: std::env::vars_os().collect(),
        })
    }
}

/// The workers' control group; none where the system does not allow one.
fn group_of_workers(dir: &Path) -> Option<Arc<WorkerCgroup>> {
    let made = WorkerCgroup::create_among_leftovers(dir);
    made.inspect_err(|error| tracing::debug!("cannot create control group `{}`: {error}", dir.display()))
        .ok()
        .map(Arc::new)
}
