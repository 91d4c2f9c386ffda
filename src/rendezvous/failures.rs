//! All failures of a job, as they reached the daemon.
//!
//! The first failure decides what follows, at once. Reports of other failures come later: from workers that ended
//! together with it, and from nodes that report how their workers ended when all of them are gone. The verdict on the
//! job carries the list as it is then, the same for every node. No node stops later for what is still to come.

use std::collections::BTreeSet;
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{self, Failure, MAX_EXITS_OF_A_KIND, NodeStopped, WorkerExit};

use super::event::Turn;
use super::job::{Job, Readiness};
use super::kv::clip;

/// Failures that are listed; and as many workers that their agents stopped.
pub(super) const MAX_LISTED: usize = 16;
/// Ends that are taken from one message: failures and victims.
pub(super) const MAX_TAKEN: usize = 2 * MAX_EXITS_OF_A_KIND;
/// Workers whose ends are known, listed or not: agents repeat what they said when a stream breaks. Those of the last
/// generation of a job with [`Config::max_nodes`](super::Config) fit, at [`MAX_TAKEN`] each.
pub(super) const MAX_KNOWN: usize = 1 << 20;
/// Bytes of a worker's own words, and of the path of its log, in the list.
const MAX_WORDS_BYTES: usize = 512;

/// The failures of one job, over all its generations.
#[derive(Debug, Default)]
pub(super) struct Failures {
    /// In order of arrival.
    listed: Vec<Entry>,
    /// Generation and rank.
    known: BTreeSet<(u64, u32)>,
    unlisted: u32,
    unlisted_victims: u32,
}

#[derive(Debug)]
struct Entry {
    generation: u64,
    hostname: String,
    what: What,
    /// On the daemon's monotonic clock, in nanoseconds; less than 0 before the daemon began.
    arrived_ns: i64,
    happened_ns: i64,
}

#[derive(Debug)]
enum What {
    Exit(Box<WorkerExit>),
    /// Why, in words.
    NodeGone(String),
}

impl Failures {
    /// A worker did not end with 0.
    fn worker(&mut self, now: Duration, generation: u64, hostname: &str, exit: &WorkerExit) {
        if !self.known.insert((generation, exit.rank)) {
            return;
        }
        if self.known.len() > MAX_KNOWN {
            // Of the earliest generation, of which no report comes any more.
            self.known.pop_first();
        }
        let words = |text: &str| clip(text, MAX_WORDS_BYTES).to_owned();
        self.add(Entry {
            generation,
            hostname: hostname.to_owned(),
            arrived_ns: nanoseconds(now),
            happened_ns: nanoseconds(now).saturating_sub_unsigned(exit.age_ns),
            what: What::Exit(Box::new(WorkerExit {
                stderr_tail: Vec::new(),
                message: words(&exit.message),
                log_file: words(&exit.log_file),
                ..exit.clone()
            })),
        });
    }

    /// A node is gone, and with it its workers.
    fn node(&mut self, now: Duration, generation: u64, hostname: &str, why: &str) {
        self.add(Entry {
            generation,
            hostname: hostname.to_owned(),
            arrived_ns: nanoseconds(now),
            happened_ns: nanoseconds(now),
            what: What::NodeGone(clip(why, MAX_WORDS_BYTES).to_owned()),
        });
    }

    fn add(&mut self, entry: Entry) {
        let victim = entry.is_victim();
        let alike = self.listed.iter().filter(|e| e.is_victim() == victim);
        if alike.count() >= MAX_LISTED {
            self.count(u32::from(!victim), u32::from(victim));
            match self.least_telling(&entry) {
                Some(place) => drop(self.listed.remove(place)),
                None => return,
            }
        }
        self.listed.push(entry);
    }

    /// So many more are not in the list.
    fn count(&mut self, failures: u32, victims: u32) {
        self.unlisted = self.unlisted.saturating_add(failures);
        self.unlisted_victims = self.unlisted_victims.saturating_add(victims);
    }

