//! A node that two witnesses saw die is lost at once: its own connection to the daemon broke, and so did the data
//! connection of another node's worker to one of its ranks.
//!
//! One witness alone may be wrong. A cut link to the daemon leaves the data plane intact, and a data connection breaks
//! too when a worker of a healthy node fails, which that node reports itself.

use ddp_proto::exit;
use ddp_proto::rendezvous::LostRank;

use super::event::Turn;
use super::job::{Job, Phase, Running};

impl Job {
    /// A member of the running generation tells what a worker of it saw of another node's rank.
    pub(super) fn note_sighting(
        &mut self,
        turn: &mut Turn<'_>,
        incarnation: &str,
        generation: u64,
        seen: Option<LostRank>,
    ) {
        let own = self.rank_of(incarnation);
        if generation == self.generation
            && let Phase::Running(running) = &mut self.phase
            && let Some(seen) = seen
            && own.is_some()
            && running.node_of(seen.witness) == own
            && let Some(node_rank) = running.node_of(seen.rank)
            && Some(node_rank) != own
            && !running.sightings.contains_key(&node_rank)
        {
            running.sightings.insert(node_rank, seen);
            self.believe_witnesses(turn);
        }
    }

    /// Loses members that two witnesses saw die.
    pub(super) fn believe_witnesses(&mut self, turn: &mut Turn<'_>) {
        let Phase::Running(running) = &self.phase else {
            return;
        };
        let is_gone = |node_rank: u32| {
            let incarnation = &self.previous.get(node_rank as usize)?.incarnation;
            let node = self.nodes.get(incarnation)?;
            (node.conn.is_none() && !self.has_succeeded(incarnation)).then(|| incarnation.clone())
        };
        let gone = running
            .sightings
            .iter()
            .find_map(|(node_rank, sighting)| Some((is_gone(*node_rank)?, *sighting)));
        if let Some((incarnation, LostRank { rank, witness })) = gone {
            let cause = format!(
                "{} was lost: its connection broke, and so did that of rank {witness} to its rank {rank}",
                self.node_name(&incarnation)
            );
            self.node_lost(turn, &incarnation, &cause, exit::RENDEZVOUS_TIMED_OUT);
        }
    }
}

impl Running {
    /// Node rank of the node that a rank belongs to.
    fn node_of(&self, rank: u32) -> Option<u32> {
        let mut nodes = self.assignment.nodes.iter().zip(0..);
        nodes.find_map(|(node, node_rank)| {
            let ranks = node.first_rank..node.first_rank.saturating_add(node.workers);
            ranks.contains(&rank).then_some(node_rank)
        })
    }
}
