//! A configuration on given machines: what every stage of its pipeline holds and sends, and the least time of a step.

use std::collections::BTreeMap;
use std::sync::Arc;

use ddp_proto::env::WorkerEnv;
use ddp_proto::ids::WorldSize;

use super::estimate::{Estimate, StepTraffic};
use super::step_times::{BusyTimes, LayerNeeds, Machines, StepTimes, sent_to_groups};
use crate::config::{
    ModelKind, OffloadTarget, Pipeline, PipelineSchedule, Recompute, ShardGroup, Strategy, Sync, TrainConfig,
};
use crate::costs::{Cluster, GlobalBatch, Sent};
use crate::mesh::{Axis, MeshShape, Span};
use crate::model::Decoder;
use crate::parallel::pipeline::{PipelinePlan, Simulation};
use crate::train::TrainError;
use crate::train::rank_spec::RankSpec;
use crate::train::strategy::{mesh, pipeline_plan};

/// A strategy on a mesh of ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// How the ranks are arranged.
    pub mesh: MeshShape,
    /// Samples of a step.
    pub batch: GlobalBatch,
    /// Name of the pipeline's schedule.
    pub schedule: &'static str,
    /// What is computed again in backward, `train.recompute`.
    pub recompute: &'static str,
    /// Chunks of the model on each rank of the pipeline.
    pub chunks: usize,
    /// Layers of the model on each rank of the pipeline.
    pub layers: Vec<usize>,
    /// What the rank that holds most holds and sends.
    pub estimate: Estimate,
    /// The most that a rank sends.
    pub sent: StepTraffic,
    /// Bytes in the memory of the device of the rank that holds most.
    pub held: u64,
    /// Whether the device has room for that, if its memory is known.
    pub fits: Option<bool>,
    /// The least times of a step without communication with other data-parallel ranks.
    pub times: StepTimes,
    /// The least time of communication with other data-parallel ranks, in seconds, if the rates of the wires are known.
    pub communication: Option<f64>,
    /// Where [`Candidate::offloaded`] is.
    pub offloaded_to: &'static str,
    /// The least time of a step, in seconds, if those of its parts are known.
    pub seconds: Option<f64>,
}

impl Candidate {
    /// The costs of a configuration as it is.
    pub(super) fn of(config: &TrainConfig, machines: &Machines) -> Result<Self, TrainError> {
        let planned = PlannedMesh::of(config, machines)?;
        planned.candidate(&planned.activations()?, u64::MAX)
    }

    /// Bytes of parameters, gradients and optimizer on the device.
    pub fn state(&self) -> u64 {
        let held = self.estimate.held;
        held.params + held.grads + held.optimizer
    }

