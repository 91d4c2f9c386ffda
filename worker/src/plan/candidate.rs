//! A configuration on given machines: what every stage of its pipeline holds and sends, and the least time of a step.

use std::sync::Arc;

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;

use super::estimate::{Estimate, StepTraffic};
use super::step_times::{BusyTimes, Machines, StepTimes};
use crate::config::{OptimizerOffload, Pipeline, PipelineSchedule, ShardGroup, Strategy, Sync, TrainConfig};
use crate::costs::{Cluster, GlobalBatch};
use crate::mesh::{Axis, MeshShape, SAMPLES};
use crate::parallel::pipeline::PipelinePlan;
use crate::train::TrainError;
use crate::train::rank_spec::RankSpec;
use crate::train::strategy::{mesh, pipeline_plan};

/// A strategy on a mesh of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// What is sharded.
    pub strategy: Strategy,
    /// Its nodes and ranks.
    pub cluster: Cluster,
    /// How these are arranged.
    pub mesh: MeshShape,
    /// Samples of a step.
    pub batch: GlobalBatch,
    /// Name of the pipeline's schedule.
    pub schedule: &'static str,
    /// Chunks of the model on each rank of the pipeline.
    pub chunks: usize,
    /// Layers of the model on each rank of the pipeline.
    pub layers: Vec<usize>,
    /// What the rank that holds most holds and sends.
    pub estimate: Estimate,
    /// What a rank of each stage of the pipeline holds and sends.
    pub stages: Vec<Estimate>,
    /// The most that a rank sends.
    pub sent: StepTraffic,
    /// Bytes in the memory of the device of the rank that holds most.
    pub held: u64,
    /// Whether the device has room for that, if its memory is known.
    pub fits: Option<bool>,
    /// The least time of arithmetic in a step, in seconds, if the device's rate is known.
    pub compute: Option<f64>,
    /// The least time of exchanges within tensor groups, in seconds, if the rates of the wires are known.
    pub tensor: Option<f64>,
    /// The part of all ranks' time in which they wait for other stages.
    pub bubble: f64,
    /// The least time of communication with other data-parallel ranks, in seconds, if the rates of the wires are known.
    pub communication: Option<f64>,
    /// Where [`Candidate::offloaded`] is.
    pub offloaded_to: &'static str,
    step: Option<f64>,
}

impl Candidate {
    /// The costs of a configuration as it is.
    pub(super) fn of(config: &TrainConfig, machines: &Machines) -> Result<Self, TrainError> {
        let busy = BusyTimes::of(config, machines, exchanged(config)?)?;
        let planned = PlannedMesh::new(config.clone(), machines, busy)?;
        let activations = planned.activations(u64::MAX)?;
        planned.candidate(&activations.expect("there are no more bytes"), u64::MAX)
    }

    /// The least time of a step, in seconds, if those of its parts are known.
    pub fn seconds(&self) -> Option<f64> {
        self.step
    }

    /// Ranks along each axis that has several, as `pp 4 × dp 2 × tp 8`.
    pub fn layout(&self) -> String {
        let axes = [
            ("pp", &[Axis::Pipeline][..]),
            ("dp", &SAMPLES),
            ("tp", &[Axis::Tensor]),
        ];
        let sizes = axes.map(|(name, axes)| (name, self.mesh.size(axes)));
        let several = sizes.iter().filter(|(_, ranks)| *ranks > 1);
        let words: Vec<String> = several.map(|(name, ranks)| format!("{name} {ranks}")).collect();
        words.join(" × ")
    }

    /// Bytes of parameters, gradients and optimizer on the device.
    pub fn state(&self) -> u64 {
        let held = self.estimate.held;
        held.params + held.grads + held.optimizer - self.offloaded()
    }

    /// Bytes of the optimizer that are elsewhere.
    pub fn offloaded(&self) -> u64 {
        self.estimate.held.total() - self.held
    }
}

/// The configuration with another strategy.
pub(super) fn under(config: &TrainConfig, strategy: Strategy) -> TrainConfig {
    let mut config = config.clone();
    config.parallel.strategy = strategy;
    if strategy != Strategy::Ddp {
        (config.parallel.sync, config.parallel.sync_each_batch) = (Sync::Bucketed, false);
    }
    config
}

