//! What a run costs that no code of the run computes: arithmetic of a token, samples of a step, and least times on the
//! wires between ranks; with GPUs by their data sheets.
//!
//! | type | what it says |
//! |---|---|
//! | [`Work`] | arithmetic of a token |
//! | [`GlobalBatch`] | samples and tokens of one optimizer step |
//! | [`Cluster`] | nodes, ranks and wires, and the least time of what they send to groups ([`Sent`]) |
//! | [`Accelerator`] | GPUs by their data sheets |
//!
//! Pure functions of sizes. What a rank holds and sends is no formula: [`crate::plan::Estimate`] lays the run's own types
//! out on a device that does nothing.

use std::ops::Range;

use crate::config::{Model, Precision, Recompute, TrainConfig};
use crate::cuda::GpuFacts;
use crate::mesh::{MeshShape, SAMPLES};
use crate::model::Decoder;

/// Floating-point operations of one token of training that no implementation can leave out; a multiply-add is two.
///
/// Products alone count, each once in forward and twice in backward: the blocks' matrices and the head's, and in attention
/// the scores and the weighted sum over the positions up to the token's own, (positions + 1)/2 on average. Embeddings are
/// looked up, and the masked half of attention need not be computed. The usual 6Ψ + 12·layers·width·positions (Chowdhery
/// et al. 2022, appendix B) counts both, and is no lower bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Of forward and backward.
    pub model: u64,
    /// What recomputation does again.
    pub repeated: u64,
}

impl Work {
    /// The work of some layers of a model, and of its head with a vocabulary of `vocabulary` tokens, if that is not 0.
    pub fn of(model: &Model, layers: Range<usize>, vocabulary: u64, recompute: Recompute) -> Self {
        let decoder = Decoder::of(model);
        let [count, width, positions] = [layers.len(), model.n_embd, model.block_size].map(|n| n as u64);
        let mut products = [0; 5];
        for layer in layers {
            let of_layer = decoder.layer_matrices(layer);
            products
                .iter_mut()
                .zip(of_layer)
                .for_each(|(sum, elements)| *sum += elements as u64);
        }
        let [_, _, widen, narrow, _] = products;
        let matrices: u64 = products.iter().sum();
        // Scores and weighted sum, over the channels of all query heads.
        let heads = decoder
            .attention
            .map_or(0, |attention| attention.stretches()[0] as u64);
        let attention = 2 * count * heads * (positions + 1);
        Self {
            model: 3 * (2 * (matrices + vocabulary * width) + attention),
            repeated: match recompute {
                Recompute::Nothing | Recompute::Norms => 0,
                // The first of the feed-forward layer's products.
                Recompute::Selective => 2 * widen,
                // All but the last one, whose output is not used again.
                Recompute::Full => 2 * (matrices - narrow) + attention,
            },
        }
    }

    /// All that the device does.
    pub const fn total(&self) -> u64 {
        self.model + self.repeated
    }
}

/// Samples and positions of a micro-batch that a rank computes.
pub fn micro_batch_shape(config: &TrainConfig) -> [usize; 2] {
    let positions = config.model.block_size / config.parallel.context;
    [config.train.micro_batch, positions]
}

/// Rows of the residual stream that a rank holds of these: under sequence parallelism its tensor group divides them.
pub fn residual_rows(config: &TrainConfig) -> usize {
    let rows: usize = micro_batch_shape(config).iter().product();
    let parts = config.parallel.sequence.then_some(config.parallel.tensor);
    rows / parts.unwrap_or(1)
}

/// The factors of a global batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GlobalBatch {
    /// Data-parallel ranks.
    pub ranks: u64,
    /// Micro-batches of one step on one rank.
    pub accumulation: u64,
    /// Samples of one micro-batch.
    pub micro_batch: u64,
    /// Tokens of one sample.
    pub block_size: u64,
}

impl GlobalBatch {
    /// The batch of a step of a configuration on a mesh.
    pub fn of(config: &TrainConfig, mesh: &MeshShape) -> Self {
        Self {
            ranks: mesh.size(&SAMPLES) as u64,
            accumulation: config.train.grad_accumulation as u64,
            micro_batch: config.train.micro_batch as u64,
            block_size: config.model.block_size as u64,
        }
    }

