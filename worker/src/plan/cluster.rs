//! Machines and the wires between their devices.

use super::{Among, Exchange};

/// Nodes of equal size, and how fast their ranks reach each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cluster {
    /// Machines.
    pub nodes: u64,
    /// Ranks on each.
    pub ranks_a_node: u64,
    /// Bytes a second that a rank sends to ranks of its node; none if it is not known.
    pub link: Option<f64>,
    /// Bytes a second that a node sends to the others, all its adapters together; none if it is not known.
    pub network: Option<f64>,
}

/// Where the ranks of a group are.
struct Spread {
    nodes: f64,
    /// On each of these nodes.
    ranks: f64,
    /// Groups that share a node's way to the others.
    beside: f64,
}

impl Cluster {
    /// All ranks.
    #[must_use]
    pub const fn ranks(&self) -> u64 {
        self.nodes * self.ranks_a_node
    }

    /// The same machines, so many ranks of them: some of one node, or whole nodes.
    #[must_use]
    pub fn of_ranks(&self, ranks: u64) -> Self {
        Self {
            nodes: ranks.div_ceil(self.ranks_a_node),
            ranks_a_node: ranks.min(self.ranks_a_node),
            ..*self
        }
    }

    /// The least time that the exchanges take, in seconds, where `shard_ranks` ranks hold a copy of the state; none if it
    /// depends on a rate that is not known.
    ///
    /// Links within nodes and the network between them work at the same time, so this is the longer of both. Of S bytes that
    /// are reduce-scattered or gathered by g ranks on each of m nodes, a rank sends (g − 1)/g · S to its node, and a node
    /// (m − 1)/m · S to the others, once for all its ranks: within one node the bound of a ring (Patarasuk & Yuan 2009).
    #[must_use]
    pub fn least_seconds(&self, exchanges: &[Exchange], shard_ranks: u64) -> Option<f64> {
        let (mut inside, mut between) = (0.0, 0.0);
        for exchange in exchanges {
            let Spread { nodes, ranks, beside } = self.spread(exchange.among, shard_ranks);
            let bytes = exchange.times as f64 * exchange.bytes as f64;
            inside += (ranks - 1.0) / ranks * bytes;
            between += (nodes - 1.0) / nodes * bytes * beside;
        }
        let seconds = |bytes: f64, rate: Option<f64>| match rate {
            _ if bytes == 0.0 => Some(0.0),
            rate => rate.map(|rate| bytes / rate),
        };
        Some(seconds(inside, self.link)?.max(seconds(between, self.network)?))
    }

    /// Ranks of a copy are neighbours.
    fn spread(&self, among: Among, shard_ranks: u64) -> Spread {
        let (all, here) = (self.ranks() as f64, self.ranks_a_node as f64);
        let copy = shard_ranks as f64;
        match among {
            Among::Shards => {
                let nodes = (copy / here).ceil();
                let ranks = copy / nodes;
                Spread {
                    nodes,
                    ranks,
                    beside: here / ranks,
                }
            }
            Among::Copies if copy < here => Spread {
                nodes: self.nodes as f64,
                ranks: here / copy,
                beside: copy,
            },
            Among::Copies => Spread {
                nodes: all / copy,
                ranks: 1.0,
                beside: here,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn cluster(nodes: u64, ranks_a_node: u64) -> Cluster {
        Cluster {
            nodes,
            ranks_a_node,
            link: Some(100e9),
            network: Some(50e9),
        }
    }

    fn exchange(bytes: u64, times: u64, among: Among) -> [Exchange; 1] {
        [Exchange { bytes, times, among }]
    }

    #[test]
    fn within_a_node_it_is_the_ring() {
        // 2 GB on 8 ranks: 3.9 ms at 900 GB/s, 70 ms at 50 GB/s.
        for (rate, expected) in [(900e9, 3.9e-3), (50e9, 70e-3)] {
            let node = Cluster {
                link: Some(rate),
                network: None,
                ..cluster(1, 8)
            };
            let found = node
                .least_seconds(&exchange(2 * GB, 2, Among::Copies), 1)
                .unwrap();
            assert!((found / expected - 1.0).abs() < 0.01, "{found}");
        }
    }

    #[test]
    fn between_nodes_the_slower_of_both_wires_counts() {
        // An all-reduce of 8 GB: a rank sends 2 · 3/4 · 8 within its node, a node 2 · 1/2 · 8 to the other.
        let found = cluster(2, 4).least_seconds(&exchange(8 * GB, 2, Among::Copies), 1);
        assert_eq!(found, Some(0.16));
        let fast = Cluster {
            network: Some(800e9),
            ..cluster(2, 4)
        };
        let found = fast.least_seconds(&exchange(8 * GB, 2, Among::Copies), 1);
        assert_eq!(found, Some(0.12));
    }

    #[test]
    fn a_copy_within_a_node_leaves_the_network_to_the_copies() {
        // 4 nodes of 2, a copy on each: parameters are gathered within it, shards of 4 GB averaged over the nodes,
        // two of them through each node's adapters.
        let nodes = cluster(4, 2);
        let gathered = nodes.least_seconds(&exchange(8 * GB, 1, Among::Shards), 2);
        assert_eq!(gathered, Some(0.04));
        let averaged = nodes.least_seconds(&exchange(4 * GB, 2, Among::Copies), 2);
        assert_eq!(averaged, Some(2.0 * 0.75 * 8.0 / 50.0));
        // Over all ranks each of the gatherings crosses the network.
        let gathered = nodes.least_seconds(&exchange(8 * GB, 1, Among::Shards), 8);
        assert_eq!(gathered, Some(0.75 * 8.0 / 50.0));
    }

    #[test]
    fn an_unknown_rate_matters_only_where_something_is_sent() {
        let unknown = Cluster {
            network: None,
            ..cluster(2, 4)
        };
        let all = exchange(GB, 2, Among::Copies);
        assert_eq!(unknown.least_seconds(&all, 1), None);
        assert!(unknown.of_ranks(4).least_seconds(&all, 1).is_some());
        assert_eq!(unknown.of_ranks(1).least_seconds(&all, 1), Some(0.0));
    }
}
