//! The parts of a launch that exist from its beginning to its end.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;

use ddp_proto::printable;

use crate::cgroup::WorkerCgroup;
use crate::output::console::Console;
use crate::output::reader::OutputReader;
use crate::output::streams::Output;
use crate::plan::BoundPlan;
use crate::supervise::guardian::Guardian;
use crate::threads::BlockingThread;

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
    pub(super) reader: OutputReader,
    /// For processes, and for what is written about them.
    pub(super) processes: BlockingThread,
    /// For files of workers and for the error files: the loop waits for no file system once the launch has begun.
    pub(super) files: BlockingThread,
    pub(super) group: Option<Arc<WorkerCgroup>>,
}

impl<'a> LaunchContext<'a> {
    pub(super) fn new(plan: BoundPlan, guardian: &'a Guardian) -> io::Result<Self> {
        let hostname = nix::unistd::gethostname().map_err(io::Error::from)?;
        let console = Console::start(Output::standard(), plan.progress_bar)?;
        Ok(Self {
            processes: BlockingThread::start("processes")?,
            files: BlockingThread::start("files")?,
            reader: OutputReader::start(console.clone())?,
            console,
            group: guardian.group().and_then(group_of_workers),
            plan: Arc::new(plan),
            guardian,
            hostname: hostname.to_string_lossy().into_owned(),
            inherited: std::env::vars_os().collect(),
        })
    }
}

/// The user of this process: USER, LOGNAME, else its number. Asking a directory service could hang.
pub fn user_name() -> String {
    let given = |name| std::env::var(name).ok().filter(|user| !user.is_empty());
    let user = given("USER").or_else(|| given("LOGNAME"));
    user.unwrap_or_else(|| format!("uid {}", nix::unistd::getuid()))
}

/// A text within the daemon's bounds for names: one line, at most 100 characters, no control characters.
pub(super) fn announced(text: &str) -> String {
    let line = printable::line(text).replace('\t', " ");
    line.chars().take(100).collect()
}

/// The workers' control group; none where the system does not allow one.
fn group_of_workers(dir: &Path) -> Option<Arc<WorkerCgroup>> {
    let made = WorkerCgroup::create_among_leftovers(dir);
    made.inspect_err(|error| tracing::debug!("cannot create control group `{}`: {error}", dir.display()))
        .ok()
        .map(Arc::new)
}
