//! The start of a generation: ranks, addresses, and one push to each node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, NodeAssignment};

use super::config::Config;
use super::event::Turn;
use super::job::{Job, Node, Phase, Running};
use super::kv::clip;
use super::ranks::{self, Candidate, Member};
use super::record::Stage;
use super::silence::Progress;

/// How much of an assignment's name people are shown.
const SHOWN_ID_BYTES: usize = 8;

/// How many names a run may have: as many as a die has faces.
const TOKENS: f64 = (1_u64 << 53) as f64;

/// Whether two names may be of one assignment: agents and daemons of older builds give none.
pub(super) fn is_same(a: &str, b: &str) -> bool {
    a.is_empty() || b.is_empty() || a == b
}

/// Beyond it, what a node says of its log files is not believed.
const MAX_ATTEMPT: u32 = 1 << 20;

impl Job {
    /// Starts the next generation with these nodes, or the best of them.
    pub(super) fn start(&mut self, turn: &mut Turn<'_>, candidates: Vec<Candidate>, reason: &str) {
        let chosen = ranks::choose(candidates, self.size_limits(), &self.previous);
        let (ordered, rank_reason) = ranks::order(chosen, &self.previous);
        self.previous = ordered
            .into_iter()
            .map(|c| Member {
                incarnation: c.incarnation,
                hostname: c.hostname,
                has_left: false,
            })
            .collect();
        self.generation = self.highest_generation() + 1;
        self.assignment_id = turn.assignment_id();
        let reason = format!("generation {}: {reason}; {rank_reason}", self.generation);
        if self.run_token.is_empty() {
            self.run_token = format!("{:014x}", (turn.at.dice * TOKENS) as u64);
        }
        let free = self.nodes.values().map(|node| node.join.free_attempt).max();
        self.attempts = self.attempts.max(free.unwrap_or(0).min(MAX_ATTEMPT));
        let assignment = self.assignment(turn.config, reason);
        turn.decided(format!("job `{}`: {}", self.id, assignment.reason));
        for node in self.nodes.values_mut() {
            node.step = None;
        }
        self.phase = Phase::Running(Running {
            assignment,
            succeeded: BTreeSet::new(),
            suspect: None,
            sightings: BTreeMap::new(),
            progress: Progress::default(),
            since: turn.at.now,
            ran_before: Duration::ZERO,
            scale_up: None,
        });
        self.record(turn, Stage::Running);
        let members: Vec<String> = self
            .previous
            .iter()
            .map(|member| member.incarnation.clone())
            .collect();
        for incarnation in &members {
            self.send_assignment(turn, incarnation);
        }
        self.tell_spares(turn);
    }

    fn assignment(&self, config: &Config, reason: String) -> Assignment {
        let members: Vec<&Node> = self
            .previous
            .iter()
            .filter_map(|member| self.nodes.get(&member.incarnation))
            .collect();
        let mut first_rank = 0;
        let mut nodes = Vec::with_capacity(members.len());
        for node in &members {
            nodes.push(NodeAssignment {
                hostname: node.join.hostname.clone(),
                addr: address(node, &members),
                first_rank,
                workers: node.join.workers,
                role: node.join.role.clone(),
            });
            first_rank += node.join.workers;
        }
        let (master_addr, master_port) = match (members.as_slice(), nodes.first()) {
            ([alone], _) => ("127.0.0.1".to_owned(), alone.join.master_port),
            ([first, ..], Some(node)) => (node.addr.clone(), first.join.master_port),
            _ => (String::new(), 0),
        };
        let mut assignment = Assignment {
            attempt: self.attempts,
            max_restarts: members.first().map_or(0, |node| node.join.max_restarts),
            nodes,
            master_addr,
            master_port,
            lease_ms: config.lease_ms(),
            reason,
            run_token: self.run_token.clone(),
            assignment_id: self.assignment_id.clone(),
            ..Assignment::default()
        };
        self.account.deposit(&mut assignment);
        assignment
    }

    /// Whether this generation has another assignment here than the one of this name.
    pub(super) fn is_of_another_assignment(&self, generation: u64, assignment_id: &str) -> bool {
        self.own_assignment(generation)
            .is_some_and(|own| !is_same(own, assignment_id))
    }

    /// The name of the assignment of this generation, if it is the one that this daemon runs, ran last or takes up.
    fn own_assignment(&self, generation: u64) -> Option<&str> {
        match &self.phase {
            Phase::Recovering(recovery) if recovery.generation == generation => Some(&recovery.assignment_id),
            _ if generation == self.generation => Some(&self.assignment_id),
            _ => None,
        }
    }

    /// Why what is said of an assignment changes nothing here.
    pub(super) fn another_assignment_words(&self, generation: u64, assignment_id: &str) -> String {
        let own = self.own_assignment(generation).unwrap_or_default();
        format!(
            "this rendezvous daemon has assigned generation {generation} anew (assignment `{}`, not `{}`)",
            clip(own, SHOWN_ID_BYTES),
            clip(assignment_id, SHOWN_ID_BYTES)
        )
    }

    /// Tells a member its place, for the first time or again.
    pub(super) fn send_assignment(&self, turn: &mut Turn<'_>, incarnation: &str) {
        if let Phase::Running(running) = &self.phase
            && let Some(node_rank) = self.rank_of(incarnation)
            && let Some(node) = self.nodes.get(incarnation)
        {
            let assignment = Assignment {
                node_rank,
                ..running.assignment.clone()
            };
            turn.send(node.conn, self.generation, Reply::Assignment(assignment));
        }
    }
}

/// Address under which the peers reach a node.
///
/// A node on the daemon's own host may come from the loopback, which is no address for the others; they
/// reach that host under the address at which they reach the daemon.
fn address(node: &Node, members: &[&Node]) -> String {
    if node.join.local_addr.is_empty()
        && node.peer.remote.is_loopback()
        && let Some(far) = members.iter().find(|other| !other.peer.remote.is_loopback())
    {
        return far.peer.local.to_string();
    }
    node.address_alone()
}
