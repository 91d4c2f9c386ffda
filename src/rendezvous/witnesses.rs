//! A node that two witnesses saw die is lost at once: its own connection to the daemon broke, and so did the data
//! connection of another node's worker to one of its ranks.
//!
//! One witness alone may be wrong. A cut link to the daemon leaves the data plane intact, and a data connection breaks
//! too when a worker of a healthy node fails, which that node reports itself.

use ddp_proto::exit;

use super::event::Turn;
use super::job::{Job, Phase, Running};

/// What a worker has seen of another node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sighting {
    witness: u32,
    lost_rank: u32,
}

impl Job {
    /// Rank `witness`, which has failed, says to which rank its data connection broke.
    pub(super) fn note_sighting(&mut self, witness: u32, lost_rank: Option<u32>) {
        if let Phase::Running(running) = &mut self.phase
            && let Some(lost_rank) = lost_rank
            && let Some(node_rank) = running.node_of(lost_rank)
            && running.node_of(witness) != Some(node_rank)
        {
            let sighting = Sighting { witness, lost_rank };
            running.sightings.entry(node_rank).or_insert(sighting);
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
        if let Some((incarnation, Sighting { witness, lost_rank })) = gone {
            let cause = format!(
                "{} was lost: its connection broke, and so did that of rank {witness} to its rank {lost_rank}",
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
