//! All failures of a job, as they reached the daemon.
//!
//! The first failure decides what follows, at once. Reports of other failures come later: from workers that ended
//! together with it, and from nodes that report how their workers ended when all of them are gone. The verdict on the
//! job carries the list as it is then, the same for every node. No node stops later for what is still to come.

use std::collections::BTreeSet;
use std::time::Duration;

use ddp_proto::printable;
use ddp_proto::rendezvous::{self, Failure, MAX_EXITS_OF_A_KIND, NodeStopped, WorkerExit};

use super::Job;
use super::node::Node;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::Origin;
use crate::rendezvous::messages::clip;

/// Failures that are listed; and as many workers that their agents stopped.
pub(in crate::rendezvous) const MAX_LISTED: usize = 16;
/// Most worker exits that are read from one message: failures and victims.
pub(in crate::rendezvous) const MAX_TAKEN: usize = 2 * MAX_EXITS_OF_A_KIND;
/// Workers whose ends are known, listed or not: agents repeat what they said when a stream breaks. Those of the last
/// generation of a job with [`Config::max_nodes`](crate::rendezvous::Config) fit, at [`MAX_TAKEN`] each.
pub(in crate::rendezvous) const MAX_KNOWN: usize = 1 << 20;
/// Ranks that ended with 0 before the job failed, of those listed.
const MAX_SUCCEEDED: usize = 64;
/// Bytes of a worker's own words, and of the path of its log, in the list.
const MAX_WORDS_BYTES: usize = 512;

/// The failures of one job, over all its generations.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// In order of arrival. Times are those of the daemon's monotonic clock; less than 0 before the daemon began.
    listed: Vec<Failure>,
    /// Generation and rank.
    known: BTreeSet<(u64, u32)>,
    unlisted: u32,
    unlisted_victims: u32,
}

impl Failures {
    /// A worker did not end with 0.
    fn worker(&mut self, now: Duration, generation: u64, hostname: &str, exit: &WorkerExit) {
        if !self.known.insert((generation, exit.rank)) {
            return;
        }
        if self.known.len() > MAX_KNOWN {
            // Drops an entry of the earliest generation: it sends no more reports.
            self.known.pop_first();
        }
        let words = |text: &str| clip(text, MAX_WORDS_BYTES).to_owned();
        let line = |text: &str| words(&printable::line(text));
        self.add(Failure {
            generation,
            hostname: hostname.to_owned(),
            exit: Some(WorkerExit {
                stderr_tail: Vec::new(),
                message: words(&exit.message),
                log_file: line(&exit.log_file),
                activity: line(&exit.activity),
                ..exit.clone()
            }),
            arrived_ns: nanoseconds(now),
            happened_ns: nanoseconds(now)
                .cast_signed()
                .saturating_sub_unsigned(exit.age_ns),
            ..Failure::default()
        });
    }

    /// A node is gone, and with it its workers.
    fn node(&mut self, now: Duration, generation: u64, hostname: &str, why: &str) {
        self.add(Failure {
            generation,
            hostname: hostname.to_owned(),
            node_gone: clip(why, MAX_WORDS_BYTES).to_owned(),
            arrived_ns: nanoseconds(now),
            happened_ns: nanoseconds(now).cast_signed(),
            ..Failure::default()
        });
    }

    fn add(&mut self, new: Failure) {
        let victim = is_victim(&new);
        let alike = self.listed.iter().filter(|old| is_victim(old) == victim);
        if alike.count() >= MAX_LISTED {
            self.count(u32::from(!victim), u32::from(victim));
            match self.entry_to_replace(&new) {
                Some(place) => drop(self.listed.remove(place)),
                None => return,
            }
        }
        self.listed.push(new);
    }

    /// Counts failures and stopped workers that the list does not hold.
    fn count(&mut self, failures: u32, victims: u32) {
        self.unlisted = self.unlisted.saturating_add(failures);
        self.unlisted_victims = self.unlisted_victims.saturating_add(victims);
    }

