//! One strategy on a number of ranks: what a rank holds, and the least time of a step.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;

use super::estimate::Estimate;
use crate::config::{OptimizerOffload, Strategy, Sync, TrainConfig};
use crate::data::Vocabulary;
use crate::plan::{Cluster, Work};
use crate::train::TrainError;

/// The machines of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machines {
    /// Nodes, ranks, wires.
    pub cluster: Cluster,
    /// Bytes of a device that training may take; none if that is not known.
    pub memory: Option<u64>,
    /// Floating-point operations a second of a device; none if that is not known.
    pub flops: Option<f64>,
    /// Devices with memory of their own: what is offloaded to the host is not in it.
    pub has_own_memory: bool,
}

/// A strategy on a number of ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    /// What is sharded.
    pub strategy: Strategy,
    /// On how many ranks, and where.
    pub cluster: Cluster,
    /// What a rank holds and sends.
    pub estimate: Estimate,
    /// Bytes in the memory of the device that a rank trains on.
    pub held: u64,
    /// Whether the device has room for that, if its memory is known.
    pub fits: Option<bool>,
    /// The least time of arithmetic in a step, in seconds, if the device's rate is known.
    pub compute: Option<f64>,
    /// The least time of communication in a step, in seconds, if the rates of the wires are known.
    pub communication: Option<f64>,
    /// Both at the same time.
    overlaps: bool,
}

impl Candidate {
    pub(super) fn of(
        config: &TrainConfig,
        machines: &Machines,
        cluster: Cluster,
    ) -> Result<Self, TrainError> {
        let env = WorkerEnv {
            world_size: WorldSize(cluster.ranks() as u32),
            local_world_size: cluster.ranks_a_node as u32,
            node_count: cluster.nodes as u32,
            ..WorkerEnv::single()
        };
        let estimate = Estimate::of(config, &env)?;
        let elsewhere = match config.train.offload.optimizer {
            OptimizerOffload::File => estimate.held.optimizer,
            OptimizerOffload::Host if machines.has_own_memory => estimate.held.optimizer,
            OptimizerOffload::Host | OptimizerOffload::None => 0,
        };
        let held = estimate.held.total() - elsewhere;
        let between = estimate.sent.between_copies;
        let sent = [estimate.sent.total() - between, between];
        let tokens = config.train.grad_accumulation * config.train.micro_batch * config.model.block_size;
        let operations = tokens as f64 * work(config)?.total() as f64;
        Ok(Self {
            strategy: config.parallel.strategy,
            cluster,
            held,
            fits: machines.memory.map(|memory| held <= memory),
            compute: machines.flops.map(|rate| operations / rate),
            communication: cluster.least_seconds(sent, estimate.shard_ranks),
            overlaps: config.parallel.overlap && config.parallel.sync != Sync::Naive,
            estimate,
        })
    }

    /// The least time of a step, in seconds, if those of its parts are known: the longer of both where they overlap, else
    /// their sum.
    #[must_use]
    pub fn seconds(&self) -> Option<f64> {
        let (compute, communication) = (self.compute?, self.communication?);
        Some(if self.overlaps {
            compute.max(communication)
        } else {
            compute + communication
        })
    }
}

/// Arithmetic of a token.
pub(super) fn work(config: &TrainConfig) -> Result<Work, TrainError> {
    let vocabulary = match config.model.vocab_size {
        Some(size) => size,
        None => Vocabulary::of(&config.data.tokenizer)?.size,
    };
    Ok(Work::of(&config.model, vocabulary as u64, config.train.recompute))
}

/// `from`, and twice as many again and again.
pub(super) fn doublings(from: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(from), |n| n.checked_mul(2))
}
