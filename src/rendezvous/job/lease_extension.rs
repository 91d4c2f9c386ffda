//! Heartbeat leases of members that fall silent: extended while their peers still make progress.
//!
//! A step of synchronous training needs every rank. So each heartbeat that tells of two more steps proves that all
//! members took part in one after the earlier of them: the first of the two may have been under way. A silent node is lost
//! when training has not advanced for as long as it may be silent itself, or [`Config::silence_limit`] after its last
//! word; [`RECONNECT_LIMIT`] after it if its connection was closed, as that of a process that dies. Nothing is proved
//! where workers report no steps, nor once a worker has failed.

use std::time::Duration;

use ddp_proto::rendezvous::Waiting;
use ddp_proto::rendezvous::daemon_message::Body as Reply;

use super::Job;
use super::node::{LeaseExtension, Node};
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::shared;

/// Peers have to report progress within the time of this many steps.
const PATIENCE_STEPS: u32 = 3;

/// A launcher that lives connects again within this time. Steps prove less than it seems where ranks do not train in
/// lock-step.
const RECONNECT_LIMIT: Duration = Duration::from_mins(1);

/// The longest time that the daemon waits for a silent node.
fn limit(config: &Config, node: &Node) -> Duration {
    if node.was_closed() {
        config.silence_limit.min(RECONNECT_LIMIT)
    } else {
        config.silence_limit
    }
}

/// The progress of the generation, by the heartbeats of all members.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The last two times at which the highest step had grown, and that step; the latest first.
    seen: [Option<(Duration, u64)>; 2],
    /// How long a step takes.
    step_time: Option<Duration>,
    /// All members took part in a step after this moment.
    proven: Option<Duration>,
    /// When the last member ended with success.
    success: Option<Duration>,
}

impl Progress {
    /// A member reports its highest step.
    pub(super) fn note(&mut self, now: Duration, step: u64) {
        let [last, before] = self.seen;
        let Some((at, reached)) = last else {
            self.seen = [Some((now, step)), None];
            return;
        };
        if step <= reached {
            return;
        }
        // Over two reports: members report the same step at different times.
        let (since, from) = before.unwrap_or((at, reached));
        let steps = u32::try_from(step - from).unwrap_or(u32::MAX);
        self.step_time = Some(now.saturating_sub(since) / steps);
        let two_steps = [last, before]
            .into_iter()
            .flatten()
            .find(|(_, seen)| step - seen >= 2);
        self.proven = self.proven.max(two_steps.map(|(at, _)| at));
        self.seen = [Some((now, step)), last];
    }

    /// A member ended with success.
    pub(super) fn succeed(&mut self, now: Duration) {
        self.success = Some(now);
    }

    /// How long the daemon waits for a silent member while no step ends; none if workers report no steps.
    fn patience(&self, config: &Config) -> Option<Duration> {
        let peers_time = self.step_time? * PATIENCE_STEPS + 2 * config.heartbeat_interval();
        Some(config.lease.max(peers_time))
    }

    /// Why the lease of a silent member may be extended, and until when.
    pub(super) fn extend_lease(&self, config: &Config, node: &Node) -> Option<(LeaseExtension, Duration)> {
        let last_word = node.last_word();
        let patience = self.patience(config)?;
        let bound = last_word + limit(config, node);
        // A peer is done with all steps, and this node was alive until then. If its connection broke then, the node
        // probably exited.
        let may_be_cut_off = (node.is_connected() || node.is_proven()) && !node.was_closed();
        if may_be_cut_off && self.success.is_some_and(|at| at > last_word) {
            return Some((LeaseExtension::Proven, bound));
        }
        // Once a member is gone, no step ends but the one that it had contributed to.
        let advanced = self.seen[0].map_or(last_word, |(at, _)| at.max(last_word));
        let extension = if self.proven.is_some_and(|at| at > last_word) {
            LeaseExtension::Proven
        } else {
            LeaseExtension::Asked
        };
        Some((extension, bound.min(advanced + patience)))
    }
}

impl Job {
    /// Tells the other nodes that a silent one is back.
    pub(super) fn tell_back(
        &self,
        context: &mut ApplyContext<'_>,
        incarnation: &str,
        silence: Option<Duration>,
    ) {
        if let Some(silence) = silence {
            let name = self.table.name_of(incarnation);
            let words = format!("{name} is back after {:.1} s", silence.as_secs_f64());
            context.decided(format!("job `{}`: {words}", self.id));
            self.tell_others(context, incarnation, &words);
        }
    }

    pub(super) fn tell_others(&self, context: &mut ApplyContext<'_>, incarnation: &str, words: &str) {
        let waiting = Waiting {
            reason: words.to_owned(),
            lease_ms: context.config.lease_ms(),
        };
        let message = shared(self.counter.generation(), Reply::Waiting(waiting));
        for (_, other) in self.table.others(incarnation) {
            other.send_shared(context, &message);
        }
    }

    /// The lease of a node has ended: extends it if its peers make progress, and returns whether it did.
    pub(super) fn extend_lease(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) -> bool {
        let is_at_work = self.is_member(incarnation) && !self.has_succeeded(incarnation);
        if !is_at_work || self.table.members().len() == 1 {
            return false;
        }
        let (Some(running), Some(node)) = (self.phase.running(), self.table.get(incarnation)) else {
            return false;
        };
        let extension = running.extend_lease(context.config, node);
        // A node that others can replace stops its workers at that time.
        let replaced_after = self.takeover.after().unwrap_or(Duration::MAX / 2);
        let last = node.last_word() + replaced_after;
        let extension = extension.map(|(extension, until)| (extension, until.min(last)));
        let Some((extension, until)) = extension.filter(|(_, until)| *until > context.at.now) else {
            return false;
        };
        let silence = context.at.now.saturating_sub(node.last_word()).as_secs_f64();
        let bound = limit(context.config, node).min(replaced_after).as_secs_f64();
        let was_closed = node.was_closed();
        let hostname = node.hostname().to_owned();
        let is_news = self
            .table
            .change(incarnation, |node| node.extend_lease(extension, until));
        if is_news == Some(true) {
            let awaited = match extension {
                LeaseExtension::Asked => "; waiting until its peers must have noticed".to_owned(),
                LeaseExtension::Proven => {
                    format!(", but the reported steps advance: waiting up to {bound} s for it")
                }
            };
            let words = if was_closed {
                format!("node `{hostname}` closed its connection {silence:.1} s ago{awaited}")
            } else {
                format!("node `{hostname}` has been silent for {silence:.1} s{awaited}")
            };
            context.decided(format!("job `{}`: {words}", self.id));
            if extension == LeaseExtension::Proven {
                self.tell_others(context, incarnation, &words);
            }
        }
        true
    }
}
