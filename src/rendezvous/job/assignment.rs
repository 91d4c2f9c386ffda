//! The start of a generation: ranks, addresses, and one push to each node.

use std::time::Duration;

use ddp_proto::rendezvous::daemon_message::Body as Reply;
use ddp_proto::rendezvous::{Assignment, NodeAssignment};

use super::node::Node;
use super::running::Running;
use super::{Job, Phase};
use crate::rendezvous::context::ApplyContext;
use crate::rendezvous::event::{Observation, Stage};
use crate::rendezvous::messages::clip;
use crate::rendezvous::nodes::list::NodeList;
use crate::rendezvous::ranks;

/// How much of an assignment's name people are shown.
const SHOWN_ID_BYTES: usize = 8;

impl Job {
    /// Starts the next generation with the nodes that are ready, or the best of them.
    pub(super) fn start(&mut self, context: &mut ApplyContext<'_>, reason: &str) {
        let previous = self.table.members();
        let chosen = ranks::choose(self.table.candidates(), self.table.size_limits(), previous);
        let (ordered, rank_reason) = ranks::order(chosen, previous);
        self.table.assign(ordered);
        self.counter.assign(context, self.table.free_attempt());
        let generation = self.counter.generation();
        let reason = format!("generation {generation}: {reason}; {rank_reason}");
        if let Phase::Gathering(gathering) = &self.phase {
            context.observe(Observation::Assigned(gathering.waited(context.at.now)));
        }
        let (assignment, nodes) = self.assignment(context, reason);
        self.takeover.begin(&assignment);
        self.begin_period(context, &assignment.reason);
        context.decided(format!("job `{}`: {}", self.id, assignment.reason));
        let running = Running::new(assignment, nodes, context.at.now, Duration::ZERO);
        self.phase = Phase::Running(Box::new(running));
        self.record(context, Stage::Running);
        self.send_assignments(context);
        self.tell_spares(context);
    }

    /// A generation runs from now on with these members, for those who look back.
    pub(super) fn begin_period(&mut self, context: &mut ApplyContext<'_>, why: &str) {
        let generation = self.counter.generation();
        context.about.generation = generation;
        let nodes = self.table.members().len() as u32;
        let ranks = self
            .table
            .members_there()
            .map(|(_, node)| node.join().workers)
            .sum();
        self.history.begin(context.at.now, generation, nodes, ranks, why);
    }

    /// The part of the assignment that all nodes receive, and the list of nodes.
    fn assignment(&self, context: &ApplyContext<'_>, reason: String) -> (Assignment, NodeList) {
        let members: Vec<&Node> = self.table.members_there().map(|(_, node)| node).collect();
        let far = members.iter().find_map(|node| node.far_address());
        let mut first_rank = 0;
        let mut nodes = Vec::with_capacity(members.len());
        for node in &members {
            let join = node.join();
            nodes.push(NodeAssignment {
                hostname: join.hostname.clone(),
                addr: node.address(far),
                first_rank,
                workers: join.workers,
                role: join.role.clone(),
            });
            first_rank += join.workers;
        }
        let (master_addr, master_port) = match (members.as_slice(), nodes.first()) {
            ([alone], _) => ("127.0.0.1".to_owned(), alone.join().master_port),
            ([first, ..], Some(node)) => (node.addr.clone(), first.join().master_port),
            _ => (String::new(), 0),
        };
        let mut assignment = Assignment {
            attempt: self.counter.attempts(),
            max_restarts: members.first().map_or(0, |node| node.join().max_restarts),
            master_addr,
            master_port,
            lease_ms: context.config.lease_ms(),
            reason,
            run_token: self.counter.run_token().to_owned(),
            assignment_id: self.counter.assignment_id().to_owned(),
            data_key: context.at.secret.data_key(self.counter.assignment_id()),
            takeover_ms: self.takeover_ms(context.config),
            ..Assignment::default()
        };
        self.account.write_to(&mut assignment);
        (assignment, NodeList::new(nodes))
    }

    /// Whether this generation has another assignment here than the one of this name.
    pub(super) fn is_of_another_assignment(&self, generation: u64, assignment_id: &str) -> bool {
        self.own_assignment(generation)
            .is_some_and(|own| own != assignment_id)
    }

    /// The id of the assignment of this generation, if it is the one that this daemon runs, ran last or takes up, and the
    /// id is known.
    fn own_assignment(&self, generation: u64) -> Option<&str> {
        match &self.phase {
            Phase::Recovering(recovery) if recovery.generation() == generation => {
                Some(recovery.assignment_id()).filter(|id| !id.is_empty())
            }
            _ if generation == self.counter.generation() => Some(self.counter.assignment_id()),
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
    pub(super) fn send_assignment(&self, context: &mut ApplyContext<'_>, incarnation: &str) {
        if let Some(running) = self.phase.running()
            && let Some(node_rank) = self.table.rank_of(incarnation)
            && let Some(node) = self.table.get(incarnation)
        {
            let assignment = running.nodes().assignment_of(running.assignment(), node_rank);
            node.send(context, self.counter.generation(), Reply::Assignment(assignment));
        }
    }

    /// Tells each member its place.
    pub(super) fn send_assignments(&self, context: &mut ApplyContext<'_>) {
        for member in self.table.members() {
            self.send_assignment(context, &member.incarnation);
        }
    }
}
