//! The nodes of a job: which are there, which were in the last assignment, which are lost, and how many it needs.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{GenerationOver, Join, NodeStatus};

use super::joining::join_timeout;
use super::node::Node;
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::shared;
use crate::rendezvous::messages;
use crate::rendezvous::nodes::deadlines::Deadlines;
use crate::rendezvous::ranks::{self, Candidate, Member};
use crate::rendezvous::size::{Limits, RankLimits};

/// Lost nodes that a job remembers: one that comes back receives the verdict.
const MAX_LOST: usize = 4096;

/// Nodes that a list for people holds.
const MAX_LISTED: usize = 1024;

/// The nodes of one job. Each is known by its incarnation.
#[derive(Debug, Default)]
pub(super) struct NodeTable {
    nodes: BTreeMap<String, Node>,
    /// How many of them are ready, and how many are stopping.
    ready: usize,
    stopping: usize,
    away: BTreeSet<String>,
    leases: Deadlines,
    /// Node rank of each member.
    ranks: HashMap<String, u32>,
    /// Nodes of the last assignment, by node rank: ranks are sticky.
    members: Vec<Member>,
    /// Lost nodes, newest last: they may come back when the job is over.
    lost: VecDeque<String>,
    /// By the holder of a rank: the node that takes its place when it is lost.
    successors: BTreeMap<String, String>,
    /// Number of nodes that ever joined: the next arrival number.
    arrivals: u64,
    /// The longest `--rdzv-conf join_timeout` of all nodes so far: used while no node is there.
    patience: Duration,
    /// The numbers of ranks that the workers support, as they reported last.
    rank_limits: RankLimits,
}

/// What is counted of a node; all false for one that is not there.
#[derive(Clone, Copy, Debug, Default)]
struct NodeFlags {
    is_ready: bool,
    is_stopping: bool,
    is_away: bool,
}

impl NodeFlags {
    fn of(node: Option<&Node>) -> Self {
        node.map_or_else(Self::default, |node| Self {
            is_ready: node.is_ready(),
            is_stopping: node.is_stopping(),
            is_away: node.is_away(),
        })
    }
}

impl NodeTable {
    #[cfg(test)]
    pub(super) fn assert_counts(&self) {
        let count = |flag: fn(&Node) -> bool| self.nodes.values().filter(|node| flag(node)).count();
        assert_eq!(
            (self.ready, self.stopping),
            (count(Node::is_ready), count(Node::is_stopping))
        );
        assert_eq!(self.away.len(), count(Node::is_away));
        let earliest = self.nodes.values().map(Node::lease_until).min();
        assert!(self.leases.next() <= earliest, "a lease would be forgotten");
    }

    pub(super) fn get(&self, incarnation: &str) -> Option<&Node> {
        self.nodes.get(incarnation)
    }

    /// Changes a node; none if it is not there.
    pub(super) fn change<T>(&mut self, incarnation: &str, change: impl FnOnce(&mut Node) -> T) -> Option<T> {
        let node = self.nodes.get_mut(incarnation)?;
        let before = NodeFlags::of(Some(node));
        let result = change(node);
        self.count(incarnation, before);
        Some(result)
    }

    /// Keeps the counts up to date after a node has come, gone or changed, so that no message looks at all nodes.
    fn count(&mut self, incarnation: &str, before: NodeFlags) {
        let node = self.nodes.get(incarnation);
        self.leases.note(incarnation, node.map(Node::lease_until));
        let after = NodeFlags::of(node);
        self.ready = self.ready + usize::from(after.is_ready) - usize::from(before.is_ready);
        self.stopping = self.stopping + usize::from(after.is_stopping) - usize::from(before.is_stopping);
        if after.is_away && !before.is_away {
            self.away.insert(incarnation.to_owned());
        } else if before.is_away && !after.is_away {
            self.away.remove(incarnation);
        }
    }

    pub(super) fn nodes(&self) -> &BTreeMap<String, Node> {
        &self.nodes
    }

    /// Who has the job: node rank 0, or any node before there are ranks.
    pub(super) fn owner(&self) -> Option<&Join> {
        let first = self
            .members
            .first()
            .and_then(|first| self.nodes.get(&first.incarnation));
        first.or_else(|| self.nodes.values().next()).map(Node::join)
    }

    /// All nodes but this one.
    pub(super) fn others(&self, incarnation: &str) -> impl Iterator<Item = (&String, &Node)> {
        self.nodes.iter().filter(move |(other, _)| *other != incarnation)
    }

    /// A node is about to join. Returns its arrival number, and how long the daemon may wait for other nodes.
    pub(super) fn expect(&mut self, config: &Config, join: &Join) -> (u64, Duration) {
        let timeout = join_timeout(config, join);
        self.patience = self.patience.max(timeout);
        self.arrivals += 1;
        (self.arrivals - 1, timeout)
    }

