//! How a model lies on ranks, and what becomes of its state when nothing disturbs the run.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;
use ddp_worker::config::{Parallel, Pipeline, ShardGroup, Strategy};
use ddp_worker::mesh::{Axis, MeshShape};
use rand::Rng;
use rand::rngs::StdRng;

/// The axes along which ranks hold different parts.
pub(super) const PARTS: [Axis; 3] = [Axis::Pipeline, Axis::Shard, Axis::Tensor];
/// Samples of a data-parallel rank in a step.
pub(super) const BATCH: u64 = 2;

/// How a model lies on ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    kind: Kind,
    parts: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Shards,
    /// Each part is on one rank, and a copy of it on its buddy.
    Buddies,
    Tensor,
    Pipeline,
}

impl Layout {
    pub(super) fn random(seed: u64, rng: &mut StdRng) -> Self {
        let kind = [Kind::Shards, Kind::Tensor, Kind::Pipeline][rng.random_range(0..3)];
        let parts = rng.random_range(1..=3);
        let has_buddies = kind == Kind::Shards && seed.is_multiple_of(2) && parts > 1;
        Self {
            kind: if has_buddies { Kind::Buddies } else { kind },
            parts: if has_buddies { 2 * parts - 2 } else { parts },
        }
    }

    pub(super) fn has_buddies(self) -> bool {
        self.kind == Kind::Buddies
    }

    pub(super) fn mesh(self, copies: usize) -> MeshShape {
        let copies = if self.has_buddies() { 1 } else { copies };
        let ranks = (self.parts * copies) as u32;
        let env = WorkerEnv {
            world_size: WorldSize(ranks),
            local_world_size: ranks,
            ..WorkerEnv::single()
        };
        let ddp = Parallel {
            strategy: Strategy::Ddp,
            ..Parallel::default()
        };
        let parallel = match self.kind {
            Kind::Shards => Parallel {
                strategy: Strategy::Zero2,
                shard_group: Some(ShardGroup::Ranks(self.parts)),
                ..ddp
            },
            Kind::Buddies => Parallel {
                strategy: Strategy::Zero2,
                ..ddp
            },
            Kind::Tensor => Parallel {
                tensor: self.parts,
                ..ddp
            },
            Kind::Pipeline => Parallel {
                pipeline: Pipeline {
                    stages: self.parts,
                    ..Pipeline::default()
                },
                ..ddp
            },
        };
        MeshShape::new(&parallel, &env).expect("copies of parts are a mesh")
    }

    /// The state of all parts after these steps, and the number of updates, when nothing disturbs it.
    pub(super) fn undisturbed(self, seed: u64, history: &[u64]) -> (Vec<u64>, u64) {
        let mut chains: Vec<u64> = (0..self.parts as u64)
            .map(|part| first_chain(seed, part))
            .collect();
        let (mut sample, mut updates) = (0, 0);
        for (step, &ranks) in history.iter().enumerate() {
            let whole = chains.iter().fold(0, |whole, &chain| mix(whole, chain));
            let of_ranks: Vec<u64> = (0..ranks).map(|rank| sample + rank * BATCH).collect();
            sample += ranks * BATCH;
            if !of_ranks.iter().all(|&sample| is_finite(seed, sample)) {
                continue;
            }
            updates += 1;
            for (part, chain) in chains.iter_mut().enumerate() {
                let contributions: Vec<u64> = of_ranks.iter().map(|&sample| mix(whole, sample)).collect();
                let sums = [0, 1].map(|bucket| sum(&contributions, part, bucket));
                *chain = mix(*chain, mix(sums[0].wrapping_add(sums[1]), step as u64));
            }
        }
        (chains, updates)
    }
}

pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut x = a
        .wrapping_add(b.wrapping_mul(0x9e37_79b9_7f4a_7c15))
        .wrapping_add(1);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub(super) fn first_chain(seed: u64, part: u64) -> u64 {
    mix(seed, part)
}

/// Whether the loss of the samples from this one is a number.
pub(super) fn is_finite(seed: u64, sample: u64) -> bool {
    !mix(seed ^ 0x5eed, sample).is_multiple_of(24)
}

/// The sum of a bucket of a part's gradient.
pub(super) fn sum(contributions: &[u64], part: usize, bucket: u64) -> u64 {
    let of_bucket = contributions
        .iter()
        .map(|&value| mix(mix(value, part as u64), bucket));
    of_bucket.fold(0, u64::wrapping_add)
}
