//! The end of a job: every node is told the same verdict, and those that were away are told it when they come back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::JobOver;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::refused::Code;

use super::joining::Joining;
use super::record::{Record, Stage};
use super::{Job, Phase};
use crate::rendezvous::event::{Observation, Turn, refusal};

/// A job that has ended, while some of its nodes are there.
#[derive(Debug)]
pub(super) struct Over {
    /// What every node is told: `JobOver` or `Refused`.
    verdict: Reply,
    reason: String,
    /// All incarnations that the verdict concerns.
    told: BTreeSet<String>,
    /// Nodes that have not left by then are forgotten.
    until: Duration,
}

/// What is kept of a job without nodes, for those that missed its verdict.
#[derive(Debug)]
pub(in crate::rendezvous) struct Finished {
    job: String,
    told: BTreeSet<String>,
    /// Nodes that fell silent, and how long each is expected back.
    silent: BTreeMap<String, Duration>,
    run_token: String,
    generation: u64,
    /// None if none was reached: only the number of the generation is of interest then.
    verdict: Option<Reply>,
}

impl Over {
    pub(super) fn reason(&self) -> &str {
        &self.reason
    }

    pub(super) fn until(&self) -> Duration {
        self.until
    }

    /// Whether the verdict is on this node too.
    fn concerns(&self, joining: &Joining, run_token: &str) -> bool {
        self.told.contains(&joining.from.incarnation)
            || joining.is_of_run(run_token)
            || matches!(self.verdict, Reply::Refused(_))
    }
}

impl Finished {
    /// As the ledger has it.
    pub(in crate::rendezvous) fn recalled(record: Record) -> Self {
        let told = record.members.iter().map(|member| member.incarnation.clone());
        Self {
            told: told.collect(),
            silent: BTreeMap::new(),
            verdict: record.verdict(),
            run_token: record.run_token,
            generation: record.generation,
            job: record.job,
        }
    }

    pub(in crate::rendezvous) fn is_of(&self, job: &str) -> bool {
        self.job == job
    }

    /// The verdict is on this node too.
    pub(in crate::rendezvous) fn has(&self, incarnation: &str) -> bool {
        self.told.contains(incarnation)
    }

    pub(in crate::rendezvous) fn generation(&self) -> u64 {
        self.generation
    }

    pub(in crate::rendezvous) fn silent(&self) -> &BTreeMap<String, Duration> {
        &self.silent
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
    pub(in crate::rendezvous) fn tell(&mut self, turn: &mut Turn<'_>, joining: &Joining) -> bool {
        let Some(verdict) = &self.verdict else {
            return false;
        };
        self.silent.remove(&joining.from.incarnation);
        turn.send(Some(joining.conn), self.generation, verdict.clone());
        turn.close(Some(joining.conn));
        true
    }
}

impl Job {
    pub(super) fn job_over(&mut self, turn: &mut Turn<'_>, exit_code: u8, reason: String) {
        let over = JobOver {
            exit_code: i32::from(exit_code),
            reason,
            ..JobOver::default()
        };
        self.end(turn, Reply::JobOver(over));
    }

    /// Ends the job with a verdict for every node that is there, `JobOver` or `Refused`. It carries the list of what has
    /// failed, unless the job succeeded.
    pub(super) fn end(&mut self, turn: &mut Turn<'_>, mut verdict: Reply) {
        let (reason, stage) = match &mut verdict {
            Reply::JobOver(over) => {
                let (exit_code, reason) = (over.exit_code, over.reason.clone());
                over.failures = (exit_code != 0).then(|| self.failures.told()).flatten();
                (reason.clone(), Stage::JobOver { exit_code, reason })
            }
            Reply::Refused(refused) => {
                let (code, reason) = (refused.code, refused.reason.clone());
                refused.failures = self.failures.told();
                (reason.clone(), Stage::Refused { code, reason })
            }
            _ => return,
        };
        turn.decided(format!("job `{}` ended: {reason}", self.id));
        turn.observe(Observation::Ended(match &stage {
            Stage::JobOver { exit_code, .. } => *exit_code,
            _ => i32::from(exit::RENDEZVOUS_TIMED_OUT),
        }));
        self.history.end(turn.at.now, &reason);
        self.roster.end_excuses(turn.at.now);
        self.roster.send_all(turn, self.numbering.generation(), &verdict);
        self.kv.end(turn, &format!("the job has ended: {reason}"));
        self.record(turn, stage);
        self.phase = Phase::Over(Over {
            verdict,
            reason,
            told: self.roster.concerned(),
            until: turn.at.now + turn.config.linger,
        });
    }

    /// A node comes to a job that is over.
    pub(super) fn join_when_over(&mut self, turn: &mut Turn<'_>, joining: &Joining) {
        let Phase::Over(over) = &self.phase else { return };
        let reply = if over.concerns(joining, self.numbering.run_token()) {
            over.verdict.clone()
        } else {
            let reason = format!(
                "job `{}` has ended: {}\n  hint: to run it again, start its nodes after all previous launchers have exited",
                self.id, over.reason
            );
            refusal(Code::JobOver, reason)
        };
        turn.send(Some(joining.conn), self.numbering.generation(), reply);
        let known = self.roster.change(&joining.from.incarnation, |node| {
            node.connect(turn, joining.conn, joining.peer);
            node.heard(turn);
        });
        if known.is_none() {
            turn.close(Some(joining.conn));
        }
    }

    /// What is left of the job when no node needs it; none if that is nothing.
    pub(in crate::rendezvous) fn finish(self, turn: &mut Turn<'_>) -> Option<Finished> {
        if !matches!(self.phase, Phase::Over(_)) {
            self.record(turn, Stage::Abandoned);
        }
        let (told, verdict) = match self.phase {
            Phase::Over(over) => (over.told, Some(over.verdict)),
            Phase::Gathering(_) | Phase::Recovering(_) | Phase::Running(_) => (BTreeSet::new(), None),
        };
        let generation = self.numbering.highest();
        (generation > 0 || verdict.is_some()).then(|| Finished {
            told,
            silent: self.roster.silent().clone(),
            run_token: self.numbering.run_token().to_owned(),
            generation,
            verdict,
            job: self.id,
        })
    }
}
