//! All nodes of one generation, and what each of them is told of the others.
//!
//! The list is kept once: as it goes over the wire, in one buffer that all answers share. A node is told totals, which do
//! not grow with the number of nodes.

use ddp_proto::assignment::{MAX_LISTED_NODES, Totals};
use ddp_proto::rendezvous::{Assignment, NodeAssignment, NodeList as Message};
use prost::Message as _;
use prost::bytes::Bytes;

/// The nodes of a generation, in order of node rank.
#[derive(Debug)]
pub(in crate::rendezvous) struct NodeList {
    nodes: Vec<NodeAssignment>,
    totals: Totals,
    /// As [`NodesReply`](ddp_proto::rendezvous::NodesReply) has it.
    encoded: Bytes,
    digest: String,
}

impl NodeList {
    pub(in crate::rendezvous) fn new(nodes: Vec<NodeAssignment>) -> Self {
        let message = Message { nodes };
        let encoded = Bytes::from(message.encode_to_vec());
        Self {
            totals: Totals::of(&message.nodes),
            digest: blake3::hash(&encoded).to_string(),
            encoded,
            nodes: message.nodes,
        }
    }

    pub(in crate::rendezvous) fn encoded(&self) -> Bytes {
        self.encoded.clone()
    }

    /// What the node of this rank is told: what all are told, and its place. The whole list goes to those that do not
    /// `take_totals`, and where it is short.
    pub(in crate::rendezvous) fn tell(
        &self,
        common: &Assignment,
        node_rank: u32,
        takes_totals: bool,
    ) -> Assignment {
        let mut assignment = Assignment {
            node_rank,
            nodes_digest: self.digest.clone(),
            ..common.clone()
        };
        if !takes_totals || self.nodes.len() <= MAX_LISTED_NODES {
            assignment.nodes.clone_from(&self.nodes);
        }
        if let Some(own) = self.nodes.get(node_rank as usize) {
            self.totals.tell(&mut assignment, own);
        }
        assignment
    }

    /// Node rank of the node that a rank belongs to.
    pub(in crate::rendezvous) fn node_of(&self, rank: u32) -> Option<u32> {
        // The last one that begins at the rank or before it: nodes without ranks do not exist.
        let after = self.nodes.partition_point(|node| node.first_rank <= rank);
        let node_rank = after.checked_sub(1)?;
        let node = &self.nodes[node_rank];
        let ranks = node.first_rank..node.first_rank.saturating_add(node.workers);
        ranks.contains(&rank).then_some(node_rank as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(workers: &[u32]) -> NodeList {
        let mut first_rank = 0;
        let node = |(i, workers): (usize, &u32)| {
            let node = NodeAssignment {
                hostname: format!("n{i}"),
                addr: format!("10.0.0.{i}"),
                first_rank,
                workers: *workers,
                role: if i % 2 == 0 { "even".into() } else { "odd".into() },
            };
            first_rank += workers;
            node
        };
        NodeList::new(workers.iter().enumerate().map(node).collect())
    }

    #[test]
    fn an_assignment_does_not_grow_with_the_number_of_nodes() {
        let bytes = |nodes: usize| {
            let list = list(&vec![8; nodes]);
            let told = list.tell(&Assignment::default(), nodes as u32 - 1, true);
            assert_eq!(
                (told.node_count, told.world_size),
                (nodes as u32, nodes as u32 * 8)
            );
            told.encoded_len()
        };
        // The numbers and names have more digits.
        assert!(
            bytes(10_000) < bytes(100) + 16,
            "{} and {}",
            bytes(10_000),
            bytes(100)
        );
    }

    #[test]
    fn old_builds_and_small_jobs_get_the_list() {
        let lists = |nodes: usize, takes_totals| {
            let told = list(&vec![1; nodes]).tell(&Assignment::default(), 0, takes_totals);
            told.nodes.len()
        };
        assert_eq!(lists(MAX_LISTED_NODES, true), MAX_LISTED_NODES);
        assert_eq!(lists(MAX_LISTED_NODES + 1, true), 0);
        assert_eq!(lists(MAX_LISTED_NODES + 1, false), MAX_LISTED_NODES + 1);
    }

    #[test]
    fn the_digest_is_that_of_the_list_on_request() {
        let list = list(&[2, 3]);
        let told = list.tell(&Assignment::default(), 1, true);
        assert_eq!(told.nodes_digest, blake3::hash(&list.encoded()).to_string());
        let sent = Message::decode(list.encoded()).unwrap();
        assert_eq!(sent.nodes, list.nodes);
        assert_eq!(told.own.as_ref(), sent.nodes.last());
        assert_eq!((told.role_first_rank, told.role_world_size), (0, 3));
    }

    #[test]
    fn each_rank_belongs_to_the_node_that_has_it() {
        let list = list(&[2, 3, 1]);
        let nodes: Vec<_> = (0..7).map(|rank| list.node_of(rank)).collect();
        let expected = [0, 0, 1, 1, 1, 2].map(Some).into_iter().chain([None]);
        assert!(nodes.into_iter().eq(expected));
    }
}
