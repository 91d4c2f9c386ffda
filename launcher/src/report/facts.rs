//! The facts that a failure report is made of.

use std::path::PathBuf;
use std::time::Duration;

use ddp_proto::ids::{Generation, GlobalRank};
use ddp_proto::rendezvous::{Failures, NodeStopped, WorkerExit};

use crate::agent::ExitReason;
use crate::supervise::ending::Ending;

pub(crate) struct ReportFacts {
    pub(crate) job_id: String,
    pub(crate) exit_reason: ExitReason,
    /// Name of the program as people call it.
    pub(crate) program: String,
    /// The file that every worker executes.
    pub(crate) executable: PathBuf,
    /// This node.
    pub(crate) hostname: String,
    /// The launcher did not see the output of the workers.
    pub(crate) output_unseen: bool,
    /// The first failure that this node saw itself, for an exit reason without one.
    pub(crate) local_failure: Option<WorkerExit>,
    /// Workers of this node in the last generation, in order of rank.
    pub(crate) local_ends: Vec<LocalEnd>,
    /// Those of them that did not end with 0, as the daemon gets them.
    pub(crate) stopped: NodeStopped,
    /// All failures of the job, as far as the daemon listed them.
    pub(crate) failures: Failures,
    /// The last generation that this node was in.
    pub(crate) generation: Generation,
    /// From the start of the last generation's workers to the first failure.
    pub(crate) ran_for: Option<Duration>,
    /// Error file of the first failure's worker, if it ran here.
    pub(crate) worker_file: Option<PathBuf>,
}

/// How one worker of this node ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct LocalEnd {
    pub(crate) rank: GlobalRank,
    pub(crate) ending: Ending,
    /// The last signal that the launcher sent it while it lived.
    pub(crate) sent: Option<i32>,
    /// Time from the first failure (or the beginning of the stop) to its end; none if it ended before.
    pub(crate) after: Option<Duration>,
    /// Its own message.
    pub(crate) message: Option<String>,
    /// It reports that another rank caused its failure.
    pub(crate) consequence: bool,
}

pub(crate) fn indented(message: &str, indent: &str) -> String {
    message.trim_end().replace('\n', &format!("\n{indent}"))
}

/// "1.2 s", "3 min 4 s"
pub(crate) fn seconds(time: Duration) -> String {
    match time.as_secs() {
        0..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min {} s", time.as_secs() / 60, time.as_secs() % 60),
        _ => format!("{} h {} min", time.as_secs() / 3600, time.as_secs() / 60 % 60),
    }
}
