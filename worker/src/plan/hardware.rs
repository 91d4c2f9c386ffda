//! What hardware gives: GPUs by their data sheets, the wires between them, and the least times that follow.

use super::{Among, Exchange};
use crate::config::Precision;

const GB: u64 = 1_000_000_000;

/// A GPU by its data sheet: rates of dense matrices without sparsity, which no program exceeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accelerator {
    /// As people call it.
    pub name: &'static str,
    /// Bytes of its memory.
    pub memory: u64,
    /// Floating-point operations a second in f32, in tf32 and in bf16 with sums in f32.
    flops: [f64; 3],
    /// Bytes a second that it sends to the other GPUs of its node over NVLink: half of what data sheets say, which
    /// add both directions.
    pub link: f64,
}

impl Accelerator {
    /// Those with a name of their own, as SXM modules. Sources: NVIDIA's data sheets of A100 (June 2021), H100 and H200
    /// (2024), and HGX B200 (2025, a GPU's eighth).
    pub const ALL: [Self; 5] = [
        Self {
            name: "a100-40gb",
            memory: 40 * GB,
            flops: [19.5e12, 156e12, 312e12],
            link: 300e9,
        },
        Self {
            name: "a100",
            memory: 80 * GB,
            flops: [19.5e12, 156e12, 312e12],
            link: 300e9,
        },
        Self {
            name: "h100",
            memory: 80 * GB,
            flops: [67e12, 494.7e12, 989.4e12],
            link: 450e9,
        },
        Self {
            name: "h200",
            memory: 141 * GB,
            flops: [67e12, 494.7e12, 989.4e12],
            link: 450e9,
        },
        Self {
            name: "b200",
            memory: 180 * GB,
            flops: [75e12, 1100e12, 2250e12],
            link: 900e9,
        },
    ];

    /// The one of that name, in capitals or not.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        let known = |accelerator: &Self| accelerator.name.eq_ignore_ascii_case(name);
        Self::ALL.into_iter().find(known)
    }

    /// Operations a second of matrix products in a precision.
    #[must_use]
    pub const fn flops(&self, precision: Precision) -> f64 {
        let [f32, tf32, bf16] = self.flops;
        match precision {
            Precision::F32 => f32,
            Precision::Tf32 => tf32,
            Precision::Bf16 => bf16,
        }
    }
}

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

/// An all-reduce that moves as little as can be (Patarasuk & Yuan 2009): as a ring does, and the direct exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllReduce {
    /// Ranks that take part.
    pub ranks: u64,
    /// Size of the buffer: a multiple of `ranks` elements.
    pub bytes: u64,
}

impl AllReduce {
    /// Bytes that each rank moves: 2(N−1)/N·S, half of them for the sums and half for their results.
    #[must_use]
    pub const fn bytes_a_rank(&self) -> u64 {
        2 * (self.ranks - 1) * (self.bytes / self.ranks)
    }

    /// The least time it takes where each rank moves `bytes_per_s`, in seconds.
    #[must_use]
    pub fn seconds(&self, bytes_per_s: f64) -> f64 {
        self.bytes_a_rank() as f64 / bytes_per_s
    }

    /// `seconds` the other way round: bytes a second that each rank moved in so much time.
    #[must_use]
    pub fn rate(&self, seconds: f64) -> f64 {
        self.bytes_a_rank() as f64 / seconds
    }
}

/// What a step takes at least, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepBound {
    /// Arithmetic.
    pub compute: f64,
    /// Bytes between ranks.
    pub communication: f64,
    /// Both at the same time.
    pub overlaps: bool,
}

impl StepBound {
    /// The longer of both where they overlap, else their sum.
    #[must_use]
    pub fn seconds(&self) -> f64 {
        if self.overlaps {
            self.compute.max(self.communication)
        } else {
            self.compute + self.communication
        }
    }

    /// Share of the step in which a device computes.
    #[must_use]
    pub fn efficiency(&self) -> f64 {
        self.compute / self.seconds()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found_however_they_are_written() {
        let h100 = Accelerator::named("H100").unwrap();
        assert_eq!(h100.flops(Precision::Bf16), 989.4e12);
        assert_eq!(Accelerator::named("h1000"), None);
    }

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

    const MIB: u64 = 1 << 20;

    /// Milliseconds on 8 ranks, at 900 and at 50 GB/s.
    fn ms(bytes: u64) -> [f64; 2] {
        let all_reduce = AllReduce { ranks: 8, bytes };
        [900e9, 50e9].map(|rate| all_reduce.seconds(rate) * 1e3)
    }

    #[test]
    fn times_are_those_of_the_published_examples() {
        for (bytes, expected) in [
            (2_000_000_000, [3.9, 70.0]),
            (25 * MIB, [0.051, 0.92]),
            (64 * MIB, [0.130, 2.35]),
        ] {
            for (found, expected) in ms(bytes).iter().zip(expected) {
                assert!(
                    (found / expected - 1.0).abs() < 0.01,
                    "{bytes}: {found}, {expected}"
                );
            }
        }
    }

    #[test]
    fn eight_ranks_move_seven_quarters_of_the_buffer_each() {
        let all_reduce = AllReduce {
            ranks: 8,
            bytes: 64 * MIB,
        };
        assert_eq!(all_reduce.bytes_a_rank(), 117_440_512);
        assert!((all_reduce.rate(all_reduce.seconds(5e9)) - 5e9).abs() < 1.0);
        let alone = AllReduce {
            ranks: 1,
            ..all_reduce
        };
        assert_eq!(alone.bytes_a_rank(), 0);
    }

    #[test]
    fn what_overlaps_is_as_long_as_the_longer() {
        let mut bound = StepBound {
            compute: 0.3,
            communication: 0.1,
            overlaps: true,
        };
        assert_eq!((bound.seconds(), bound.efficiency()), (0.3, 1.0));
        bound.overlaps = false;
        assert_eq!(bound.seconds(), 0.4);
        bound = StepBound {
            communication: 0.6,
            overlaps: true,
            ..bound
        };
        assert_eq!((bound.seconds(), bound.efficiency()), (0.6, 0.5));
    }
}
