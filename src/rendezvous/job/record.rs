//! Writes a job down for the ledger, and takes it up again from there.

use std::time::Duration;

use super::numbering::Numbering;
use super::recovery::Recovery;
use super::{Job, Phase};
use crate::rendezvous::config::Config;
use crate::rendezvous::event::{Effect, Turn};
use crate::rendezvous::ranks::Member;
use crate::rendezvous::record::{Record, Stage};

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
            token_proof: self.token_proof.clone(),
            stage,
        })));
    }

    /// A job that has not ended, for a daemon that starts: it waits for the nodes of the generation that runs. If that is
    /// over, it accepts any node, and abandons the job if none comes.
    pub(in crate::rendezvous) fn recall(config: &Config, record: Record, now: Duration) -> Self {
        let mut job = Self::new(&record.job, record.generation, now);
        job.numbering = Numbering::recalled(&record);
        job.account = record.account;
        job.token_proof.clone_from(&record.token_proof);
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