    pub(super) fn add(&mut self, incarnation: &str, node: Node) {
        let before = self.nodes.insert(incarnation.to_owned(), node);
        self.count(incarnation, NodeFlags::of(before.as_ref()));
    }

    pub(super) fn dismiss(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        if let Some(node) = self.nodes.remove(incarnation) {
            self.count(incarnation, NodeFlags::of(Some(&node)));
            node.close(context);
            self.successors.retain(|_, successor| successor != incarnation);
        }
        if let Some(successor) = self.successors.remove(incarnation) {
            self.change(&successor, |node| node.wait_for_place(false));
        }
    }

    /// No node has been connected or heard for longer than a lease, though the job has nodes.
    pub(super) fn is_deserted(&self, context: &ApplyContext<'_>) -> bool {
        let is_gone = |node: &Node| {
            let silence = context.at.now.saturating_sub(node.last_word());
            !node.is_connected() && silence > context.config.lease
        };
        !self.nodes.is_empty() && self.nodes.values().all(is_gone)
    }

    pub(super) fn dismiss_all(&mut self, context: &mut ApplyContext<'_>) {
        for (incarnation, node) in std::mem::take(&mut self.nodes) {
            self.count(&incarnation, NodeFlags::of(Some(&node)));
            node.close(context);
        }
    }

    pub(super) fn lose(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        if self.nodes.contains_key(incarnation) {
            self.dismiss(context, incarnation);
            if self.lost.len() >= MAX_LOST {
                self.lost.pop_front();
            }
            self.lost.push_back(incarnation.to_owned());
        }
    }

    pub(super) fn is_lost(&self, incarnation: &str) -> bool {
        self.lost.iter().any(|lost| lost == incarnation)
    }

    /// All nodes that the end of the job concerns.
    pub(super) fn concerned(&self) -> BTreeSet<String> {
        self.nodes.keys().chain(&self.lost).cloned().collect()
    }

    /// Nodes whose leases have ended. The caller extends each lease or loses the node.
    pub(super) fn expired(&mut self, context: &ApplyContext<'_>) -> Vec<String> {
        let lease_of = |incarnation: &str| self.nodes.get(incarnation).map(Node::lease_until);
        let slack = context.config.lease / 8;
        self.leases.expired(context.at.now, slack, lease_of)
    }

    /// No lease ends before `until`.
    pub(super) fn renew_leases(&mut self, until: Duration) {
        self.nodes.values_mut().for_each(|node| node.renew_lease(until));
    }

    /// The next end of a lease; it may be early, never late.
    pub(super) fn next_lease(&self) -> Option<Duration> {
        self.leases.next()
    }

    /// Ends all lease extensions: the generation is over, or a failure may follow from a silent node.
    pub(super) fn end_lease_extensions(&mut self, now: Duration) {
        for incarnation in self.away.clone() {
            self.change(&incarnation, |node| node.end_lease_extension(now));
        }
    }

    pub(super) fn send_all(&self, context: &mut ApplyContext<'_>, generation: u64, body: &Reply) {
        let message = shared(generation, body.clone());
        for node in self.nodes.values() {
            node.send_shared(context, &message);
        }
    }

    pub(super) fn members(&self) -> &[Member] {
        &self.members
    }

    /// Members that are there.
    pub(super) fn members_there(&self) -> impl Iterator<Item = (&String, &Node)> {
        let members = self.members.iter().map(|member| &member.incarnation);
        members.filter_map(|incarnation| self.nodes.get_key_value(incarnation))
    }

    /// Members that are there but out of reach, with their ranks, in no order.
    pub(super) fn members_away(&self) -> impl Iterator<Item = (u32, &String, &Node)> {
        self.away()
            .filter_map(|(incarnation, node)| Some((self.rank_of(incarnation)?, incarnation, node)))
    }

    /// Nodes that are out of reach.
    pub(super) fn away(&self) -> impl Iterator<Item = (&String, &Node)> {
        self.away
            .iter()
            .filter_map(|incarnation| self.nodes.get_key_value(incarnation))
    }

    pub(super) fn rank_of(&self, incarnation: &str) -> Option<u32> {
        self.ranks.get(incarnation).copied()
    }

    /// Another node that asked for this rank.
    pub(super) fn holder_of_rank(&self, asked: Option<u32>, incarnation: &str) -> Option<(&String, &Node)> {
        let mut others = self.others(incarnation);
        others.find(|(_, node)| asked.is_some() && node.join().node_rank == asked)
    }

    /// The first node takes part only when the holder of its rank is lost.
    pub(super) fn wait_for(&mut self, successor: &str, holder: String) {
        self.change(successor, |node| node.wait_for_place(true));
        self.successors.insert(holder, successor.to_owned());
    }

