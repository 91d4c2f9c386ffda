//! Writes a job down for the ledger, and takes it up again from there.

use std::time::Duration;

use super::generation_counter::GenerationCounter;
use super::recovery::Recovery;
use super::takeover::Takeover;
use super::{Job, Phase};
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Effect, Record, Stage};
use crate::rendezvous::ranks::Member;

impl Job {
    /// Has this written down of the last generation, before anything else of this turn is sent. Without one, only a
    /// verdict is worth it.
    pub(super) fn record(&self, context: &mut ApplyContext<'_>, stage: Stage) {
        let counter = &self.counter;
        let (generation, assignment_id, members) = if counter.has_begun() {
            let id = counter.assignment_id().to_owned();
            (counter.generation(), id, self.table.members().to_vec())
        } else if let Some(earlier) = self.earlier.clone() {
            // What an earlier daemon has written is brought up to date.
            (counter.highest(), earlier.assignment_id, earlier.members)
        } else if matches!(stage, Stage::JobOver { .. } | Stage::Refused { .. }) {
            // It is on the nodes that are there.
            let nodes = self.table.concerned().into_iter();
            let members = nodes.map(|incarnation| Member::new(incarnation, String::new()));
            (counter.highest(), String::new(), members.collect())
        } else {
            return;
        };
        context.effects.push(Effect::Record(Box::new(Record {
            job: self.id.clone(),
            generation,
            assignment_id,
            members,
            run_token: counter.run_token().to_owned(),
            takeover: self.takeover.after(),
            attempt: counter.attempts(),
            account: self.account,
            stage,
        })));
    }

    /// A job that has not ended, for a daemon that starts: it waits for the nodes of the generation that runs. If that is
    /// over, it accepts any node, and abandons the job if none comes.
    pub(in crate::rendezvous) fn recall(config: &Config, record: Record, now: Duration) -> Self {
        let mut job = Self::new(&record.job, record.generation, now);
        job.counter = GenerationCounter::recalled(&record);
        job.account = record.account;
        job.earlier = Some(record.clone());
        job.takeover = Takeover::recalled(config, &record, now);
        if record.stage == Stage::Running {
            job.phase = Phase::Recovering(Recovery::recorded(record, now, config.reattach_wait));
        } else if let Phase::Gathering(gathering) = &mut job.phase {
            gathering.wait_until(now + config.reattach_wait);
        }
        job.plan_wake();
        job
    }
}
