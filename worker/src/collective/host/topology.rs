//! The ranks of a group and the nodes on which they run.

use std::net::IpAddr;

use ddp_proto::ports::PortRange;
use ddp_proto::trust::data_key::DataKey;

use crate::collective::error::Failure;

/// One rank of the world, and what its transport needs to know about the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankInfo {
    /// Position among all ranks, from 0.
    pub rank: usize,
    /// Number of ranks.
    pub world_size: usize,
    /// Position among the ranks of this node, from 0.
    pub local_rank: usize,
    /// Number of ranks of this node.
    pub local_world_size: usize,
    /// Position of this node, from 0. Sums over nodes run in this order.
    pub node_rank: usize,
    /// Address of this node that the ranks of other nodes reach. Not used on one node.
    pub host_addr: IpAddr,
    /// Ports at which the rank listens for them. `None`: any free port.
    pub ports: Option<PortRange>,
    /// The generation of the job: ranks of another one are refused.
    pub generation: u64,
    /// Key with which ranks prove that they belong to the generation. On one node they need none: the system says which user
    /// has opened a Unix socket.
    pub data_key: Option<DataKey>,
    /// Spin briefly before a wait sleeps. Only useful with a core for each rank of the node.
    pub spin: bool,
    /// Small operations cross between nodes along a tree, or else directly from each rank to every other. `None`: the faster
    /// way. The same on all ranks.
    pub tree: Option<bool>,
}

impl RankInfo {
    /// Rank `rank` of a world of `size` on one node. Spins if the machine has as many cores.
    pub fn on_one_node(rank: usize, size: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            rank,
            world_size: size,
            local_rank: rank,
            local_world_size: size,
            node_rank: 0,
            host_addr: IpAddr::from([127, 0, 0, 1]),
            ports: None,
            generation: 1,
            data_key: None,
            spin: size <= cores,
            tree: None,
        }
    }

    pub(super) fn check(&self) -> Result<(), Failure> {
        let Self {
            rank,
            world_size,
            local_rank,
            local_world_size,
            ..
        } = *self;
        if rank < world_size && local_rank < local_world_size && local_world_size <= world_size {
            return Ok(());
        }
        Err(Failure::Invalid(format!(
            "rank {rank} of {world_size} cannot be rank {local_rank} of {local_world_size} on its node\n  hint: the environment of this worker is not the one its launcher set"
        )))
    }
}

/// One member of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Member {
    /// Global rank.
    pub(super) global: usize,
    /// Rank of its node.
    pub(super) node: usize,
    /// Rank within its node.
    pub(super) local: usize,
}

/// The members of a group, by rank within it, and the order in which their contributions are summed.
#[derive(Clone, Debug)]
pub(super) struct Topology {
    members: Vec<Member>,
    globals: Vec<usize>,
    rank: usize,
    /// The order of sums: nodes in order of node rank, each with its members in order of local rank.
    nodes: Vec<Vec<usize>>,
    /// By rank: index of its node in `nodes`, and its index there.
    indices: Vec<(usize, usize)>,
}

impl Topology {
    /// `rank` is that of this process among the members.
    pub(super) fn new(members: Vec<Member>, rank: usize) -> Self {
        let mut order: Vec<usize> = (0..members.len()).collect();
        order.sort_by_key(|&rank| (members[rank].node, members[rank].local));
        let nodes: Vec<Vec<usize>> = order
            .chunk_by(|&a, &b| members[a].node == members[b].node)
            .map(<[usize]>::to_vec)
            .collect();
        let mut indices = vec![(0, 0); members.len()];
        for (node, ranks) in nodes.iter().enumerate() {
            for (index, &rank) in ranks.iter().enumerate() {
                indices[rank] = (node, index);
            }
        }
        Self {
            globals: members.iter().map(|member| member.global).collect(),
            members,
            rank,
            nodes,
            indices,
        }
    }

    /// Number of members.
    pub(super) fn size(&self) -> usize {
        self.members.len()
    }