    /// The node that waits to take the place of this one.
    pub(super) fn successor_of(&self, holder: &str) -> Option<&String> {
        self.successors.get(holder)
    }

    /// Number of connected nodes.
    pub(super) fn connected(&self) -> usize {
        self.nodes.values().filter(|node| node.is_connected()).count()
    }

    /// The name of a node in messages: its host, and its rank if it has one.
    pub(super) fn name_of(&self, incarnation: &str) -> String {
        let rank = self.rank_of(incarnation);
        let member = rank.map(|rank| self.members[rank as usize].hostname.as_str());
        let host = self.get(incarnation).map(Node::hostname).or(member);
        messages::node(host.unwrap_or("unknown"), rank)
    }

    /// Makes these nodes the members of the next generation, in order of their ranks.
    pub(super) fn assign(&mut self, chosen: Vec<Candidate>) {
        let members = chosen.into_iter();
        self.set_members(members.map(|c| Member::new(c.incarnation, c.hostname)).collect());
        self.nodes.values_mut().for_each(|node| node.reached(None));
    }

    /// These nodes are the members of a generation that runs already.
    pub(super) fn take_up(&mut self, members: Vec<Member>, rank_limits: Option<RankLimits>) {
        self.set_members(members);
        self.rank_limits = rank_limits.unwrap_or(self.rank_limits);
    }

    fn set_members(&mut self, members: Vec<Member>) {
        self.ranks.clear();
        for (member, rank) in members.iter().zip(0..) {
            self.ranks.entry(member.incarnation.clone()).or_insert(rank);
        }
        self.members = members;
    }

    /// The generation is over: its nodes are to stop their workers.
    pub(super) fn stop_members(
        &mut self,
        context: &mut ApplyContext<'_>,
        generation: u64,
        over: &GenerationOver,
    ) {
        let message = shared(generation, Reply::GenerationOver(over.clone()));
        let members = std::mem::take(&mut self.members);
        for member in &members {
            self.change(&member.incarnation, |node| {
                node.stop_workers(context, generation, &message);
            });
        }
        self.members = members;
    }

    /// The node left for good: the next generation does not wait for it.
    pub(super) fn mark_left(&mut self, incarnation: &str) {
        if let Some(rank) = self.rank_of(incarnation) {
            self.members[rank as usize].has_left = true;
        }
    }

    /// All nodes of the last generation are ready for the next one, unless they have left.
    pub(super) fn are_all_ready(&self) -> bool {
        let left = self.members.iter().filter(|member| member.has_left).count();
        // Most of the time too few nodes are ready for a look at each member.
        self.ready >= self.members.len() - left && self.are_members(Node::is_ready)
    }

    /// All nodes of the last generation are there, ready or not, unless they have left; and they are enough.
    pub(super) fn are_all_there(&self) -> bool {
        let left = self.members.iter().filter(|member| member.has_left).count();
        let are_enough = self.members.len() - left >= self.limits().0 as usize;
        are_enough && self.are_members(|_| true)
    }

    fn are_members(&self, wanted: impl Fn(&Node) -> bool) -> bool {
        let mut expected = self.members.iter().filter(|member| !member.has_left);
        !self.members.is_empty() && expected.all(|member| self.get(&member.incarnation).is_some_and(&wanted))
    }

    /// Hosts of nodes of the last generation that are gone. A daemon that was restarted may never have learned the name
    /// of one.
    pub(super) fn gone(&self) -> Vec<&str> {
        let gone =
            |member: &&Member| !member.hostname.is_empty() && !self.nodes.contains_key(&member.incarnation);
        let members = self.members.iter().filter(gone);
        members.map(|member| member.hostname.as_str()).collect()
    }

    /// Hosts of the nodes of which this is true.
    pub(super) fn hosts(&self, wanted: impl Fn(&Node) -> bool) -> Vec<&str> {
        let nodes = self.nodes.values().filter(|node| wanted(node));
        nodes.map(Node::hostname).collect()
    }

