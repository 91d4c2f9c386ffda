//! Growing: nodes that come to a job that runs.
//!
//! A job of `--nnodes MIN:MAX` that has room takes them in. It waits [`Config::scale_up_wait`] for more to come with the
//! first, or until it is full; then all ranks are asked to stop at a step boundary, and the next generation has them
//! all. No restart is spent. Nodes beyond MAX are spares, and so are those with which the workers could not go on
//! ([`Heartbeat`](ddp_proto::rendezvous::Heartbeat)`.ranks_divide`, `.ranks_multiple_of`).
//!
//! Nodes that have succeeded run their workers again with the others, as when a node is lost.
//!
//! [`Config::scale_up_wait`]: crate::rendezvous::Config

use ddp_proto::rendezvous::GenerationOver;

use super::Job;
use super::running::Running;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Observation, regrouping};
use crate::rendezvous::messages;
use crate::rendezvous::policy::EndReason;
use crate::rendezvous::ranks::Candidate;
use crate::rendezvous::size::RankLimits;

impl Job {
    /// A node is ready that is no member of the running generation.
    pub(super) fn newcomer(&mut self, context: &mut ApplyContext<'_>) {
        let wait = self.table.last_call(context.config.scale_up_wait);
        if let Some(running) = self.phase.running_mut() {
            running.plan_scale_up(context.at.now + wait);
        }
        self.consider_scale_up(context);
    }

    /// Goes on with the newcomers when their time has come, or forgets them if they make no larger generation.
    pub(super) fn consider_scale_up(&mut self, context: &mut ApplyContext<'_>) {
        let taken = self.growth();
        let after = self.table.members().len() + taken.len();
        let is_full = after >= self.table.size_limits().max;
        let Some(running) = self.phase.running_mut() else {
            return;
        };
        if running.grows(context.at.now, taken.len(), is_full) {
            let hosts = messages::list(taken.iter().map(|c| c.hostname.as_str()), taken.len());
            let cause = format!(
                "{hosts} joined; continuing with {}",
                messages::nodes(after as u32)
            );
            self.change_nodes(context, cause);
        }
    }

    /// The spares with which the running generation could be larger.
    fn growth(&self) -> Vec<Candidate> {
        // Who has done its part of the work should not have to do it again for a late guest.
        let running = self.phase.running().filter(|running| !running.has_successes());
        running.map_or_else(Vec::new, |_| self.table.growth())
    }

    /// Ends the generation at a step boundary, for the next one to have other nodes. No restart is spent.
    pub(super) fn change_nodes(&mut self, context: &mut ApplyContext<'_>, cause: String) {
        let Some(running) = self.phase.running() else {
            return;
        };
        let over = GenerationOver {
            restart_count: self.account.spent(),
            best_step: self.account.best(),
            max_restarts: running.assignment().max_restarts,
            // A rank that has failed comes to no boundary.
            at_step_boundary: !running.has_suspect(),
            ..regrouping(cause)
        };
        context.observe(Observation::Restarted(EndReason::Membership));
        self.regroup(context, over);
    }

    /// What a node waits for that is ready while a generation runs without it.
    pub(super) fn spare_words(&self, incarnation: &str) -> String {
        let count = self.table.members().len() as u32;
        let runs = format!("job `{}` is running with {}", self.id, messages::nodes(count));
        if self.growth().iter().any(|c| c.incarnation == incarnation) {
            return format!("{runs}; this node joins at the next step boundary");
        }
        let is_done = self.phase.running().is_some_and(Running::has_successes);
        let limits = self.table.size_limits();
        let has_room = (count as usize) < limits.max && !is_done;
        if limits.ranks.is_open() || !has_room {
            return format!("{runs}; this node is on standby");
        }
        format!(
            "{runs}; it can run only with {}: this node stays on standby",
            limits.ranks
        )
    }

    /// Tells all spares of a generation that runs what they wait for.
    pub(super) fn tell_spares(&self, context: &mut ApplyContext<'_>) {
        if self.phase.running().is_some() {
            for (spare, _) in self.table.spares() {
                self.tell_waiting(context, spare, self.spare_words(spare));
            }
        }
    }

    /// The workers say which numbers of ranks they can go on with.
    pub(super) fn limit_sizes(&mut self, context: &mut ApplyContext<'_>, limits: RankLimits) {
        if self.table.limit_ranks(limits) {
            // Other nodes may fit now.
            self.newcomer(context);
            self.tell_spares(context);
            self.plan_wake();
        }
    }
}
