//! The running generation: which members succeeded, its progress, and what may end it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ddp_proto::rendezvous::{Assignment, LostRank};

use super::generation_end::GenerationEnd;
use super::hang::HangReports;
use super::lease_extension::Progress;
use super::node::{LeaseExtension, Node};
use super::stragglers::Stragglers;
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::nodes::list::NodeList;

/// The running generation.
#[derive(Debug, Default)]
pub(super) struct Running {
    /// The part of the assignment that all nodes receive.
    assignment: Assignment,
    nodes: NodeList,
    /// Members whose workers all ended with 0, by incarnation.
    succeeded: BTreeSet<String>,
    /// A failure that another rank caused, or that may follow from a member whose connection is broken.
    suspect: Option<Suspect>,
    /// By node rank: members that a peer reported lost.
    lost_peers: BTreeMap<u32, LostRank>,
    hang_reports: HangReports,
    progress: Progress,
    stragglers: Stragglers,
    /// When this daemon assigned it, or took it up.
    since: Duration,
    /// How long it ran before that, under an earlier daemon.
    ran_before: Duration,
    /// The time at which the job grows by the nodes that have joined.
    scale_up: Option<Duration>,
}

/// A failure that ends the generation unless its cause is reported in time.
#[derive(Debug)]
struct Suspect {
    end: GenerationEnd,
    /// Deadline for the cause, if no member's connection is broken.
    until: Duration,
    /// Last deadline.
    latest: Duration,
}

impl Running {
    /// One that begins now, or has run for some time under an earlier daemon.
    pub(super) fn new(assignment: Assignment, nodes: NodeList, now: Duration, ran_before: Duration) -> Self {
        Self {
            assignment,
            nodes,
            since: now,
            ran_before,
            ..Self::default()
        }
    }

    /// What all nodes are told alike.
    pub(super) fn assignment(&self) -> &Assignment {
        &self.assignment
    }

    pub(super) fn nodes(&self) -> &NodeList {
        &self.nodes
    }

    pub(super) fn ran(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since) + self.ran_before
    }

    /// All workers of a member ended with 0. Returns the number of such members.
    pub(super) fn succeed(&mut self, incarnation: &str, now: Duration) -> usize {
        self.succeeded.insert(incarnation.to_owned());
        self.progress.succeed(now);
        self.succeeded.len()
    }

    pub(super) fn has_succeeded(&self, incarnation: &str) -> bool {
        self.succeeded.contains(incarnation)
    }

    pub(super) fn has_successes(&self) -> bool {
        !self.succeeded.is_empty()
    }

    /// Members whose workers all ended with 0.
    pub(super) fn succeeded(&self) -> impl ExactSizeIterator<Item = &String> {
        self.succeeded.iter()
    }

    pub(super) fn hang_reports(&mut self) -> &mut HangReports {
        &mut self.hang_reports
    }

    pub(super) fn stragglers(&self) -> &Stragglers {
        &self.stragglers
    }

    pub(super) fn stragglers_mut(&mut self) -> &mut Stragglers {
        &mut self.stragglers
    }

    pub(super) fn note_step(&mut self, now: Duration, step: u64) {
        self.progress.note(now, step);
    }

    /// Why the lease of a silent member may be extended, and until when. Never once a worker has failed.
    pub(super) fn extend_lease(&self, config: &Config, node: &Node) -> Option<(LeaseExtension, Duration)> {
        let progress = self.suspect.is_none().then_some(&self.progress);
        progress.and_then(|progress| progress.extend_lease(config, node))
    }

    /// A member reports that a worker lost its connection to a rank of another node. True if that node was not reported
    /// before.
    pub(super) fn note_lost_peer(&mut self, own: u32, seen: LostRank) -> bool {
        let Some(node_rank) = self.nodes.node_of(seen.rank) else {
            return false;
        };
        let is_witness = node_rank != own && self.nodes.node_of(seen.witness) == Some(own);
        let is_news = is_witness && !self.lost_peers.contains_key(&node_rank);
        if is_news {
            self.lost_peers.insert(node_rank, seen);
        }
        is_news
    }

    /// Members that a peer reported lost, by node rank.
    pub(super) fn lost_peers(&self) -> &BTreeMap<u32, LostRank> {
        &self.lost_peers
    }

    /// A failure waits for its cause.
    pub(super) fn has_suspect(&self) -> bool {
        self.suspect.is_some()
    }

    /// Holds a failure back, for its cause to arrive; false if another one is held back that may as well be the cause. A
    /// connection that breaks again and again does not hold it back for ever.
    pub(super) fn hold_back(&mut self, context: &ApplyContext<'_>, end: GenerationEnd) -> bool {
        let until = context.at.now + context.config.culprit_wait;
        let (until, latest) = match &self.suspect {
            None => (until, until + context.config.lease),
            Some(held) if held.end.is_consequence() && !end.is_consequence() => (held.until, held.latest),
            Some(_) => return false,
        };
        self.suspect = Some(Suspect { end, until, latest });
        true
    }

    /// Waits longer for the cause: a member has reconnected, and its reports follow.
    pub(super) fn await_reports(&mut self, context: &ApplyContext<'_>) {
        if let Some(suspect) = &mut self.suspect {
            suspect.until = suspect.until.max(context.at.now + context.config.culprit_wait);
        }
    }

    /// When the failure that is held back ends the generation, unless a node comes back before. `away` is when each member
    /// is lost that is out of reach.
    fn suspect_until(&self, away: impl Iterator<Item = Duration>) -> Option<Duration> {
        let suspect = self.suspect.as_ref()?;
        let until = away.chain([suspect.until]).max();
        until.map(|until| until.min(suspect.latest))
    }

    /// The failure that was held back, if its time is over and no node is away that may be the cause.
    pub(super) fn take_due_suspect(&mut self, now: Duration, away: &[Duration]) -> Option<GenerationEnd> {
        let until = self.suspect_until(away.iter().copied());
        let is_due = until.is_some_and(|until| until <= now);
        let suspect = self.suspect.take_if(|_| is_due);
        suspect.map(|suspect| suspect.end)
    }

    /// The failure that was held back, if there is one and it is no consequence.
    pub(super) fn take_cause(&mut self) -> Option<GenerationEnd> {
        let cause = self.suspect.take_if(|suspect| !suspect.end.is_consequence());
        cause.map(|suspect| suspect.end)
    }

    /// Nodes have joined: the job grows at this time, unless it does so earlier.
    pub(super) fn plan_scale_up(&mut self, at: Duration) {
        self.scale_up.get_or_insert(at);
    }

    /// True if the job grows by the newcomers now.
    pub(super) fn grows(&mut self, now: Duration, newcomers: usize, is_full: bool) -> bool {
        if newcomers == 0 {
            self.scale_up = None;
            return false;
        }
        is_full || self.scale_up.is_some_and(|at| at <= now)
    }

    /// When there is something to decide again, if nothing is heard. `away` is as for the failure that is held back.
    pub(super) fn next_step(&self, away: impl Iterator<Item = Duration>) -> Option<Duration> {
        let suspect = self.suspect_until(away);
        [suspect, self.scale_up].into_iter().flatten().min()
    }
}