    /// Samples of one step, over all ranks.
    pub const fn samples(&self) -> u64 {
        self.ranks * self.accumulation * self.micro_batch
    }

    /// Tokens of one step, over all ranks.
    pub const fn tokens(&self) -> u64 {
        self.samples() * self.block_size
    }
}

const GB: u64 = 1_000_000_000;

/// A GPU by its data sheet: rates of dense matrices without sparsity, which no program exceeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Accelerator {
    /// Its common name.
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
        Self::sheet("a100-40gb", 40, [19.5e12, 156e12, 312e12], 300e9),
        Self::sheet("a100", 80, [19.5e12, 156e12, 312e12], 300e9),
        Self::sheet("h100", 80, [67e12, 494.7e12, 989.4e12], 450e9),
        Self::sheet("h200", 141, [67e12, 494.7e12, 989.4e12], 450e9),
        Self::sheet("b200", 180, [75e12, 1100e12, 2250e12], 900e9),
    ];

    const fn sheet(name: &'static str, gigabytes: u64, flops: [f64; 3], link: f64) -> Self {
        Self {
            name,
            memory: gigabytes * GB,
            flops,
            link,
        }
    }

    /// The one of that name, in capitals or not.
    pub fn named(name: &str) -> Option<Self> {
        let known = |accelerator: &Self| accelerator.name.eq_ignore_ascii_case(name);
        Self::ALL.into_iter().find(known)
    }

    /// Of `NVIDIA H100 80GB HBM3` the sheet of an `h100`; where several bear the name, that with the nearest memory. Cards
    /// for PCI Express are slower than the modules that the sheets are of, and parts of a module (MIG) too: they have none.
    pub fn of(gpu: &GpuFacts) -> Option<Self> {
        let name = gpu.name.to_ascii_lowercase();
        let words: Vec<&str> = name.split([' ', '-']).collect();
        let series = |sheet: &Self| sheet.name.split('-').next().unwrap_or_default();
        (Self::ALL.into_iter())
            .filter(|sheet| words.contains(&series(sheet)))
            .filter(|_| !["pcie", "nvl", "mig"].iter().any(|word| words.contains(word)))
            .min_by_key(|sheet| sheet.memory.abs_diff(gpu.memory_bytes as u64))
    }

    /// Operations a second of matrix products in a precision.
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
    /// Bytes a second that a rank sends to ranks of its node, if known.
    pub link: Option<f64>,
    /// Bytes a second that a node sends to the others, all its adapters together, if known.
    pub network: Option<f64>,
}

/// What a rank sends to a group of ranks, as [`crate::collective::WireBytes`] counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// Bytes.
    pub bytes: u64,
    /// Ranks of the group.
    pub ranks: u64,
    /// Between the numbers of two that are neighbours.
    pub stride: u64,
    /// Each of them gets bytes of its own, as in an all-to-all.
    pub to_each: bool,
}

impl Cluster {
    /// All ranks.
    pub const fn ranks(&self) -> u64 {
        self.nodes * self.ranks_a_node
    }

    /// The least time of what a rank sends to its groups, in seconds; none if it depends on a rate that is not known.
    ///
    /// Links within nodes and the network between them work at the same time, so this is the longer of both. Of S bytes that
    /// are reduce-scattered or gathered by g ranks on each of m nodes, where each rank sends (gm − 1)/gm · S, a rank sends
    /// (g − 1)/g · S to its node, and a node (m − 1)/m · S to the others, once for all its ranks: within one node the bound of
    /// a ring (Patarasuk & Yuan 2009). An all-reduce is both, one after the other. What goes to each rank of its own leaves a
    /// node once for each of them.
    pub fn least_seconds(&self, sent: &[Sent]) -> Option<f64> {
        let (mut inside, mut between) = (0.0, 0.0);
        for sent in sent.iter().filter(|sent| sent.bytes > 0) {
            // The group's nodes, and its ranks on each of them.
            let (here, all) = (self.ranks_a_node as f64, sent.ranks as f64);
            let nodes = (all * sent.stride as f64 / here).ceil().clamp(1.0, all);
            let ranks = all / nodes;
            // S / gm
            let part = sent.bytes as f64 / (all - 1.0);
            // The groups on a node share its way to the others.
            let [near, far] = if sent.to_each {
                [ranks - 1.0, (all - ranks) * here]
            } else {
                [(ranks - 1.0) * nodes, (nodes - 1.0) * here]
            };
            inside += near * part;
            between += far * part;
        }
        let seconds = |bytes: f64, rate: Option<f64>| match rate {
            _ if bytes == 0.0 => Some(0.0),
            rate => rate.map(|rate| bytes / rate),
        };
        Some(seconds(inside, self.link)?.max(seconds(between, self.network)?))
    }

