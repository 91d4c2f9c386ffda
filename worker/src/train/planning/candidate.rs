//! One strategy on a number of ranks: what a rank holds, and the least time of a step.

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;

use super::estimate::Estimate;
use crate::config::{OptimizerOffload, Strategy, Sync, TrainConfig};
use crate::data::Vocabulary;
use crate::plan::{Among, Cluster, StepBound, Work};
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
    /// What a rank holds and moves.
    pub estimate: Estimate,
    /// Bytes in the device's memory.
    pub held: u64,
    /// Whether the device has room for that, if its memory is known.
    pub fits: Option<bool>,
    /// The least time of arithmetic in a step, in seconds, if the device's rate is known.
    pub compute: Option<f64>,
    /// The least time of communication in a step, in seconds, if the rates of the wires are known.
    pub communication: Option<f64>,
    /// The least time of a step, if both are known.
    pub bound: Option<StepBound>,
}

impl Candidate {
    /// Bytes that a rank sends in a step, within its copy of the state and between the copies.
    pub(super) fn sent(&self) -> u64 {
        let exchanges = &self.estimate.exchanges;
        let ranks = |among| match among {
            Among::Shards => exchanges.shard_ranks,
            Among::Copies => self.cluster.ranks() / exchanges.shard_ranks,
        };
        let all = exchanges.all();
        all.iter()
            .map(|exchange| exchange.bytes_a_rank(ranks(exchange.among)))
            .sum()
    }
}

pub(super) fn candidate(
    config: &TrainConfig,
    machines: &Machines,
    cluster: Cluster,
) -> Result<Candidate, TrainError> {
    let env = WorkerEnv {
        world_size: WorldSize(cluster.ranks() as u32),
        local_world_size: cluster.ranks_a_node as u32,
        node_count: cluster.nodes as u32,
        ..WorkerEnv::single()
    };
    let estimate = Estimate::of(config, &env)?;
    let held = held(config, &estimate, machines);
    let exchanges = &estimate.exchanges;
    let communication = cluster.least_seconds(&exchanges.all(), exchanges.shard_ranks);
    let tokens = config.train.grad_accumulation * config.train.micro_batch * config.model.block_size;
    let work = work(config)?;
    let compute = machines
        .flops
        .map(|rate| tokens as f64 * work.total() as f64 / rate);
    let bound = compute
        .zip(communication)
        .map(|(compute, communication)| StepBound {
            compute,
            communication,
            overlaps: config.parallel.overlap && config.parallel.sync != Sync::Naive,
        });
    Ok(Candidate {
        strategy: config.parallel.strategy,
        cluster,
        estimate,
        held,
        fits: machines.memory.map(|memory| held <= memory),
        compute,
        communication,
        bound,
    })
}

/// Arithmetic of a token.
pub(super) fn work(config: &TrainConfig) -> Result<Work, TrainError> {
    let vocabulary = match config.model.vocab_size {
        Some(size) => size,
        None => Vocabulary::of(&config.data.tokenizer)?.size,
    };
    Ok(Work::of(&config.model, vocabulary as u64, config.train.recompute))
}

/// Bytes in the memory of the device that a rank trains on.
fn held(config: &TrainConfig, estimate: &Estimate, machines: &Machines) -> u64 {
    let held = estimate.held();
    let elsewhere = match config.train.offload.optimizer {
        OptimizerOffload::File => held.optimizer,
        OptimizerOffload::Host if machines.has_own_memory => held.optimizer,
        OptimizerOffload::Host | OptimizerOffload::None => 0,
    };
    held.total() - elsewhere + estimate.buffers.gathered + estimate.activations
}

/// `from`, and twice as many again and again.
pub(super) fn doublings(from: u64) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(from), |n| n.checked_mul(2))
}
