//! When other nodes may take the place of a lost one.
//!
//! A node that does not reach the daemon may train on. Where other nodes can go on without it (nodes may come and go, or
//! one is on standby), its assignment says for how long: [`Config::takeover`]. The agent stops its workers before that
//! time has passed since the last message that it knows to be received. The daemon starts no generation before it has
//! passed since the last message that it received, unless the workers are gone for certain: the node says so, its guardian
//! does, or two witnesses saw it die.
//!
//! In a job of fixed size without standbys the time is [`Config::silence_limit`]. There it is enough that the workers of a
//! peer are gone, because a step needs every rank, or that the node closed its connection and has not come back after
//! [`Config::reconnect_grace`]. A new launcher on the same machine does not shorten that: the guardian of the old one may
//! still be killing its workers.
//!
//! [`Config::takeover`]: crate::rendezvous::Config
//! [`Config::silence_limit`]: crate::rendezvous::Config
//! [`Config::reconnect_grace`]: crate::rendezvous::Config

use std::collections::BTreeMap;
use std::time::Duration;

use ddp_proto::exit;
use ddp_proto::rendezvous::Assignment;

use super::Job;
use super::node::Node;
use crate::rendezvous::config::Config;
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Record, Stage};

/// The nodes whose workers may still train though the daemon has lost them.
#[derive(Debug, Default)]
pub(super) struct Takeover {
    /// How long a node of the last generation may train without the daemon; none: for the outage time-out, with its
    /// peers.
    after: Option<Duration>,
    /// By incarnation: when the workers are gone at the latest.
    ends: BTreeMap<String, Duration>,
}

impl Takeover {
    /// What the ledger has of a generation whose nodes have not reconnected.
    pub(super) fn recalled(config: &Config, record: &Record, now: Duration) -> Self {
        let after = record.takeover;
        let until = now + after.unwrap_or(config.silence_limit);
        let mut ends = BTreeMap::new();
        // Without standbys, a generation ends only when a worker or a node of it does.
        if after.is_some() || record.stage == Stage::Running {
            let members = record.members.iter();
            ends.extend(members.map(|member| (member.incarnation.clone(), until)));
        }
        Self { after, ends }
    }

    /// A generation runs with all of its nodes.
    pub(super) fn begin(&mut self, assignment: &Assignment) {
        let after = Duration::from_millis(assignment.takeover_ms.into());
        self.after = (!after.is_zero()).then_some(after);
        self.ends.clear();
    }

    /// As the assignment says it; none in a job of fixed size without standbys.
    pub(super) fn after(&self) -> Option<Duration> {
        self.after
    }

    /// The node is lost; its workers are gone at this time at the latest.
    pub(super) fn await_end(&mut self, incarnation: &str, until: Duration) {
        self.ends.insert(incarnation.to_owned(), until);
    }

    /// The workers of this node are gone. See [`Job::workers_ended`] for what that proves of its peers.
    pub(super) fn ended(&mut self, incarnation: &str) {
        self.ends.remove(incarnation);
    }

    /// The workers of a member are gone at this time: without standbys, no other member makes another step then.
    pub(super) fn member_ends(&mut self, at: Duration) {
        if self.after.is_none() {
            self.ends.values_mut().for_each(|end| *end = at.min(*end));
        }
    }

    /// When the last of them is gone; none if that is so already.
    pub(super) fn until(&self, now: Duration) -> Option<Duration> {
        self.ends.values().copied().max().filter(|until| *until > now)
    }
}

impl Job {
    /// Other nodes could go on without one of the nodes.
    pub(super) fn has_replacements(&self) -> bool {
        let (min, max) = self.table.limits();
        min < max || self.table.nodes().len() > max as usize
    }

    /// How long a node may train without the daemon, for the assignment; 0: for the outage time-out.
    pub(super) fn takeover_ms(&self, config: &Config) -> u32 {
        let wanted = self
            .table
            .nodes()
            .values()
            .map(|node| node.join().takeover_ms)
            .max();
        let own = u32::try_from(config.takeover.as_millis()).unwrap_or(u32::MAX);
        match wanted.filter(|_| self.has_replacements()) {
            None => 0,
            Some(0) => own,
            Some(wanted) => wanted,
        }
    }

    /// A generation of an earlier daemon is taken up without some of its nodes, which may train.
    pub(super) fn await_missing(&mut self, context: &ApplyContext<'_>, began: Duration) {
        let Some(running) = self.phase.running() else {
            return;
        };
        self.takeover.begin(running.assignment());
        for (rank, member) in self.table.members().iter().enumerate() {
            if self.table.get(&member.incarnation).is_none() {
                // Without a ledger, its incarnation is not known.
                let name = format!("{}#{rank}", member.incarnation);
                let name = if member.incarnation.is_empty() {
                    &name
                } else {
                    &member.incarnation
                };
                let longest = self.takeover.after().unwrap_or(context.config.silence_limit);
                self.takeover.await_end(name, began + longest);
            }
        }
    }

    /// The workers of a node are gone. Those of a spare prove nothing of the last generation.
    pub(super) fn workers_ended(&mut self, incarnation: &str) {
        self.takeover.ended(incarnation);
        if self.table.rank_of(incarnation).is_some() {
            self.takeover.member_ends(Duration::ZERO);
        }
    }

    /// The guardian of a node says that the launcher died, and that it has killed the workers.
    pub(in crate::rendezvous) fn launcher_died(&mut self, context: &mut ApplyContext<'_>, incarnation: &str) {
        if self.table.get(incarnation).is_some() {
            let cause = format!("{} was lost: its launcher died", self.table.name_of(incarnation));
            self.node_lost(context, incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
        self.workers_ended(incarnation);
        self.consider_start(context);
        self.plan_wake();
    }

    /// A node is lost whose workers may live on.
    pub(super) fn await_end_of(&mut self, context: &ApplyContext<'_>, incarnation: &str) {
        let Some(node) = self.table.get(incarnation) else {
            return;
        };
        if !self.is_at_work(incarnation) && !node.has_workers() {
            return;
        }
        let has_ended = |(peer, node): (&String, &Node)| peer != incarnation && !node.has_workers();
        let peer_ended = self.phase.running().is_none() && self.table.members_there().any(has_ended);
        let (was_closed, last_word) = (node.was_closed(), node.last_word());
        match self.takeover.after() {
            None if peer_ended => self.workers_ended(incarnation),
            None if was_closed => {
                let until = last_word + context.config.reconnect_grace;
                self.takeover.await_end(incarnation, until);
                if self.table.rank_of(incarnation).is_some() {
                    self.takeover.member_ends(until);
                }
            }
            after => {
                let until = last_word + after.unwrap_or(context.config.silence_limit);
                self.takeover.await_end(incarnation, until);
            }
        }
    }
}