    /// The least time of a message to the rank whose number is `stride` higher, in seconds; `None` without the rate. The
    /// ranks of a node send at the same time.
    pub fn message_seconds(&self, bytes: u64, stride: u64) -> Option<f64> {
        if stride < self.ranks_a_node {
            return Some(bytes as f64 / self.link?);
        }
        Some((bytes * self.ranks_a_node) as f64 / self.network?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn names_are_found_however_they_are_written() {
        let h100 = Accelerator::named("H100").unwrap();
        assert_eq!(h100.flops(Precision::Bf16), 989.4e12);
        assert_eq!(Accelerator::named("h1000"), None);
    }

    #[test]
    fn a_drivers_name_leads_to_its_data_sheet() {
        let sheet = |name: &str, gib: usize| {
            let gpu = GpuFacts {
                name: name.into(),
                compute_capability: (9, 0),
                memory_bytes: gib << 30,
                multiprocessors: 132,
                shared_per_block: 227 << 10,
                pci: String::new(),
            };
            Accelerator::of(&gpu).map(|sheet| sheet.name)
        };
        assert_eq!(sheet("NVIDIA H100 80GB HBM3", 79), Some("h100"));
        assert_eq!(sheet("NVIDIA H200", 140), Some("h200"));
        assert_eq!(sheet("NVIDIA A100-SXM4-40GB", 39), Some("a100-40gb"));
        assert_eq!(sheet("NVIDIA A100-SXM4-80GB", 79), Some("a100"));
        assert_eq!(sheet("NVIDIA A100-PCIE-40GB", 39), None, "slower than the module");
        assert_eq!(sheet("NVIDIA H100 NVL", 93), None);
        assert_eq!(sheet("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 5), None);
        assert_eq!(sheet("NVIDIA GeForce RTX 4090", 24), None);
    }

    fn cluster(nodes: u64, ranks_a_node: u64) -> Cluster {
        Cluster {
            nodes,
            ranks_a_node,
            link: Some(100e9),
            network: Some(50e9),
        }
    }

    /// Of what goes to the ranks of a copy of the state, which are neighbours, and of what goes to the other copies.
    fn least_seconds(cluster: &Cluster, [in_copy, between]: [u64; 2], copy: u64) -> Option<f64> {
        let to_copy = Sent {
            bytes: in_copy,
            ranks: copy,
            stride: 1,
            to_each: false,
        };
        let to_others = Sent {
            bytes: between,
            ranks: cluster.ranks() / copy,
            stride: copy,
            to_each: false,
        };
        cluster.least_seconds(&[to_copy, to_others])
    }

    /// What each of `ranks` ranks sends of so many bytes that are reduce-scattered or gathered `times` times.
    const fn sent(bytes: u64, times: u64, ranks: u64) -> u64 {
        times * (ranks - 1) * (bytes / ranks)
    }

    #[test]
    fn within_a_node_it_is_the_ring() {
        const MIB: u64 = 1 << 20;
        // Milliseconds on 8 ranks, at 900 and at 50 GB/s, as published.
        for (bytes, published) in [
            (2 * GB, [3.9, 70.0]),
            (25 * MIB, [0.051, 0.92]),
            (64 * MIB, [0.130, 2.35]),
        ] {
            for (rate, expected) in [900e9, 50e9].into_iter().zip(published) {
                let node = Cluster {
                    link: Some(rate),
                    network: None,
                    ..cluster(1, 8)
                };
                let found = least_seconds(&node, [0, sent(bytes, 2, 8)], 1).unwrap() * 1e3;
                assert!((found / expected - 1.0).abs() < 0.01, "{bytes}: {found}");
            }
        }
    }

    #[test]
    fn between_nodes_the_slower_of_both_wires_counts() {
        // An all-reduce of 8 GB: a rank sends 2 · 3/4 · 8 within its node, a node 2 · 1/2 · 8 to the other.
        let found = least_seconds(&cluster(2, 4), [0, sent(8 * GB, 2, 8)], 1);
        assert_eq!(found, Some(0.16));
        let fast = Cluster {
            network: Some(800e9),
            ..cluster(2, 4)
        };
        let found = least_seconds(&fast, [0, sent(8 * GB, 2, 8)], 1);
        assert_eq!(found, Some(0.12));
    }

    #[test]
    fn a_copy_within_a_node_leaves_the_network_to_the_copies() {
        // 4 nodes of 2, a copy on each: parameters are gathered within it, shards of 4 GB averaged over the nodes,
        // two of them through each node's adapters.
        let nodes = cluster(4, 2);
        let gathered = least_seconds(&nodes, [sent(8 * GB, 1, 2), 0], 2);
        assert_eq!(gathered, Some(0.04));
        let averaged = least_seconds(&nodes, [0, sent(4 * GB, 2, 4)], 2);
        assert_eq!(averaged, Some(2.0 * 0.75 * 8.0 / 50.0));
        // Over all ranks each of the gatherings crosses the network.
        let gathered = least_seconds(&nodes, [sent(8 * GB, 1, 8), 0], 8);
        assert_eq!(gathered, Some(0.75 * 8.0 / 50.0));
    }

    #[test]
    fn an_unknown_rate_matters_only_where_something_is_sent() {
        let unknown = Cluster {
            network: None,
            ..cluster(2, 4)
        };
        assert_eq!(least_seconds(&unknown, [0, sent(GB, 2, 8)], 1), None);
        let node = least_seconds(&Cluster { nodes: 1, ..unknown }, [0, sent(GB, 2, 4)], 1);
        assert!(node.is_some());
        let alone = Cluster {
            nodes: 1,
            ranks_a_node: 1,
            ..unknown
        };
        assert_eq!(least_seconds(&alone, [0, 0], 1), Some(0.0));
    }

    #[test]
    fn gpt2_124m_at_1024_positions() {
        let model = Model {
            kind: config::ModelKind::Gpt2,
            n_layer: 12,
            n_head: 12,
            n_embd: 768,
            block_size: 1024,
            vocab_size: None,
            dropout: 0.0,
            ..Model::default()
        };
        let of = |recompute| Work::of(&model, 0..12, 50_304, recompute);
        // The blocks' matrices have 84,934,656 parameters. A token sees 512.5 positions on average.
        let (blocks, attention) = (84_934_656, 4 * 12 * 768 * 1025 / 2);
        assert_eq!(
            of(Recompute::Norms).total(),
            6 * (blocks + 50_304 * 768) + 3 * attention
        );
        // Forward once more, of the blocks alone, without the last of their products: a third of the matrices.
        assert_eq!(of(Recompute::Full).repeated, 2 * blocks * 2 / 3 + attention);
        assert_eq!(of(Recompute::Selective).repeated * 3, 2 * blocks);
    }

    /// One layer, 128 wide, 4,096 positions: bound by attention and full of positions.
    #[test]
    fn neither_position_embeddings_nor_masked_positions_are_counted() {
        let model = Model {
            kind: config::ModelKind::Gpt2,
            n_layer: 1,
            n_head: 1,
            n_embd: 128,
            block_size: 4096,
            vocab_size: None,
            dropout: 0.0,
            ..Model::default()
        };
        let products = 6 * (12 * 128 * 128 + 256 * 128);
        let scores_and_sums = 6 * 128 * 4097;
        assert_eq!(
            Work::of(&model, 0..1, 256, Recompute::Norms).total(),
            products + scores_and_sums
        );
    }

    #[test]
    fn four_mi_tokens_are_32_micro_batches_of_4_on_8_ranks() {
        let batch = GlobalBatch {
            ranks: 8,
            accumulation: 32,
            micro_batch: 4,
            block_size: 4096,
        };
        assert_eq!((batch.samples(), batch.tokens()), (1024, 4_194_304));
    }
}
