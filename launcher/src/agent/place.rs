//! The place that this node was assigned, kept for a daemon that has lost its state.

use ddp_proto::rendezvous::{Assignment, GenerationOver, Heartbeat, Place};
use tokio::time::Instant;

/// What the agent holds of the generation that was assigned to it last.
#[derive(Debug)]
pub(super) struct HeldPlace {
    /// With this node alone: what all nodes tell together makes the whole, however many they are.
    pub(super) assignment: Assignment,
    node_count: u32,
    /// The last one.
    pub(super) heartbeat: Heartbeat,
    since: Instant,
    over: bool,
}

impl HeldPlace {
    /// None if the assignment has no place for this node, which the agent refuses.
    pub(super) fn of(now: Instant, assignment: &Assignment) -> Option<Self> {
        let own = assignment.nodes.get(assignment.node_rank as usize)?.clone();
        Some(Self {
            assignment: Assignment {
                nodes: vec![own],
                reason: assignment.reason.clone(),
                master_addr: assignment.master_addr.clone(),
                run_token: assignment.run_token.clone(),
                assignment_id: assignment.assignment_id.clone(),
                ..*assignment
            },
            node_count: u32::try_from(assignment.nodes.len()).ok()?,
            heartbeat: Heartbeat::default(),
            since: now,
            over: false,
        })
    }

    /// The daemon has ended the generation, if it says so at this `cost`.
    pub(super) fn give_up(&mut self, cost: Option<&GenerationOver>) {
        self.over = true;
        if let Some(over) = cost {
            self.assignment.restart_count = over.restart_count;
            self.assignment.best_step = over.best_step.max(self.assignment.best_step);
        }
    }

    /// As it is sent to a daemon.
    pub(super) fn told(&self, now: Instant) -> Place {
        Place {
            assignment: Some(self.assignment.clone()),
            node_count: self.node_count,
            heartbeat: Some(self.heartbeat),
            held_ms: u64::try_from(now.duration_since(self.since).as_millis()).unwrap_or(u64::MAX),
            over: self.over,
        }
    }
}