    /// Bytes of these that are elsewhere.
    pub fn offloaded(&self) -> u64 {
        let held = self.estimate.held;
        held.offloaded.iter().chain(&held.offloaded_params).sum()
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

impl LayerNeeds {
    /// Of what models of one layer and of two need, all with experts or all without.
    pub(super) fn of(config: &TrainConfig) -> Result<Self, TrainError> {
        let mut config = under(config, Strategy::Ddp);
        let layers = config.model.n_layer;
        let experts = Decoder::of(&config.model).expert_layers(0..layers);
        let plain = match config.model.kind {
            ModelKind::Mixtral => ModelKind::Llama,
            kind => kind,
        };
        config.parallel.pipeline = Pipeline::default();
        let ranks = MeshShape::ranks_multiple_of(&config.parallel).unwrap_or(1) as u32;
        config.train.grad_accumulation = 1;
        // They may name a layer that is left out.
        config.train.optimizer.groups.clear();
        let env = WorkerEnv {
            world_size: WorldSize(ranks),
            local_world_size: ranks,
            ..WorkerEnv::single()
        };
        config.model.experts.every = 1;
        let (mut of_layers, mut of_rest, mut kept) = ([0; Span::COUNT], [0; Span::COUNT], [0; 2]);
        let kinds = [(plain, layers - experts), (ModelKind::Mixtral, experts)];
        for (kind, (model, count)) in kinds.into_iter().enumerate().filter(|(_, (_, count))| *count > 0) {
            config.model.kind = model;
            let mut with = |layers| {
                config.model.n_layer = layers;
                Estimate::of(&config, &env)
            };
            let [one, two] = [with(1)?, with(2)?];
            kept[kind] = two.held.activations.saturating_sub(one.held.activations);
            for span in 0..Span::COUNT {
                let [one, two] = [one, two].map(|estimate| estimate.sent.exchanged[span]);
                of_layers[span] += count as u64 * (two - one);
                of_rest[span] = 2 * one - two;
            }
        }
        let exchanged = std::array::from_fn(|span| of_layers[span] + of_rest[span]);
        let mesh = mesh(&config, &env)?;
        let mut groups = sent_to_groups(&mesh, &[Axis::Context, Axis::Tensor], &exchanged);
        let rows = sent_to_groups(&mesh, &[Axis::Expert], &exchanged).into_iter();
        groups.extend(rows.map(|sent| Sent {
            to_each: true,
            ..sent
        }));
        Ok(Self {
            exchanged: groups,
            kept,
        })
    }
}

/// Rounds of as many micro-batches as a pipeline has ranks, at least.
const REHEARSED_ROUNDS: usize = 4;

/// Room for any activations, where their size does not matter.
const ENOUGH: usize = 1 << 50;

/// A configuration on a mesh, before anything is laid out.
#[derive(Clone)]
pub(super) struct PlannedMesh<'a> {
    pub(super) config: TrainConfig,
    pub(super) times: StepTimes,
    machines: &'a Machines,
    mesh: MeshShape,
    plan: Arc<PipelinePlan>,
    alike: Vec<AlikeRanks>,
}

/// Ranks of a pipeline with as many layers in their chunks, with and without experts, and with the same messages. They hold and send
/// as much, but for what micro-batches in flight make of it.
#[derive(Clone)]
struct AlikeRanks {
    /// The one with the fewest in flight. From one pass to the next it changes chunks most often, and has to gather most.
    fewest: usize,
    /// The one with the most in flight, whose activations are largest.
    most: usize,
    /// The most that layers of that one keep for backward.
    kept: u64,
}

impl AlikeRanks {
    fn all(decoder: &Decoder, plan: &PipelinePlan, simulation: &Simulation) -> Vec<Self> {
        let last = plan.placement().rank_of(plan.layers().len() - 1);
        let mut alike: BTreeMap<_, Vec<usize>> = BTreeMap::new();
        for rank in 0..plan.placement().ranks() {
            let chunks = plan.placement().stages_of(rank).map(|stage| {
                let layers = &plan.layers()[stage];
                (layers.len(), decoder.expert_layers(layers.clone()))
            });
            let kinds = plan.row(rank, 1).into_iter().map(|action| action.kind);
            let part: (Vec<_>, Vec<_>) = (chunks.collect(), kinds.collect());
            let known = alike.entry((rank == 0, rank == last, part));
            known.or_default().push(rank);
        }
        let of = |mut ranks: Vec<usize>| {
            ranks.sort_by_key(|&rank| simulation.ranks[rank].peak_bytes);
            let (fewest, most) = (ranks[0], ranks[ranks.len() - 1]);
            Self {
                fewest,
                most,
                kept: simulation.ranks[most].peak_bytes,
            }
        };
        alike.into_values().map(of).collect()
    }
}

impl<'a> PlannedMesh<'a> {
    pub(super) fn of(config: &TrainConfig, machines: &'a Machines) -> Result<Self, TrainError> {
        let busy = BusyTimes::of(config, machines, &LayerNeeds::of(config)?);
        Self::new(config.clone(), machines, busy)
    }

