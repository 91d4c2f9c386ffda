//! The nodes of one generation in order of node rank, and the assignment that each of them receives.

use std::collections::HashMap;
use std::ops::Range;

use ddp_proto::rendezvous::{Assignment, NodeAssignment};

/// The nodes of a generation, in order of node rank.
#[derive(Debug, Default)]
pub(in crate::rendezvous) struct NodeList {
    nodes: Vec<NodeAssignment>,
    world_size: u32,
    /// By node rank: ranks of the node's role on nodes before it.
    role_first_ranks: Vec<u32>,
    role_world_sizes: HashMap<String, u32>,
}

impl NodeList {
    pub(in crate::rendezvous) fn new(nodes: Vec<NodeAssignment>) -> Self {
        let mut role_world_sizes = HashMap::<String, u32>::new();
        let (mut world_size, mut role_first_ranks) = (0_u32, Vec::with_capacity(nodes.len()));
        for node in &nodes {
            world_size = world_size.saturating_add(node.workers);
            let size = role_world_sizes.entry(node.role.clone()).or_default();
            role_first_ranks.push(*size);
            *size = size.saturating_add(node.workers);
        }
        Self {
            nodes,
            world_size,
            role_first_ranks,
            role_world_sizes,
        }
    }

    /// The assignment of one node: `common`, which all nodes receive, and its own place. Its size does not grow with the
    /// number of nodes.
    pub(in crate::rendezvous) fn assignment_of(&self, common: &Assignment, node_rank: u32) -> Assignment {
        let own = self.nodes.get(node_rank as usize).cloned();
        let role_world_size = own.as_ref().and_then(|own| self.role_world_sizes.get(&own.role));
        Assignment {
            node_rank,
            node_count: self.nodes.len() as u32,
            world_size: self.world_size,
            role_first_rank: self
                .role_first_ranks
                .get(node_rank as usize)
                .copied()
                .unwrap_or(0),
            role_world_size: role_world_size.copied().unwrap_or(0),
            own,
            ..common.clone()
        }
    }

    /// The ranks of a node.
    pub(in crate::rendezvous) fn ranks_of(&self, node_rank: u32) -> Range<u32> {
        let node = self.nodes.get(node_rank as usize);
        node.map_or(0..0, |node| {
            node.first_rank..node.first_rank.saturating_add(node.workers)
        })
    }

    /// Node rank of the node that a rank belongs to.
    pub(in crate::rendezvous) fn node_of(&self, rank: u32) -> Option<u32> {
        // The last one that begins at the rank or before it: nodes without ranks do not exist.
        let after = self.nodes.partition_point(|node| node.first_rank <= rank);
        let node_rank = after.checked_sub(1)? as u32;
        self.ranks_of(node_rank).contains(&rank).then_some(node_rank)
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

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
    fn an_assignment_counts_all_ranks_and_those_of_the_role() {
        let assignment = list(&[2, 4, 1]).assignment_of(&Assignment::default(), 2);
        assert_eq!((assignment.node_count, assignment.world_size), (3, 7));
        assert_eq!((assignment.role_first_rank, assignment.role_world_size), (2, 3));
        assert_eq!(assignment.own.unwrap().first_rank, 6);
    }

    #[test]
    fn an_assignment_does_not_grow_with_the_number_of_nodes() {
        let bytes = |nodes: usize| {
            let assignment = list(&vec![8; nodes]).assignment_of(&Assignment::default(), nodes as u32 - 1);
            assignment.encoded_len()
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
    fn each_rank_belongs_to_the_node_that_has_it() {
        let list = list(&[2, 3, 1]);
        let nodes: Vec<_> = (0..7).map(|rank| list.node_of(rank)).collect();
        let expected = [0, 0, 1, 1, 1, 2].map(Some).into_iter().chain([None]);
        assert!(nodes.into_iter().eq(expected));
    }
}
