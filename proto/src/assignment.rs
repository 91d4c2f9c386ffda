//! What an assignment tells of all nodes together: counted by the daemon from the list of them, and by an agent whose
//! daemon is of an older build.

use std::collections::HashMap;

use crate::rendezvous::{Assignment, NodeAssignment};

/// Most nodes of which each is sent the list of all.
pub const MAX_LISTED_NODES: usize = 64;

/// Totals of a list of nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    node_count: u32,
    world_size: u32,
    /// By node rank: ranks of the node's role on nodes before it.
    role_first_ranks: Vec<u32>,
    role_world_sizes: HashMap<String, u32>,
}

impl Totals {
    /// Of these nodes, in order of node rank. More ranks than a number holds are as many as it holds.
    pub fn of(nodes: &[NodeAssignment]) -> Self {
        let mut totals = Self {
            node_count: u32::try_from(nodes.len()).unwrap_or(u32::MAX),
            ..Self::default()
        };
        for node in nodes {
            totals.world_size = totals.world_size.saturating_add(node.workers);
            // A role is cloned once.
            let first = if let Some(size) = totals.role_world_sizes.get_mut(&node.role) {
                let first = *size;
                *size = first.saturating_add(node.workers);
                first
            } else {
                totals.role_world_sizes.insert(node.role.clone(), node.workers);
                0
            };
            totals.role_first_ranks.push(first);
        }
        totals
    }

    /// Tells them to the node of this rank, which is `own`.
    pub fn tell(&self, assignment: &mut Assignment, own: &NodeAssignment) {
        let node_rank = assignment.node_rank as usize;
        assignment.node_count = self.node_count;
        assignment.world_size = self.world_size;
        assignment.role_first_rank = self.role_first_ranks.get(node_rank).copied().unwrap_or(0);
        assignment.role_world_size = self.role_world_sizes.get(&own.role).copied().unwrap_or(0);
        assignment.own = Some(own.clone());
    }
}

impl Assignment {
    /// Takes the totals from the list, where a daemon of an older build has sent nothing else. Without a place for this
    /// node in the list, there is no `own`.
    pub fn count_nodes(&mut self) {
        if self.own.is_some() {
            return;
        }
        let totals = Totals::of(&self.nodes);
        self.node_count = totals.node_count;
        if let Some(own) = self.nodes.get(self.node_rank as usize).cloned() {
            totals.tell(self, &own);
        }
    }

    /// The same without what is told of all nodes together, and with this node alone in the list: what nodes of one
    /// generation know alike, but for their own place. None without a place for this node.
    pub fn alone(&self) -> Option<Self> {
        let own = self.own.clone()?;
        Some(Self {
            nodes: vec![own],
            ..self.without_totals()
        })
    }

    /// The same without the list, and without what is told of all nodes together.
    #[must_use]
    pub fn without_totals(&self) -> Self {
        Self {
            nodes: Vec::new(),
            own: None,
            node_count: 0,
            world_size: 0,
            role_first_rank: 0,
            role_world_size: 0,
            nodes_digest: String::new(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(workers: u32, role: &str) -> NodeAssignment {
        NodeAssignment {
            workers,
            role: role.into(),
            ..NodeAssignment::default()
        }
    }

    #[test]
    fn the_totals_of_an_old_daemons_list_are_those_that_a_new_one_tells() {
        let nodes = vec![node(2, "a"), node(4, "b"), node(1, "a")];
        let totals = Totals::of(&nodes);
        for node_rank in 0..3 {
            let mut old = Assignment {
                node_rank,
                nodes: nodes.clone(),
                ..Assignment::default()
            };
            let mut new = old.clone();
            totals.tell(&mut new, &nodes[node_rank as usize]);
            old.count_nodes();
            assert_eq!(old, new);
            assert_eq!((new.node_count, new.world_size), (3, 7));
        }
        let mut last = Assignment {
            node_rank: 2,
            nodes,
            ..Assignment::default()
        };
        last.count_nodes();
        assert_eq!((last.role_first_rank, last.role_world_size), (2, 3));
        let alone = last.alone().unwrap();
        assert_eq!((alone.nodes.len(), alone.node_count, alone.own), (1, 0, None));
    }

    #[test]
    fn a_list_without_this_node_has_no_place_for_it() {
        let mut assignment = Assignment {
            node_rank: 1,
            nodes: vec![node(1, "")],
            ..Assignment::default()
        };
        assignment.count_nodes();
        assert_eq!((assignment.own.as_ref(), assignment.node_count), (None, 1));
        assert_eq!(assignment.alone(), None);
    }
}
