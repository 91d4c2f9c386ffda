//! The end of a job: every node receives the same verdict, nodes that were away when they come back.

use std::collections::BTreeSet;
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::refused::Code;
use ddp_proto::rendezvous::{JobOver, JobSummary};

use super::joining::Joining;
use super::{Job, Phase};
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Observation, Record, Stage, refusal};

/// How long a job is listed that has ended.
const LISTED: Duration = Duration::from_hours(1);

/// The line of the list for a job that has ended.
#[derive(Debug)]
struct EndedLine {
    at: Duration,
    /// Of the job when it ended.
    summary: JobSummary,
}

impl EndedLine {
    fn summary(&self, now: Duration) -> JobSummary {
        let ended_ms = now.saturating_sub(self.at).as_millis() as u64;
        JobSummary {
            age_ms: self.summary.age_ms + ended_ms,
            ended_ms: Some(ended_ms),
            ..self.summary.clone()
        }
    }
}

/// A job that has ended, while some of its nodes are there.
#[derive(Debug)]
pub(super) struct Over {
    /// `JobOver` or `Refused`, the same for every node.
    verdict: Reply,
    line: Box<EndedLine>,
    /// Incarnations of the nodes that the verdict concerns.
    told: BTreeSet<String>,
    /// When the daemon forgets nodes that have not left.
    until: Duration,
}

/// A finished job without nodes: its verdict, for nodes that missed it.
#[derive(Debug)]
pub(in crate::rendezvous) struct Finished {
    job: String,
    told: BTreeSet<String>,
    run_token: String,
    generation: u64,
    /// None for an abandoned job, of which only the generation number counts.
    verdict: Option<Reply>,
    /// None if an earlier daemon saw its end.
    line: Option<Box<EndedLine>>,
}

impl Over {
    pub(super) fn reason(&self) -> &str {
        &self.line.summary.reason
    }

    pub(super) fn summary(&self, now: Duration) -> JobSummary {
        self.line.summary(now)
    }

    pub(super) fn until(&self) -> Duration {
        self.until
    }

    /// Whether the verdict concerns this node.
    fn concerns(&self, joining: &Joining, run_token: &str) -> bool {
        self.told.contains(&joining.from.incarnation)
            || joining.is_of_run(run_token)
            || matches!(self.verdict, Reply::Refused(_))
    }
}

impl Finished {
    /// Takes a finished job from the ledger.
    pub(in crate::rendezvous) fn recalled(record: Record) -> Self {
        let told = record.members.iter().map(|member| member.incarnation.clone());
        Self {
            told: told.collect(),
            verdict: verdict_of(record.stage),
            run_token: record.run_token,
            generation: record.generation,
            job: record.job,
            line: None,
        }
    }

    /// Its line of the list; none if it ended long ago.
    pub(in crate::rendezvous) fn summary(&self, now: Duration) -> Option<JobSummary> {
        let line = self.line.as_ref().filter(|line| now < line.at + LISTED)?;
        Some(line.summary(now))
    }

    pub(in crate::rendezvous) fn is_of(&self, job: &str) -> bool {
        self.job == job
    }

    /// The verdict concerns this node.
    pub(in crate::rendezvous) fn has(&self, incarnation: &str) -> bool {
        self.told.contains(incarnation)
    }

    pub(in crate::rendezvous) fn generation(&self) -> u64 {
        self.generation
    }

    /// There is a verdict, and a node of this run comes: one that was in it or one that was on standby.
    pub(in crate::rendezvous) fn concerns(&self, joining: &Joining) -> bool {
        let latest = joining.join.latest_generation;
        let stood_by = joining.from.generation == 0 && latest > 0 && latest == self.generation;
        let is_of_it =
            stood_by || self.told.contains(&joining.from.incarnation) || joining.is_of_run(&self.run_token);
        is_of_it && self.verdict.is_some()
    }

    /// Tells a node the verdict, and sends it away; false if there is none.
    pub(in crate::rendezvous) fn tell(&self, context: &mut ApplyContext<'_>, joining: &Joining) -> bool {
        let Some(verdict) = &self.verdict else {
            return false;
        };
        context.send(Some(joining.conn), self.generation, verdict.clone());
        context.close(Some(joining.conn));
        true
    }
}

