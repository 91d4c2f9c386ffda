//! All failures of the job, as the daemon listed them: in full for programs; for people, those of other nodes.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::rendezvous::{Failure, WorkerExit};
use serde::Serialize;

use crate::agent::ExitReason;
use crate::report::facts::{ReportFacts, seconds};
use crate::supervise::ending::Ending;

/// Failures of other nodes that the report tells one by one.
const MAX_REPORTED: usize = 4;

/// One of `failures` in `error.json`.
#[derive(Debug, Serialize)]
pub(crate) struct Record<'a> {
    generation: u64,
    node: &'a str,
    /// `failed`, or `stopped` by its launcher after a failure of another one.
    kind: &'static str,
    /// The node itself is gone, for this reason; then there is no worker to report.
    node_gone: Option<&'a str>,
    #[serde(flatten)]
    worker: Option<WorkerRecord<'a>>,
    /// When the report reached the daemon, by its monotonic clock: time after the first report of the list. None if the
    /// daemon did not list it.
    arrived_ns: Option<u64>,
    /// When it happened, by the same clock and from the same origin: less than 0 if the first report of the list came
    /// later.
    happened_ns: Option<i64>,
}

/// How one worker ended, in `error.json`.
#[derive(Debug, Serialize)]
pub(crate) struct WorkerRecord<'a> {
    rank: u32,
    local_rank: u32,
    pid: u32,
    exit_code: Option<i32>,
    signal: Option<i32>,
    core_dumped: bool,
    /// A SIGKILL that may have been the OOM killer's.
    out_of_memory: bool,
    /// It says that it failed only because another rank did.
    consequence: bool,
    /// The last signal that its launcher sent it while it lived: a victim, no failure.
    stopped_with: Option<i32>,
    /// By the clock of its node.
    unix_time_ns: u64,
    message: &'a str,
    log_file: &'a str,
}

impl<'a> Record<'a> {
    pub(crate) fn new(failure: &'a Failure) -> Self {
        let exit = failure.exit.as_ref();
        Self {
            node_gone: exit.is_none().then_some(&*failure.node_gone),
            arrived_ns: Some(failure.arrived_ns),
            happened_ns: Some(failure.happened_ns),
            ..Self::of_node(failure.generation, &failure.hostname, exit)
        }
    }

    /// The end of a worker that the daemon did not list.
    pub(crate) fn of_node(generation: u64, node: &'a str, exit: Option<&'a WorkerExit>) -> Self {
        let is_stopped = exit.is_some_and(|exit| exit.stopped_with.is_some());
        Self {
            generation,
            node,
            kind: if is_stopped { "stopped" } else { "failed" },
            node_gone: None,
            worker: exit.map(WorkerRecord::new),
            arrived_ns: None,
            happened_ns: None,
        }
    }

    /// True if it tells how this rank of that generation ended.
    pub(crate) fn is_of(&self, generation: u64, rank: u32) -> bool {
        self.generation == generation && self.worker.as_ref().is_some_and(|worker| worker.rank == rank)
    }
}

impl<'a> WorkerRecord<'a> {
    pub(crate) fn new(exit: &'a WorkerExit) -> Self {
        Self {
            rank: exit.rank,
            local_rank: exit.local_rank,
            pid: exit.pid,
            exit_code: exit.exit_code,
            signal: exit.signal,
            core_dumped: exit.core_dumped,
            out_of_memory: exit.out_of_memory,
            consequence: exit.consequence,
            stopped_with: exit.stopped_with,
            unix_time_ns: exit.unix_time_ns,
            message: &exit.message,
            log_file: &exit.log_file,
        }
    }
}

/// Adds what else failed in the last generation, on other nodes, in order; after the workers of this node.
pub(crate) fn elsewhere(text: &mut String, facts: &ReportFacts) {
    let of_last = |failure: &&Failure| failure.generation == facts.generation.0;
    let last = || facts.failures.failures.iter().filter(of_last);
    let first = last().find(|failure| is_first(&facts.exit_reason, failure));
    let zero = first.or_else(|| last().next()).map(|failure| failure.happened_ns);
    let others: Vec<&Failure> = last()
        .filter(|failure| !is_first(&facts.exit_reason, failure) && is_elsewhere(facts, failure))
        .collect();
    for failure in others.iter().take(MAX_REPORTED) {
        let after_ns = failure.happened_ns - zero.unwrap_or_default();
        let words = match &failure.exit {
            None => failure.node_gone.clone(),
            Some(exit) => {
                let (rank, host, ending) = (exit.rank, &failure.hostname, Ending::of_message(exit));
                let consequence = if exit.consequence { " as a consequence" } else { "" };
                format!("rank {rank} (node `{host}`): {ending}{consequence}")
            }
        };
        let _ = write!(text, "\n  {words}");
        // Of a node that is gone the others know before the daemon does.
        let is_consequence = failure.exit.as_ref().is_some_and(|exit| exit.consequence);
        if !is_consequence || after_ns >= 0 {
            let _ = write!(text, " ({})", when(after_ns));
        }
    }
    let untold = others.len().saturating_sub(MAX_REPORTED);
    if untold > 0 {
        // What the list has no room for may be of other generations, or of this node: how many are not is unknown.
        let least = if facts.failures.more_failures > 0 {
            "at least "
        } else {
            ""
        };
        let _ = write!(text, "\n  and {least}{untold} more");
    }
}

/// Adds the first failure of the job, if that was in an earlier generation than the one that ended it: often the cause
/// of what failed in later ones.
pub(crate) fn earlier(text: &mut String, facts: &ReportFacts) {
    let is_cause = |failure: &&Failure| {
        let is_effect = |exit: &WorkerExit| exit.consequence || exit.stopped_with.is_some();
        failure.generation < facts.generation.0 && !failure.exit.as_ref().is_some_and(is_effect)
    };
    let causes = facts.failures.failures.iter().filter(is_cause);
    let Some(first) = causes.min_by_key(|failure| failure.generation) else {
        return;
    };
    text.push_str("\n  earlier, before a restart: ");
    let Some(exit) = &first.exit else {
        text.push_str(&first.node_gone);
        return;
    };
    let (host, ending) = (&first.hostname, Ending::of_message(exit));
    let _ = write!(text, "rank {} (node `{host}`) {ending}", exit.rank);
    if let Some(words) = exit.message.lines().next() {
        let _ = write!(text, ": {words}");
    }
    if !exit.log_file.is_empty() {
        let _ = write!(text, "; log file: {}", exit.log_file);
    }
}

/// What the report begins with.
fn is_first(exit_reason: &ExitReason, failure: &Failure) -> bool {
    let ExitReason::JobOver { reason, .. } = exit_reason else {
        return false;
    };
    match (exit_reason.first_failure(), &failure.exit) {
        (Some((first, _)), Some(exit)) => first.rank == exit.rank,
        (None, None) => reason.starts_with(&failure.node_gone),
        _ => false,
    }
}

/// Not stopped, and not among the workers that the report already named.
fn is_elsewhere(facts: &ReportFacts, failure: &Failure) -> bool {
    failure.exit.as_ref().is_none_or(|exit| {
        let is_told = facts.local_ends.iter().any(|end| end.rank.0 == exit.rank);
        exit.stopped_with.is_none() && !is_told
    })
}

/// "0.2 s later"
fn when(after_ns: i64) -> String {
    let time = seconds(Duration::from_nanos(after_ns.unsigned_abs()));
    let order = if after_ns < 0 { "earlier" } else { "later" };
    format!("{time} {order}")
}
