//! What is written down of a job, and what a restarted daemon makes of it.
//!
//! A [`Record`] is the whole of it: the last one of a job counts. One is made whenever an assignment is given, and when
//! it is over. The daemon's ledger writes it before anything of the same turn is sent.

use std::collections::BTreeSet;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{JobOver, Refused};
use serde::{Deserialize, Serialize};

use super::config::Config;
use super::event::{Effect, Turn};
use super::job::{Job, Phase};
use super::policy::Account;
use super::recovery::Recovery;

/// A job, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub(super) job: String,
    /// The highest one that was assigned.
    pub(super) generation: u64,
    pub(super) assignment_id: String,
    /// Nodes of that generation, in order of their ranks.
    pub(super) members: Vec<RecordedMember>,
    pub(super) run_token: String,
    pub(super) attempt: u32,
    /// What is left of the restarts.
    pub(super) account: Account,
    pub(super) stage: Stage,
}

/// A node of a generation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RecordedMember {
    pub(super) incarnation: String,
    pub(super) hostname: String,
}

/// How far the generation has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    /// Its nodes run.
    Running,
    /// It is over, and another one follows.
    Ended,
    /// So is the generation, and no node has come for another one.
    Abandoned,
    /// So is the job.
    JobOver { exit_code: i32, reason: String },
    /// The daemon has refused to go on with the job.
    Refused { code: i32, reason: String },
}

impl Record {
    /// Which job it is.
    pub fn job(&self) -> &str {
        &self.job
    }

    /// The job has ended.
    pub(super) fn is_final(&self) -> bool {
        !matches!(self.stage, Stage::Running | Stage::Ended)
    }

    /// What every node is told of a job that has ended; none if it goes on, or is not decided.
    pub(super) fn verdict(&self) -> Option<Reply> {
        match self.stage.clone() {
            Stage::Running | Stage::Ended | Stage::Abandoned => None,
            Stage::JobOver { exit_code, reason } => Some(Reply::JobOver(JobOver {
                exit_code,
                reason,
                ..JobOver::default()
            })),
            Stage::Refused { code, reason } => Some(Reply::Refused(Refused {
                code,
                reason,
                failures: None,
            })),
        }
    }

    pub(super) fn incarnations(&self) -> BTreeSet<String> {
        let members = self.members.iter();
        members.map(|member| member.incarnation.clone()).collect()
    }
}

impl Stage {
    /// Where `verdict` has ended a job.
    pub(super) fn of_verdict(verdict: &Reply) -> Option<Self> {
        match verdict {
            Reply::JobOver(over) => Some(Self::JobOver {
                exit_code: over.exit_code,
                reason: over.reason.clone(),
            }),
            Reply::Refused(refused) => Some(Self::Refused {
                code: refused.code,
                reason: refused.reason.clone(),
            }),
            _ => None,
        }
    }
}

impl Job {
    /// Has this written down of the last generation, before anything else of this turn is sent.
    pub(super) fn record(&self, turn: &mut Turn<'_>, stage: Stage) {
        if self.generation == 0 {
            // What an earlier daemon has written is brought up to date.
            if let Some(earlier) = &self.earlier {
                turn.effects.push(Effect::Record(Box::new(Record {
                    generation: self.highest_generation(),
                    run_token: self.run_token.clone(),
                    attempt: self.attempts,
                    account: self.account,
                    stage,
                    ..earlier.clone()
                })));
            }
            return;
        }
        let members = self.previous.iter().map(|member| RecordedMember {
            incarnation: member.incarnation.clone(),
            hostname: member.hostname.clone(),
        });
        turn.effects.push(Effect::Record(Box::new(Record {
            job: self.id.clone(),
            generation: self.generation,
            assignment_id: self.assignment_id.clone(),
            members: members.collect(),
            run_token: self.run_token.clone(),
            attempt: self.attempts,
            account: self.account,
            stage,
        })));
    }

    /// A job that has not ended, for a daemon that starts: it waits for the nodes of the generation that runs. If that is
    /// over, it accepts any node, and abandons the job if none comes.
    pub(super) fn recall(config: &Config, record: Record, now: Duration) -> Self {
        let mut job = Self::new(&record.job, record.generation, now);
        job.run_token.clone_from(&record.run_token);
        job.attempts = record.attempt;
        job.account = record.account;
        job.earlier = Some(record.clone());
        if record.stage == Stage::Running {
            job.highest_ended = record.generation - 1;
            job.phase = Phase::Recovering(Recovery::recorded(record, now, config.reattach_wait));
        } else if let Phase::Gathering(gathering) = &mut job.phase {
            gathering.until = now + config.reattach_wait;
        }
        job.plan_wake();
        job
    }
}
