//! Where a rank stands in its job, and what its transport needs to know of the machine.

use std::net::IpAddr;

/// The place of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
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
    /// Number of nodes.
    pub node_count: usize,
    /// Address of this node that the ranks of other nodes reach. Not used on one node.
    pub host_addr: IpAddr,
    /// The generation of the job: ranks of another one are refused.
    pub generation: u64,
    /// Spin briefly before a wait sleeps. Wise only with a core for each rank of the node.
    pub spin: bool,
}

impl Place {
    /// A world of one.
    #[must_use]
    pub fn alone() -> Self {
        Self::on_one_node(0, 1)
    }

    /// Rank `rank` of a world of `size` on one node. Spins if the machine has as many cores.
    #[must_use]
    pub fn on_one_node(rank: usize, size: usize) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Self {
            rank,
            world_size: size,
            local_rank: rank,
            local_world_size: size,
            node_rank: 0,
            node_count: 1,
            host_addr: IpAddr::from([127, 0, 0, 1]),
            generation: 1,
            spin: size <= cores,
        }
    }
}