/// Bytes that a rank sends to its tensor group in one micro-batch of the whole model.
pub(super) fn exchanged(config: &TrainConfig) -> Result<u64, TrainError> {
    let tensor = config.parallel.tensor;
    if tensor == 1 {
        return Ok(0);
    }
    let mut config = config.clone();
    config.parallel.strategy = Strategy::Ddp;
    config.parallel.pipeline = Pipeline::default();
    config.train.grad_accumulation = 1;
    let env = WorkerEnv {
        world_size: WorldSize(tensor as u32),
        local_world_size: tensor as u32,
        ..WorkerEnv::single()
    };
    let mesh = mesh(&config, &env)?;
    let plan = Arc::new(pipeline_plan(&config)?);
    let found = Estimate::new(&RankSpec::new(&config, mesh, &plan, 0)?, ENOUGH, true)?;
    Ok(found.sent.activations)
}

/// Rounds of as many micro-batches as a pipeline has ranks, at least.
const REHEARSED_ROUNDS: usize = 4;

/// Room for any activations, where their size does not matter.
const ENOUGH: usize = 1 << 50;

/// A configuration on a mesh, before anything is laid out.
pub(super) struct PlannedMesh<'a> {
    pub(super) config: TrainConfig,
    pub(super) times: StepTimes,
    machines: &'a Machines,
    mesh: MeshShape,
    plan: Arc<PipelinePlan>,
}

impl<'a> PlannedMesh<'a> {
    pub(super) fn new(
        config: TrainConfig,
        machines: &'a Machines,
        busy: BusyTimes,
    ) -> Result<Self, TrainError> {
        let mesh = mesh(&config, &env(&machines.cluster))?;
        // A run refuses what has more, however few are rehearsed.
        PipelinePlan::check_size(&config.parallel.pipeline, config.train.grad_accumulation)?;
        let mut rehearsed = config.clone();
        rehearsed.train.grad_accumulation = rehearsed_micro_batches(&config);
        let plan = Arc::new(pipeline_plan(&rehearsed)?);
        Ok(Self {
            times: StepTimes::of(&config, machines, (&mesh, &plan), busy)?,
            config,
            machines,
            mesh,
            plan,
        })
    }

    /// The same schedule, with another choice of what data-parallel ranks share.
    pub(super) fn sharing(&self, strategy: Strategy, group: Option<ShardGroup>) -> Result<Self, TrainError> {
        let mut config = under(&self.config, strategy);
        config.parallel.shard_group = group;
        Ok(Self {
            mesh: mesh(&config, &env(&self.machines.cluster))?,
            config,
            plan: self.plan.clone(),
            ..*self
        })
    }

    /// Bytes of the activations of each rank of the pipeline; none if a rank has more than `most`. They do not depend on what
    /// data-parallel ranks share.
    pub(super) fn activations(&self, most: u64) -> Result<Option<Vec<usize>>, TrainError> {
        let mut found = Vec::new();
        for rank in self.first_ranks() {
            let bytes = self.spec(rank)?.activations()?;
            if bytes as u64 > most {
                return Ok(None);
            }
            found.push(bytes);
        }
        Ok(Some(found))
    }

    /// What its ranks hold, with these bytes of activations, and what they send if each of them holds at most `most` bytes.
    pub(super) fn candidate(&self, activations: &[usize], most: u64) -> Result<Candidate, TrainError> {
        let Self {
            config, mesh, times, ..
        } = self;
        let cluster = &self.machines.cluster;
        let placement = self.plan.placement();
        let mut stages = self.estimates(activations, false)?;
        if stages.iter().all(|estimate| self.in_memory(estimate) <= most) {
            stages = self.estimates(activations, true)?;
        }
        let most = stages.iter().max_by_key(|estimate| self.in_memory(estimate));
        let estimate = *most.expect("a pipeline has a rank");
        let sent = stages
            .iter()
            .fold(StepTraffic::default(), |most, stage| most.max(stage.sent));
        let held = self.in_memory(&estimate);
        let is_file = config.train.offload.optimizer == OptimizerOffload::File;
        let chunks = |rank| placement.stages_of(rank);
        let layers = |rank| chunks(rank).map(|stage| self.plan.layers()[stage].len()).sum();
        Ok(Candidate {
            strategy: config.parallel.strategy,
            cluster: *cluster,
            mesh: *mesh,
            schedule: self.plan.name(),
            chunks: placement.stages() / placement.ranks(),
            layers: (0..stages.len()).map(layers).collect(),
            fits: self.machines.memory.map(|memory| held <= memory),
            compute: times.busy.compute,
            tensor: times.busy.tensor,
            bubble: times.bubble,
            communication: StepTimes::communication((cluster, mesh), sent.by_axis),
            offloaded_to: if is_file { "in a file" } else { "in host memory" },
            step: times.step(config, (cluster, mesh), &sent),
            batch: GlobalBatch::of(config, mesh),
            estimate,
            stages,
            sent,
            held,
        })
    }