    /// What makes room for `new`: something of an earlier generation, and its first failure only if that is all.
    fn least_telling(&self, new: &Entry) -> Option<usize> {
        let mut begun = BTreeSet::new();
        let (mut first, mut later) = (None, None);
        for (place, entry) in self.listed.iter().enumerate() {
            if entry.is_victim() != new.is_victim() || entry.generation >= new.generation {
                continue;
            }
            if begun.insert(entry.generation) {
                first = first.or(Some(place));
            } else {
                later = Some(place);
            }
        }
        later.or(first)
    }

    /// The list as it goes over the wire; none while nothing has failed.
    pub(super) fn told(&self) -> Option<rendezvous::Failures> {
        // Both times count from here, so that no report comes before its event.
        let first = self.listed.first()?.arrived_ns;
        let told = |entry: &Entry| {
            let (exit, node_gone) = match &entry.what {
                What::Exit(exit) => (Some(WorkerExit::clone(exit)), String::new()),
                What::NodeGone(why) => (None, why.clone()),
            };
            Failure {
                generation: entry.generation,
                hostname: entry.hostname.clone(),
                exit,
                node_gone,
                arrived_ns: entry.arrived_ns.saturating_sub(first) as u64,
                happened_ns: entry.happened_ns.saturating_sub(first),
            }
        };
        Some(rendezvous::Failures {
            failures: self.listed.iter().map(told).collect(),
            more_failures: self.unlisted,
            more_victims: self.unlisted_victims,
        })
    }
}

impl Entry {
    /// It was stopped: something else had failed, or a signal asked for it.
    fn is_victim(&self) -> bool {
        matches!(&self.what, What::Exit(exit) if exit.stopped_with.is_some())
    }
}

impl Job {
    /// Takes down how workers ended, whatever was decided meanwhile.
    pub(super) fn note_exits(
        &mut self,
        turn: &Turn<'_>,
        incarnation: &str,
        generation: u64,
        exits: &[WorkerExit],
    ) {
        let ran = 0 < generation && generation <= self.highest_generation();
        if let (true, Some(node)) = (ran, self.nodes.get(incarnation)) {
            for exit in exits.iter().take(MAX_TAKEN) {
                self.failures
                    .worker(turn.at.now, generation, &node.join.hostname, exit);
            }
        }
    }

    /// Takes down that a node is gone that had a part in the generation that runs or ran last.
    pub(super) fn note_node_gone(&mut self, turn: &Turn<'_>, incarnation: &str, why: &str) {
        let has_part = self.rank_of(incarnation).is_some() && !self.has_succeeded(incarnation);
        if let (true, Some(node)) = (has_part, self.nodes.get(incarnation)) {
            self.failures
                .node(turn.at.now, self.generation, &node.join.hostname, why);
        }
    }

    /// All workers of a node are gone.
    pub(super) fn node_stopped(
        &mut self,
        turn: &mut Turn<'_>,
        incarnation: &str,
        generation: u64,
        stopped: &NodeStopped,
    ) {
        self.note_exits(turn, incarnation, generation, &stopped.exits);
        let node = self.nodes.get_mut(incarnation);
        let expected = node.filter(|node| node.readiness == Readiness::Stopping(generation));
        if let Some(node) = expected {
            node.readiness = Readiness::Stopped;
            self.failures.count(stopped.more_failures, stopped.more_victims);
        } else {
            self.ignore(turn, incarnation, generation, "NodeStopped");
        }
    }
}

/// For 292 years.
fn nanoseconds(since_the_daemon_began: Duration) -> i64 {
    since_the_daemon_began.as_nanos() as i64
}

/// Puts the list into a verdict. A job that succeeded has nothing to tell.
pub(super) fn tell(verdict: &mut Reply, failures: Option<rendezvous::Failures>) {
    match verdict {
        Reply::JobOver(over) if over.exit_code != 0 => over.failures = failures,
        Reply::Refused(refused) => refused.failures = failures,
        _ => {}
    }
}
