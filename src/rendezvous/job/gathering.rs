//! Gathering: decides when a generation starts, and tells waiting nodes why it does not yet.

use std::fmt::Write as _;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Waiting, refused::Code};

use super::node::Node;
use super::node_table::NodeTable;
use super::{Job, Phase};
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::refusal;
use crate::rendezvous::messages;
use crate::rendezvous::ranks;

/// The time before a generation starts.
#[derive(Debug)]
pub(super) struct Gathering {
    began: Duration,
    /// Deadline for the nodes to join; `MAX` until the first one has.
    until: Duration,
    /// End of the back-off.
    not_before: Duration,
    /// MIN nodes are there: the generation starts at this time.
    last_call: Option<Duration>,
    /// A lost node may still train until then.
    replaces_at: Option<Duration>,
}

/// What the daemon does next.
enum Step {
    Wait,
    /// For this reason.
    Start(String),
    TimedOut,
}

impl Gathering {
    /// Nothing starts before `not_before`; after that, nodes have `timeout` to join.
    pub(super) fn new(now: Duration, not_before: Duration, timeout: Duration) -> Self {
        Self {
            began: now,
            until: not_before.saturating_add(timeout),
            not_before,
            last_call: None,
            replaces_at: None,
        }
    }

    /// Sets the deadline for the nodes to join.
    pub(super) fn wait_until(&mut self, until: Duration) {
        self.until = until;
    }

    pub(super) fn is_timed_out(&self, now: Duration) -> bool {
        self.until <= now
    }

    /// How long nodes have gathered, without the pause before.
    pub(super) fn waited(&self, now: Duration) -> Duration {
        now.saturating_sub(self.began)
    }

    /// Remaining back-off.
    pub(super) fn backoff_left(&self, now: Duration) -> Duration {
        self.not_before.saturating_sub(now)
    }

    /// The next deadline, if no node joins or leaves.
    pub(super) fn next_step(&self) -> Duration {
        // The end of the back-off is a step of its own only until it has passed (`began` moves there then).
        let backoff = (self.not_before > self.began).then_some(self.not_before);
        let steps = [backoff, self.last_call, self.replaces_at].into_iter().flatten();
        steps
            .map(|step| step.max(self.replaces_at.unwrap_or_default()))
            .fold(self.until, Duration::min)
    }

    /// Decides whether the generation after `last` starts now.
    fn decide(&mut self, context: &ApplyContext<'_>, table: &NodeTable, last: u64) -> Step {
        let now = context.at.now;
        if now < self.not_before {
            return Step::Wait;
        }
        // From here on the back-off is no deadline of its own.
        self.began = self.began.max(self.not_before);
        let (is_stopping, is_late) = (table.is_stopping(), self.is_timed_out(now));
        let ready = table.ready();
        let (min, max) = table.limits();
        // Nodes beyond MAX need not have joined again, but their workers are gone.
        let waits_for_workers = is_stopping && (ready < max || table.have_workers());
        let some_joined = || messages::joined(ready, min, max);
        if ready < min || min == 0 || (waits_for_workers && !is_late) {
            self.last_call = None;
            return if is_late { Step::TimedOut } else { Step::Wait };
        }
        if ready >= max {
            return Step::Start(format!("{} joined", messages::all(max)));
        }
        if !is_stopping && table.are_all_ready() {
            let all = messages::all(ready);
            return Step::Start(format!("{all} rejoined after generation {last}"));
        }
        if is_late {
            return Step::Start(format!("{} in time", some_joined()));
        }
        let last_call = now + table.last_call(context.config.last_call);
        if now < *self.last_call.get_or_insert(last_call) {
            return Step::Wait;
        }
        Step::Start(format!("{} within `last_call_timeout`", some_joined()))
    }
}

impl Job {
    /// What the nodes wait for, as a message.
    pub(super) fn waiting_words(&self, now: Duration) -> String {
        let gathering = match &self.phase {
            Phase::Gathering(gathering) => gathering,
            Phase::Recovering(recovery) => return recovery.waiting_words(now),
            Phase::Running(running) => return running.assignment().reason.clone(),
            Phase::Over(over) => return over.reason().to_owned(),
        };
        let ready = self.table.ready();
        let names = messages::list(self.table.hosts(Node::is_ready), ready as usize);
        let (min, max) = self.table.limits();
        let mut words = format!("{}: {names}", messages::joined(ready, min, max));
        if ready < min {
            let _ = write!(words, "; waiting for {} more", min - ready);
            words.push_str(&messages::time_left(gathering.until, now));
        } else if self.table.is_stopping() {
            words.push_str("; waiting for workers of the generation before to exit");
        } else if let Some(until) = self.takeover.until(now) {
            let left = until.saturating_sub(now).as_secs_f64();
            let _ = write!(
                words,
                "; a lost node may still train: waiting up to {left:.1} s for its end"
            );
        } else if let Some(last_call) = gathering.last_call {
            // To a tenth of a second.
            let left = (last_call.saturating_sub(now).as_secs_f64() * 10.0).round() / 10.0;
            let joined = messages::nodes(ready);
            words = format!("{joined} joined ({names}), enough to start; waiting up to {left} s for more");
        } else {
            words.push_str("; pausing before the restart");
        }
        words
    }

    /// Tells a waiting node what it waits for.
    pub(super) fn tell_waiting(&self, context: &mut ApplyContext<'_>, incarnation: &str, reason: String) {
        if let Some(node) = self.table.get(incarnation) {
            let waiting = Waiting {
                reason,
                lease_ms: context.config.lease_ms(),
            };
            node.send(context, self.counter.generation(), Reply::Waiting(waiting));
        }
    }

    /// Starts the next generation if the nodes are there, ends the job if they did not come in time.
    pub(super) fn consider_start(&mut self, context: &mut ApplyContext<'_>) {
        let Phase::Gathering(gathering) = &mut self.phase else {
            return;
        };
        gathering.replaces_at = self.takeover.until(context.at.now);
        if let Some(until) = gathering.replaces_at.filter(|_| self.table.nodes().is_empty()) {
            // It is known no earlier that no node comes back.
            gathering.until = gathering.until.max(until);
        }
        let step = gathering.decide(context, &self.table, self.counter.generation());
        let (is_held_up, is_late) = (
            gathering.replaces_at.is_some(),
            gathering.is_timed_out(context.at.now),
        );
        match step {
            Step::Start(_) if is_held_up && is_late => self.gathering_timed_out(context),
            Step::Start(_) if is_held_up => {}
            Step::Start(reason) => self.start(context, &reason),
            Step::TimedOut if !self.is_forgotten(context.at.now) => self.gathering_timed_out(context),
            // None of the nodes that an earlier daemon knew has come back, or it is not decided yet.
            Step::TimedOut | Step::Wait => {}
        }
    }

    fn gathering_timed_out(&mut self, context: &mut ApplyContext<'_>) {
        let Phase::Gathering(gathering) = &self.phase else {
            return;
        };
        let (min, max) = self.table.limits();
        let may_train = gathering.replaces_at.filter(|_| self.table.ready() >= min);
        let reason = messages::TimedOut {
            may_train: may_train.map(|until| until.saturating_sub(context.at.now)),
            job: &self.id,
            waited: context.at.now.saturating_sub(gathering.began),
            came: self.table.hosts(Node::is_ready),
            stopping: self.table.hosts(Node::is_stopping),
            gone: self.table.gone(),
            missing_ranks: ranks::missing_ranks(&self.table.candidates(), min),
            min,
            max,
        }
        .words();
        self.end(context, Reply::Refused(refusal(Code::TimedOut, reason)));
    }
}