    /// Workers of an ended generation may still run.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping > 0
    }

    /// The same, and some node has not said yet that they are gone.
    pub(super) fn have_workers(&self) -> bool {
        self.nodes.values().any(Node::has_workers)
    }

    /// Number of nodes that are free for the next generation.
    pub(super) fn ready(&self) -> u32 {
        self.ready as u32
    }

    /// Nodes that are free for the next generation.
    pub(super) fn candidates(&self) -> Vec<Candidate> {
        let ready = self.nodes.iter().filter(|(_, node)| node.is_ready());
        ready
            .map(|(incarnation, node)| node.candidate(incarnation))
            .collect()
    }

    /// Nodes that are ready while a generation runs without them.
    pub(super) fn spares(&self) -> impl Iterator<Item = (&String, &Node)> {
        let ready = self.nodes.iter().filter(|(_, node)| node.is_ready());
        ready.filter(|(incarnation, _)| !self.ranks.contains_key(*incarnation))
    }

    pub(super) fn step(&self) -> Option<u64> {
        self.nodes.values().filter_map(Node::step).max()
    }

    /// Number of the first attempt of which no node has log files.
    pub(super) fn free_attempt(&self) -> u32 {
        let free = self.nodes.values().map(|node| node.join().free_attempt);
        free.max().unwrap_or(0)
    }

    /// How long the nodes that are there let the daemon wait for others.
    pub(super) fn join_timeout(&self, config: &Config) -> Duration {
        let timeouts = self.nodes.values().map(|node| join_timeout(config, node.join()));
        timeouts.max().unwrap_or(self.patience)
    }

    /// How long more nodes are waited for; `default` if the job does not say.
    pub(super) fn last_call(&self, default: Duration) -> Duration {
        match self.nodes.values().map(|node| node.join().last_call_ms).max() {
            None | Some(0) => default,
            Some(ms) => Duration::from_millis(ms.into()),
        }
    }

    /// Restarts that the job may have.
    pub(super) fn max_restarts(&self) -> u32 {
        let first = self.nodes.values().next().map(Node::join);
        first.map_or(0, |join| join.max_restarts)
    }

    /// The status of each node, in order of their ranks if a generation `runs`: the first [`MAX_LISTED`].
    pub(super) fn statuses(&self, now: Duration, runs: bool) -> Vec<NodeStatus> {
        let rank_of = |incarnation: &String| self.rank_of(incarnation).filter(|_| runs);
        let ranked = self
            .nodes
            .iter()
            .map(|(incarnation, node)| (rank_of(incarnation), node));
        let mut nodes: Vec<(Option<u32>, &Node)> = ranked.collect();
        nodes.sort_by_key(|(rank, _)| rank.unwrap_or(u32::MAX));
        let mut first_rank = 0;
        let statuses = nodes.into_iter().take(MAX_LISTED).map(|(rank, node)| {
            let status = NodeStatus {
                first_rank: rank.map_or(0, |_| first_rank),
                ..node.status(now, rank)
            };
            first_rank += status.workers;
            status
        });
        statuses.collect()
    }

    /// MIN and MAX nodes of the job.
    pub(super) fn limits(&self) -> (u32, u32) {
        let first = self.nodes.values().next().map(Node::join);
        first.map_or((0, 0), |join| (join.min_nodes, join.max_nodes))
    }

    /// As [`limits`](Self::limits), with the numbers of ranks that the workers can go on with.
    pub(super) fn size_limits(&self) -> Limits {
        let (min, max) = self.limits();
        Limits {
            min: min as usize,
            max: max as usize,
            ranks: self.rank_limits,
        }
    }

    /// Sets the numbers of ranks that the workers support. True if they changed.
    pub(super) fn limit_ranks(&mut self, limits: RankLimits) -> bool {
        std::mem::replace(&mut self.rank_limits, limits) != limits
    }

    /// Enough nodes are there without this one, in a number that the workers can go on with. A node whose connection is
    /// broken is there until its lease runs out.
    pub(super) fn suffices_without(&self, incarnation: &str) -> bool {
        let limits = self.size_limits();
        let others = self.nodes.len() - usize::from(self.nodes.contains_key(incarnation));
        let fit = || {
            let others = self.others(incarnation);
            let workers: Vec<u32> = others.map(|(_, node)| node.join().workers).collect();
            limits.pick(&workers).is_some()
        };
        others >= limits.min && (limits.ranks.is_open() || fit())
    }

    /// The spares with which the running generation could be larger; none of its members has to go for them.
    pub(super) fn growth(&self) -> Vec<Candidate> {
        let limits = self.size_limits();
        let candidate = |(incarnation, node): (&String, &Node)| node.candidate(incarnation);
        if limits.ranks.is_open() {
            let room = limits.max.saturating_sub(self.members.len());
            return self.spares().take(room).map(candidate).collect();
        }
        let mut spares: Vec<Candidate> = self.spares().map(candidate).collect();
        let members = self.members_there().map(candidate);
        let chosen = ranks::choose(members.chain(spares.clone()).collect(), limits, &self.members);
        let chosen: HashSet<&str> = chosen.iter().map(|c| c.incarnation.as_str()).collect();
        let is_chosen = |incarnation: &str| chosen.contains(incarnation);
        if !self.members.iter().all(|member| is_chosen(&member.incarnation)) {
            return Vec::new();
        }
        spares.retain(|spare| is_chosen(&spare.incarnation));
        spares
    }
}