    pub(super) fn new(
        config: TrainConfig,
        machines: &'a Machines,
        busy: BusyTimes,
    ) -> Result<Self, TrainError> {
        let mut config = config;
        let offload = &mut config.train.offload;
        if offload.optimizer == OffloadTarget::Host && !machines.has_own_memory {
            // It is there already.
            (offload.optimizer, offload.parameters) = (OffloadTarget::None, OffloadTarget::None);
        }
        let mesh = mesh(&config, &env(&machines.cluster))?;
        // A run refuses what has more, however few are rehearsed.
        PipelinePlan::check_size(&config.parallel.pipeline, config.train.grad_accumulation)?;
        let mut rehearsed = config.clone();
        rehearsed.train.grad_accumulation = rehearsed_micro_batches(&config);
        let plan = Arc::new(pipeline_plan(&rehearsed)?);
        let (times, simulation) = StepTimes::of(&config, machines, &mesh, &plan, busy);
        Ok(Self {
            alike: AlikeRanks::all(&Decoder::of(&config.model), &plan, &simulation),
            times,
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
        if strategy != Strategy::Zero3 {
            config.train.offload.parameters = OffloadTarget::None;
        }
        Ok(Self {
            mesh: mesh(&config, &env(&self.machines.cluster))?,
            config,
            ..self.clone()
        })
    }

    /// The most bytes of activations on a rank, of each kind of alike ranks. They do not depend on what data-parallel ranks share.
    pub(super) fn activations(&self) -> Result<Vec<u64>, TrainError> {
        let of = |ranks: &AlikeRanks| Ok(self.spec(ranks.most)?.activations()? as u64);
        self.alike.iter().map(of).collect()
    }

    /// What its ranks hold, with these bytes of activations, and what they send if each of them holds at most `most` bytes.
    pub(super) fn candidate(&self, activations: &[u64], most: u64) -> Result<Candidate, TrainError> {
        let Self {
            config, mesh, times, ..
        } = self;
        let cluster = &self.machines.cluster;
        let placement = self.plan.placement();
        let mut alike = self.estimates(activations, false)?;
        if alike.iter().all(|estimate| estimate.held.total() <= most) {
            alike = self.estimates(activations, true)?;
        }
        let most = alike.iter().max_by_key(|estimate| estimate.held.total());
        let estimate = *most.expect("a pipeline has a rank");
        let sent = alike.iter().map(|ranks| ranks.sent);
        let sent = sent.fold(StepTraffic::default(), StepTraffic::max);
        let held = estimate.held.total();
        let is_file = config.train.offload.optimizer == OffloadTarget::File;
        let chunks = |rank| placement.stages_of(rank);
        let layers = |rank| chunks(rank).map(|stage| self.plan.layers()[stage].len()).sum();
        Ok(Candidate {
            mesh: *mesh,
            schedule: self.plan.name(),
            recompute: Recompute::WORDS[config.train.recompute as usize],
            chunks: placement.stages() / placement.ranks(),
            layers: (0..placement.ranks()).map(layers).collect(),
            fits: self.machines.memory.map(|memory| held <= memory),
            times: *times,
            communication: StepTimes::communication(cluster, mesh, &sent.state),
            offloaded_to: if is_file { "in a file" } else { "in host memory" },
            seconds: times.step(config, cluster, mesh, &sent),
            batch: GlobalBatch::of(config, mesh),
            estimate,
            sent,
            held,
        })
    }

    /// The least bytes of activations on a rank, of each kind of alike ranks: what layers keep of the micro-batches in flight.
    pub(super) fn kept(&self) -> Vec<u64> {
        self.alike.iter().map(|ranks| ranks.kept).collect()
    }

    /// Of each kind of alike ranks, with these bytes of activations, and what they `send`.
    fn estimates(&self, activations: &[u64], sends: bool) -> Result<Vec<Estimate>, TrainError> {
        let of = |(ranks, &activations): (&AlikeRanks, &u64)| {
            let mut found = Estimate::new(&self.spec(ranks.fewest)?, ENOUGH, sends)?;
            found.held.activations = activations;
            Ok(found)
        };
        self.alike.iter().zip(activations).map(of).collect()
    }

    /// One of the ranks that stand at this place of their pipeline.
    fn spec(&self, place: usize) -> Result<RankSpec, TrainError> {
        let rank = place * self.mesh.stride(Axis::Pipeline);
        RankSpec::new(&self.config, self.mesh, &self.plan, rank)
    }
}

/// Number of micro-batches to rehearse. What is in flight at once is in flight in the first rounds of a pipeline, and later
/// rounds only repeat it. But GPipe has all micro-batches in flight.
fn rehearsed_micro_batches(config: &TrainConfig) -> usize {
    let Pipeline { stages, schedule, .. } = &config.parallel.pipeline;
    let all = config.train.grad_accumulation;
    // As many are left over from whole rounds as of all, and interleaved 1F1B spreads them over as many rounds.
    let left_over = all % stages;
    let enough = REHEARSED_ROUNDS.max(left_over) * stages + left_over;
    match schedule {
        PipelineSchedule::GPipe => all,
        _ => all.min(enough),
    }
}

pub(super) fn env(cluster: &Cluster) -> WorkerEnv {
    WorkerEnv {
        world_size: WorldSize(cluster.ranks() as u32),
        local_world_size: cluster.ranks_a_node as u32,
        node_count: cluster.nodes as u32,
        ..WorkerEnv::single()
    }
}
