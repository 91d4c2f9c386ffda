//! What is written down of a job, and what a restarted daemon makes of it.
//!
//! A [`Record`] is the whole of it: the last one of a job counts. One is made whenever an assignment is given, and when
//! it is over. The daemon's ledger writes it before anything of the same turn is sent.

use std::time::Duration;

use ddp_proto::rendezvous::JobOver;
use ddp_proto::rendezvous::daemon_message::Body as Reply;
use serde::{Deserialize, Serialize};

use super::numbering::Numbering;
use super::recovery::Recovery;
use super::{Job, Phase};
use crate::rendezvous::config::Config;
use crate::rendezvous::event::{Effect, Turn, refusal};
use crate::rendezvous::policy::Account;
use crate::rendezvous::ranks::Member;

/// A job, as it is written down.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub(in crate::rendezvous) job: String,
    /// The highest one that was assigned; 0: none was.
    pub(in crate::rendezvous) generation: u64,
    pub(in crate::rendezvous) assignment_id: String,
    /// Nodes of that generation, in order of their ranks.
    pub(in crate::rendezvous) members: Vec<Member>,
    pub(in crate::rendezvous) run_token: String,
    pub(in crate::rendezvous) attempt: u32,
    /// What is left of the restarts.
    pub(in crate::rendezvous) account: Account,
    pub(in crate::rendezvous) stage: Stage,
}

/// How far the generation has come.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(in crate::rendezvous) enum Stage {
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
    pub(in crate::rendezvous) fn is_final(&self) -> bool {
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
            Stage::Refused { code, reason } => Some(refusal(code, reason)),
        }
    }
}

impl Job {
    /// Has this written down of the last generation, before anything else of this turn is sent. Without one, only a
    /// verdict is worth it.
    pub(super) fn record(&self, turn: &mut Turn<'_>, stage: Stage) {
        let numbering = &self.numbering;
        let (generation, assignment_id, members) = if numbering.has_begun() {
            let id = numbering.assignment_id().to_owned();
            (numbering.generation(), id, self.roster.members().to_vec())
        } else if let Some(earlier) = self.earlier.clone() {
            // What an earlier daemon has written is brought up to date.
            (numbering.highest(), earlier.assignment_id, earlier.members)
        } else if matches!(stage, Stage::JobOver { .. } | Stage::Refused { .. }) {
            // It is on the nodes that are there.
            let nodes = self.roster.concerned().into_iter();
            let members = nodes.map(|incarnation| Member::new(incarnation, String::new()));
            (numbering.highest(), String::new(), members.collect())
        } else {
            return;
        };
        turn.effects.push(Effect::Record(Box::new(Record {
            job: self.id.clone(),
            generation,
            assignment_id,
            members,
            run_token: numbering.run_token().to_owned(),
            attempt: numbering.attempts(),
            account: self.account,
            stage,
        })));
    }

    /// A job that has not ended, for a daemon that starts: it waits for the nodes of the generation that runs. If that is
    /// over, it accepts any node, and abandons the job if none comes.
    pub(in crate::rendezvous) fn recall(config: &Config, record: Record, now: Duration) -> Self {
        let mut job = Self::new(&record.job, record.generation, now);
        job.numbering = Numbering::recalled(&record);
        job.account = record.account;
        job.earlier = Some(record.clone());
        if record.stage == Stage::Running {
            job.phase = Phase::Recovering(Recovery::recorded(record, now, config.reattach_wait));
        } else if let Phase::Gathering(gathering) = &mut job.phase {
            gathering.wait_until(now + config.reattach_wait);
        }
        job.plan_wake();
        job
    }
}