    /// The least that a rank of the pipeline holds of parameters and optimizer, without padding.
    pub(super) fn least_state(&self) -> Result<u64, TrainError> {
        let estimates = self.estimates(&vec![0; self.first_ranks().len()], false)?;
        let least = estimates.iter().map(|estimate| {
            let held = estimate.held;
            let others = held.gathered + held.grads + held.padding;
            self.in_memory(estimate).saturating_sub(others)
        });
        Ok(least.min().unwrap_or(0))
    }

    /// Of each rank of the pipeline, and what it `sends`. Ranks that hold as many layers in the same places hold and send as
    /// much.
    fn estimates(&self, activations: &[usize], sends: bool) -> Result<Vec<Estimate>, TrainError> {
        let is_in_order = self.mesh.size(&[Axis::Pipeline]) == 1;
        // What is still gathered from one pass to the next depends on the order of a rank's passes.
        let differ = sends && self.config.parallel.strategy == Strategy::Zero3 && !is_in_order;
        let mut known: Vec<(_, Estimate)> = Vec::new();
        let mut estimates = Vec::with_capacity(activations.len());
        for (index, rank) in self.first_ranks().into_iter().enumerate() {
            let row = self.plan.row(index, 1);
            let part = (
                self.plan
                    .chunks_of(index)
                    .iter()
                    .map(ExactSizeIterator::len)
                    .collect::<Vec<_>>(),
                row.iter().map(|action| action.kind).collect::<Vec<_>>(),
                [
                    index == 0,
                    self.plan.placement().rank_of(self.plan.layers().len() - 1) == index,
                ],
                differ.then_some(index),
            );
            let mut found = match known.iter().find(|(other, _)| *other == part) {
                Some((_, known)) => *known,
                None => Estimate::new(&self.spec(rank)?, ENOUGH, sends)?,
            };
            found.held.activations = activations[index] as u64;
            known.push((part, found));
            estimates.push(found);
        }
        Ok(estimates)
    }

    fn spec(&self, rank: usize) -> Result<RankSpec, TrainError> {
        RankSpec::new(&self.config, self.mesh, &self.plan, rank)
    }

    /// One rank of each stage.
    fn first_ranks(&self) -> Vec<usize> {
        self.mesh.members(0, &[Axis::Pipeline])
    }

    /// Bytes in the memory of the device.
    fn in_memory(&self, estimate: &Estimate) -> u64 {
        let all = estimate.held.total();
        match self.config.train.offload.optimizer {
            OptimizerOffload::File => all - estimate.held.optimizer,
            OptimizerOffload::Host if self.machines.has_own_memory => all - estimate.held.optimizer,
            OptimizerOffload::Host | OptimizerOffload::None => all,
        }
    }
}

/// Number of micro-batches to rehearse. What is in flight at once is in flight in the first rounds of a pipeline, and later
/// rounds only repeat it. But GPipe has all micro-batches in flight.
pub(super) fn rehearsed_micro_batches(config: &TrainConfig) -> usize {
    let Pipeline { stages, schedule, .. } = &config.parallel.pipeline;
    let all = config.train.grad_accumulation;
    // As many are left over from whole rounds as of all, and interleaved 1F1B spreads them over as many rounds.
    let left_over = all % stages;
    let enough = REHEARSED_ROUNDS.max(left_over) * stages + left_over;
    if *schedule == PipelineSchedule::GPipe {
        return all;
    }
    all.min(enough)
}

fn env(cluster: &Cluster) -> WorkerEnv {
    WorkerEnv {
        world_size: WorldSize(cluster.ranks() as u32),
        local_world_size: cluster.ranks_a_node as u32,
        node_count: cluster.nodes as u32,
        ..WorkerEnv::single()
    }
}
