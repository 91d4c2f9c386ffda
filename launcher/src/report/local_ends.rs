//! How the workers of this node ended, apart from the first failure: lines of the report.
//!
//! A node may have many workers, which mostly end alike. Ends that differ only in rank and time share a line.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::ids::GlobalRank;
use ddp_proto::words::numbered;

use crate::agent::ExitReason;
use crate::report::facts::{LocalEnd, ReportFacts, indented, seconds};
use crate::supervise::ending::{Ending, signal_name};

/// What the ends of a line have in common.
#[derive(Clone, Copy, Debug, PartialEq)]
struct EndKind<'a> {
    why: Why,
    ending: Ending,
    message: Option<&'a str>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Why {
    /// The launcher stopped it with this signal.
    Stopped(i32),
    /// It reports the first failure as its cause.
    Followed,
    OnItsOwn,
}

/// Ends of one kind.
struct EndGroup<'a> {
    kind: EndKind<'a>,
    /// In ascending order.
    ranks: Vec<u32>,
    /// None: before the first failure that this node knew of.
    soonest: Option<Duration>,
    latest: Option<Duration>,
}

/// Adds the workers of this node that are neither the first failure nor well, in the order of each line's first rank.
pub(crate) fn others(text: &mut String, facts: &ReportFacts, first: Option<GlobalRank>) {
    // Where the job is over and no worker is to blame, a node was lost: the report has said so.
    let first_failure = facts.exit_reason.first_failure();
    let is_job_over = matches!(facts.exit_reason, ExitReason::JobOver { .. });
    let cause_is_reported = is_job_over && first_failure.is_none() || text.contains("first failure:");
    let first_message = first_failure.map(|(failure, _)| &*failure.message);
    let is_other = |end: &&LocalEnd| Some(end.rank) != first && !end.ending.is_success();
    let mut lines: Vec<EndGroup<'_>> = Vec::new();
    for end in facts.local_ends.iter().filter(is_other) {
        let kind = EndKind::of(end, &facts.exit_reason, cause_is_reported, first_message);
        if let Some(line) = lines.iter_mut().find(|line| line.kind == kind) {
            line.ranks.push(end.rank.0);
            line.soonest = line.soonest.min(end.after);
            line.latest = line.latest.max(end.after);
        } else {
            lines.push(EndGroup {
                kind,
                ranks: vec![end.rank.0],
                soonest: end.after,
                latest: end.after,
            });
        }
    }
    for line in &lines {
        line.tell(text, first_message);
    }
}

impl<'a> EndKind<'a> {
    fn of(
        end: &'a LocalEnd,
        exit_reason: &ExitReason,
        cause_is_reported: bool,
        first_message: Option<&str>,
    ) -> Self {
        let failed_alike = first_message.is_some() && end.message.as_deref() == first_message;
        let has_exited = matches!(end.ending, Ending::Code(_));
        let sent = end.sent.map(|sent| deadly(sent, end.ending, exit_reason));
        // A worker that exited in spite of SIGKILL, or with the first one's error, did so before the signal came.
        let was_late = |signal: i32| has_exited && (signal == libc::SIGKILL || failed_alike);
        let why = match sent.filter(|signal| !was_late(*signal)) {
            Some(signal) => Why::Stopped(signal),
            None if end.consequence && cause_is_reported => Why::Followed,
            None => Why::OnItsOwn,
        };
        // What it says of the cause, it says on the console; the report has named the cause.
        let is_needed = why != Why::Followed;
        Self {
            why,
            ending: end.ending,
            message: end.message.as_deref().filter(|_| is_needed),
        }
    }
}

impl EndGroup<'_> {
    /// Adds the line; `first_message` is the message of the first failure.
    fn tell(&self, text: &mut String, first_message: Option<&str>) {
        let _ = write!(text, "\n  {}: ", numbered("rank", &self.ranks));
        let (time, ending) = (self.time(), self.kind.ending);
        let later = time
            .as_ref()
            .map_or_else(String::new, |time| format!(" ({time} later)"));
        // Ranks that read one configuration fail alike.
        let is_same = first_message.is_some() && self.kind.message == first_message;
        let _ = match self.kind.why {
            Why::Stopped(signal) => {
                let died_of_it = matches!(ending, Ending::Signal { signal: of, .. } if of == signal);
                let sent = signal_name(signal);
                let end = match ending {
                    _ if died_of_it => format!("terminated by ddp-run ({sent})"),
                    Ending::Signal { .. } => format!("{ending} after ddp-run sent {sent}"),
                    Ending::Code(_) => format!("terminated by ddp-run ({sent}), {ending}"),
                };
                let later = time
                    .filter(|time| time != "0.0 s")
                    .map_or_else(String::new, |time| format!(", {time} later"));
                write!(text, "{end}{later}")
            }
            Why::Followed => write!(text, "{ending} as a consequence{later}"),
            Why::OnItsOwn if is_same => write!(text, "also {ending} with the same error{later}"),
            Why::OnItsOwn => write!(text, "{ending}{later}"),
        };
        if let Some(message) = self.kind.message.filter(|_| !is_same) {
            let _ = write!(text, ": {}", indented(message, "    "));
        }
    }

    /// "0.1 s", "0.1 to 30.2 s"; none if one of them ended before.
    fn time(&self) -> Option<String> {
        let (soonest, latest) = (seconds(self.soonest?), seconds(self.latest?));
        if soonest == latest {
            return Some(soonest);
        }
        let is_one_unit = self.latest? < Duration::from_mins(1);
        let from = soonest.strip_suffix(" s").filter(|_| is_one_unit);
        Some(format!("{} to {latest}", from.unwrap_or(&soonest)))
    }
}

/// The signal of ours that a worker died of, when several were on their way: SIGKILL follows SIGTERM, or the signal
/// that stopped the job.
fn deadly(sent: i32, ending: Ending, exit_reason: &ExitReason) -> i32 {
    let is_gentle = |signal| signal == libc::SIGTERM || Some(signal) == exit_reason.signal();
    match ending {
        Ending::Signal { signal, .. } if sent == libc::SIGKILL && is_gentle(signal) => signal,
        _ => sent,
    }
}