    /// Rank of this process in the group.
    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    /// Global ranks, in order of rank.
    pub(super) fn globals(&self) -> &[usize] {
        &self.globals
    }

    pub(super) fn member(&self, rank: usize) -> Member {
        self.members[rank]
    }

    /// The order of sums: nodes in order of node rank, each with its members in order of local rank.
    pub(super) fn nodes(&self) -> &[Vec<usize>] {
        &self.nodes
    }

    /// Index of this node in [`Topology::nodes`].
    pub(super) fn own_node(&self) -> usize {
        self.node_of(self.rank)
    }

    /// Index of a member's node in [`Topology::nodes`].
    pub(super) fn node_of(&self, rank: usize) -> usize {
        self.indices[rank].0
    }

    /// The rank of a node that exchanges data with the rank `other` for the whole node, so that it crosses the network
    /// once: the one with the same index on its node, modulo the number of ranks there. On its own node it is `other`.
    pub(super) fn relay(&self, node: usize, other: usize) -> usize {
        let ranks = &self.nodes[node];
        ranks[self.indices[other].1 % ranks.len()]
    }

    /// Members on this node, in order of local rank.
    pub(super) fn local_ranks(&self) -> &[usize] {
        &self.nodes[self.own_node()]
    }

    /// Index of a member among [`Topology::local_ranks`], if it is on this node.
    pub(super) fn local_index(&self, rank: usize) -> Option<usize> {
        let (node, index) = self.indices[rank];
        (node == self.own_node()).then_some(index)
    }

    /// By rank: what `of` returns for the index of a member of this node.
    pub(super) fn local_views(&self, of: impl Fn(usize) -> *mut u8) -> Vec<Option<*mut u8>> {
        (0..self.size())
            .map(|rank| self.local_index(rank).map(&of))
            .collect()
    }

    /// Index of a member among those of its node.
    pub(super) fn index_of(&self, rank: usize) -> usize {
        self.indices[rank].1
    }

    /// Index of this process there.
    pub(super) fn own_index(&self) -> usize {
        self.index_of(self.rank)
    }

    /// True if no two members share a node.
    pub(super) fn has_one_rank_per_node(&self) -> bool {
        self.nodes.len() == self.size()
    }

    /// True if all members share one node.
    pub(super) fn is_one_node(&self) -> bool {
        self.nodes.len() == 1
    }

    /// Members on other nodes, in order of rank.
    pub(super) fn remote(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.size()).filter(|&rank| self.node_of(rank) != self.own_node())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_of_another_node_has_one_relay() {
        let member = |global, node, local| Member { global, node, local };
        // Two ranks on node 0, three on node 1.
        let members = vec![
            member(0, 0, 0),
            member(1, 0, 1),
            member(2, 1, 0),
            member(3, 1, 1),
            member(4, 1, 2),
        ];
        let group = Topology::new(members, 3);
        assert_eq!((group.own_node(), group.node_of(1), group.node_of(4)), (1, 0, 1));
        let relays = |node| (0..5).map(|other| group.relay(node, other)).collect::<Vec<_>>();
        assert_eq!(relays(0), [0, 1, 0, 1, 0]);
        assert_eq!(relays(1), [2, 3, 2, 3, 4]);
    }

    #[test]
    fn sums_run_by_node_then_by_local_rank() {
        let member = |global, node, local| Member { global, node, local };
        let members = vec![member(0, 1, 1), member(2, 0, 0), member(4, 1, 0), member(5, 0, 3)];
        let group = Topology::new(members, 2);
        assert_eq!(group.nodes(), [vec![1, 3], vec![2, 0]]);
        assert_eq!(group.local_ranks(), [2, 0]);
        assert_eq!(group.local_index(0), Some(1));
        assert_eq!(group.remote().collect::<Vec<_>>(), [1, 3]);
        assert!(!group.has_one_rank_per_node() && !group.is_one_node());
    }
}