    /// What makes room for `new`: something of an earlier generation, and its first failure only if that is all.
    fn entry_to_replace(&self, new: &Failure) -> Option<usize> {
        let mut begun = BTreeSet::new();
        let (mut first, mut later) = (None, None);
        for (place, old) in self.listed.iter().enumerate() {
            if is_victim(old) != is_victim(new) || old.generation >= new.generation {
                continue;
            }
            if begun.insert(old.generation) {
                first = first.or(Some(place));
            } else {
                later = Some(place);
            }
        }
        later.or(first)
    }

    /// The list as a message; none while nothing has failed.
    pub(super) fn told(&self) -> Option<rendezvous::Failures> {
        // Both times count from here, so that no report comes before its event.
        let first = self.listed.first()?.arrived_ns;
        let mut failures = self.listed.clone();
        for failure in &mut failures {
            failure.arrived_ns = failure.arrived_ns.saturating_sub(first);
            failure.happened_ns = failure.happened_ns.saturating_sub_unsigned(first);
        }
        Some(rendezvous::Failures {
            failures,
            more_failures: self.unlisted,
            more_victims: self.unlisted_victims,
            succeeded_ranks: Vec::new(),
        })
    }
}

/// It was stopped: something else had failed, or a signal asked for it.
fn is_victim(failure: &Failure) -> bool {
    let exit = failure.exit.as_ref();
    exit.is_some_and(|exit| exit.stopped_with.is_some())
}

impl Job {
    /// Adds ended workers to the list, whatever was decided meanwhile.
    pub(super) fn note_exits(&mut self, context: &ApplyContext<'_>, from: &Origin, exits: &[WorkerExit]) {
        let ran = 0 < from.generation && from.generation <= self.counter.highest();
        if let (true, Some(node)) = (ran, self.table.get(&from.incarnation)) {
            for exit in exits.iter().take(MAX_TAKEN) {
                self.failures
                    .worker(context.at.now, from.generation, node.hostname(), exit);
            }
        }
    }

    /// Adds a lost member of the running or last generation to the list.
    pub(super) fn note_node_gone(&mut self, context: &ApplyContext<'_>, incarnation: &str, why: &str) {
        let has_part = self.table.rank_of(incarnation).is_some() && !self.has_succeeded(incarnation);
        if let (true, Some(node)) = (has_part, self.table.get(incarnation)) {
            let generation = self.counter.generation();
            self.failures
                .node(context.at.now, generation, node.hostname(), why);
        }
    }

    /// What has failed, as a message; none while nothing has. Ranks that ended with 0 before may be the cause: others
    /// waited for them.
    pub(super) fn told_failures(&self) -> Option<rendezvous::Failures> {
        let mut failures = self.failures.told()?;
        if let Some(running) = self.phase.running() {
            let node_ranks = running.succeeded().filter_map(|node| self.table.rank_of(node));
            let ranks = node_ranks.flat_map(|node_rank| running.nodes().ranks_of(node_rank));
            failures.succeeded_ranks = ranks.take(MAX_SUCCEEDED).collect();
        }
        Some(failures)
    }

    /// All workers of a node are gone.
    pub(super) fn node_stopped(
        &mut self,
        context: &mut ApplyContext<'_>,
        from: &Origin,
        stopped: &NodeStopped,
    ) {
        self.note_exits(context, from, &stopped.exits);
        let confirm = |node: &mut Node| node.confirm_stopped(from.generation);
        if self.table.change(&from.incarnation, confirm) == Some(true) {
            self.failures.count(stopped.more_failures, stopped.more_victims);
            self.takeover.ended(&from.incarnation);
            if from.generation == self.counter.generation() {
                self.takeover.member_ends(Duration::ZERO);
            }
        } else {
            self.ignore(context, from, "NodeStopped");
        }
    }
}

/// Does not overflow for 584 years.
fn nanoseconds(since_the_daemon_began: Duration) -> u64 {
    since_the_daemon_began.as_nanos() as u64
}