/// The verdict of a job that has ended; none if it continues, or is not decided.
fn verdict_of(stage: Stage) -> Option<Reply> {
    match stage {
        Stage::Running | Stage::Ended | Stage::Abandoned => None,
        Stage::JobOver { exit_code, reason } => Some(Reply::JobOver(JobOver {
            exit_code,
            reason,
            ..JobOver::default()
        })),
        Stage::Refused { code, reason } => Some(Reply::Refused(refusal(code, reason))),
    }
}

impl Job {
    pub(super) fn job_over(&mut self, context: &mut ApplyContext<'_>, exit_code: u8, reason: String) {
        let over = JobOver {
            exit_code: i32::from(exit_code),
            reason,
            ..JobOver::default()
        };
        self.end(context, Reply::JobOver(over));
    }

    /// Ends the job with a verdict for every node that is there, `JobOver` or `Refused`. It carries the list of what has
    /// failed, unless the job succeeded.
    pub(super) fn end(&mut self, context: &mut ApplyContext<'_>, mut verdict: Reply) {
        let (reason, stage) = match &mut verdict {
            Reply::JobOver(over) => {
                let (exit_code, reason) = (over.exit_code, over.reason.clone());
                over.failures = (exit_code != 0).then(|| self.told_failures()).flatten();
                (reason.clone(), Stage::JobOver { exit_code, reason })
            }
            Reply::Refused(refused) => {
                let (code, reason) = (refused.code, refused.reason.clone());
                refused.failures = self.failures.told();
                (reason.clone(), Stage::Refused { code, reason })
            }
            _ => return,
        };
        context.decided(format!("job `{}` ended: {reason}", self.id));
        context.observe(Observation::Ended(match &stage {
            Stage::JobOver { exit_code, .. } => *exit_code,
            _ => i32::from(exit::RENDEZVOUS_TIMED_OUT),
        }));
        let at = context.at.now;
        let summary = JobSummary {
            phase: "over".to_owned(),
            reason: reason.clone(),
            ..self.summary(at)
        };
        self.history.end(context.at.now, &reason);
        self.table.end_lease_extensions(context.at.now);
        self.table.send_all(context, self.counter.generation(), &verdict);
        self.kv.end(context, &format!("the job has ended: {reason}"));
        self.record(context, stage);
        self.phase = Phase::Over(Over {
            verdict,
            line: Box::new(EndedLine { at, summary }),
            told: self.table.concerned(),
            until: context.at.now + context.config.linger,
        });
    }

    /// A node joins a job that is over.
    pub(super) fn join_when_over(&mut self, context: &mut ApplyContext<'_>, joining: &Joining) {
        let Phase::Over(over) = &self.phase else { return };
        let reply = if over.concerns(joining, self.counter.run_token()) {
            over.verdict.clone()
        } else {
            let reason = format!(
                "job `{}` has ended: {}\n  hint: to run it again, start its nodes after all previous launchers have exited",
                self.id,
                over.reason()
            );
            Reply::Refused(refusal(Code::JobOver, reason))
        };
        context.send(Some(joining.conn), self.counter.generation(), reply);
        let known = self.table.change(&joining.from.incarnation, |node| {
            node.connect(context, joining.conn, joining.peer);
            node.heard(context);
        });
        if known.is_none() {
            context.close(Some(joining.conn));
        }
    }

    /// What remains of the job when its last node has left, if anything.
    pub(in crate::rendezvous) fn finish(self, context: &mut ApplyContext<'_>) -> Option<Finished> {
        if !matches!(self.phase, Phase::Over(_)) {
            self.record(context, Stage::Abandoned);
        }
        let at = context.at.now;
        let summary = JobSummary {
            phase: "over".to_owned(),
            ..self.summary(at)
        };
        let abandoned = Box::new(EndedLine { at, summary });
        let (told, verdict, line) = match self.phase {
            Phase::Over(over) => (over.told, Some(over.verdict), over.line),
            Phase::Gathering(_) | Phase::Recovering(_) | Phase::Running(_) => {
                (BTreeSet::new(), None, abandoned)
            }
        };
        let generation = self.counter.highest();
        (generation > 0 || verdict.is_some()).then(|| Finished {
            told,
            run_token: self.counter.run_token().to_owned(),
            generation,
            verdict,
            job: self.id,
            line: Some(line),
        })
    }
}
