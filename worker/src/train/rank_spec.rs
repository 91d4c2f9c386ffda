//! What a rank of a run holds and does, decided before anything is allocated.
//!
//! [`RankSpec::idle`] makes the run's own types for it on a device that does nothing, among ranks that do nothing. A step
//! on it shows how much memory activations need, and what a rank sends. So nothing is described twice: what is rehearsed
//! is what runs. Neither numbers nor memory are touched; it takes microseconds a block.

use std::collections::BTreeSet;
use std::sync::Arc;

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use super::idle_world::idle_world;
use super::replica::{Replica, ReplicaParts};
use super::router_table::RouterTable;
use super::run_row::{rehearse_evaluation, rehearse_step};
use super::strategy::{ShardingStrategy, held, mesh, part_of, pipeline_plan};
use super::world::{Groups, World, stage_messages};
use crate::config::{Accumulate, LastBatch, OffloadTarget, Strategy, TrainConfig};
use crate::costs::micro_batch_shape;
use crate::device::{StateMemory, StatePlace};
use crate::mesh::{Axis, MeshShape};
use crate::model::{ActivationPool, Model, ModelPart};
use crate::optim::Optimizer;
use crate::parallel::pipeline::PipelinePlan;
use crate::parallel::{
    ArenaShare, BlockGroups, Dtypes, GradientLayout, NormOrder, ParameterMemory, Parameters, Reducer,
    ReducerConfig, ReplicaSet, ReshardPolicy, is_counted, one_copy,
};

/// What a rank holds and does.
#[derive(Clone)]
pub(crate) struct RankSpec {
    pub(crate) config: TrainConfig,
    /// Global rank.
    pub(crate) rank: usize,
    /// The part of the model that the rank holds.
    pub(crate) model: Model,
    /// The layout of the gradients of that part.
    pub(crate) layout: Arc<GradientLayout>,
    pub(crate) strategy: ShardingStrategy,
    pub(crate) plan: Arc<PipelinePlan>,
}

impl RankSpec {
    /// The rank that `env` describes.
    pub(crate) fn of(config: &TrainConfig, env: &WorkerEnv) -> Result<Self, TrainError> {
        let mesh = mesh(config, env)?;
        let plan = Arc::new(pipeline_plan(config)?);
        Self::new(config, mesh, &plan, env.rank.get() as usize)
    }

    /// A rank of a mesh. `plan` may be for fewer micro-batches than the configuration.
    pub(crate) fn new(
        config: &TrainConfig,
        mesh: MeshShape,
        plan: &Arc<PipelinePlan>,
        rank: usize,
    ) -> Result<Self, TrainError> {
        let (model, layout) = held(config, &mesh, &part_of(config, &mesh, plan, rank))?;
        Ok(Self {
            config: config.clone(),
            rank,
            model,
            layout: Arc::new(layout),
            strategy: ShardingStrategy::new(
                &config.parallel,
                &config.train.offload,
                config.train.grad_accumulation,
                mesh,
            ),
            plan: plan.clone(),
        })
    }

    /// The layout of the gradients of a rank with the blocks of all stages.
    pub(crate) fn whole_layout(&self) -> Result<Arc<GradientLayout>, TrainError> {
        if self.model.part.chunks.is_none() {
            return Ok(self.layout.clone());
        }
        let part = ModelPart {
            chunks: None,
            ..self.model.part.clone()
        };
        Ok(Arc::new(held(&self.config, &self.strategy.mesh, &part)?.1))
    }

    /// In which order the norm is summed, over the ranks that hold one copy of the model with this one. A pure function: it
    /// lays out what each of them holds. `whole` is [`RankSpec::whole_layout`].
    pub(crate) fn norm_order(&self, whole: &GradientLayout) -> Result<NormOrder, TrainError> {
        let (config, mesh) = (&self.config, self.strategy.mesh);
        // Ranks of one stage have the same layout: a tensor group cuts everything into equal parts.
        let stages = mesh
            .members(self.rank, &[Axis::Pipeline])
            .into_iter()
            .map(|first| {
                let (_, layout) = held(config, &mesh, &part_of(config, &mesh, &self.plan, first))?;
                let sharding = self.strategy.sharding(&layout, first);
                Ok::<_, TrainError>((layout, sharding))
            });
        let stages = stages.collect::<Result<Vec<_>, _>>()?;
        let one_copy = one_copy(&self.model.all_params, mesh.sharded());
        // Ranks that differ along the other axis only count the same chunks.
        let mut axes = one_copy.clone();
        axes.retain(|axis| !mesh.sharded().contains(axis));
        let stage = |member| &stages[mesh.index(member, &[Axis::Pipeline])];
        let counted = mesh.members(self.rank, &axes).into_iter().map(|member| {
            let (layout, _) = stage(member);
            let counts = |id| is_counted(&layout.spec(id).roles, &one_copy, &mesh, member);
            layout.chunks_in(whole, counts)
        });
        let counted: Vec<_> = counted.collect();
        let chunks = mesh.members(self.rank, &one_copy).into_iter().map(|member| {
            let (_, sharding) = stage(member);
            NormOrder::chunks(sharding, member, &counted[mesh.index(member, &axes)])
        });
        Ok(NormOrder::new(&chunks.collect::<Vec<_>>()))
    }

    /// Connects to the other ranks. Every rank must call it.
    pub(crate) fn connect(&self, world: &World) -> Result<Groups, TrainError> {
        let mut set = ReplicaSet::of(&world.mesh, &self.model.params, &self.model.all_params)?;
        if self.strategy.reshard_policy(&self.config.parallel) != ReshardPolicy::KeepAll {
            set.gather_apart(&world.mesh)?;
        }
        Ok(Groups {
            set,
            blocks: BlockGroups::connect(
                &world.mesh,
                &world.compute,
                self.model.part.sequence,
                self.config.parallel.context_algorithm,
            )?,
            messages: stage_messages(world, &self.config, &self.model, &self.plan)?,
        })
    }

    /// Allocates parameters and gradients, in `home` if they are offloaded. `kept` is what this rank owned of the parameters
    /// in the generation before. Every rank must call it.
    pub(crate) fn allocate(
        &self,
        world: &World,
        Groups { set, .. }: &Groups,
        home: &Arc<StateMemory>,
        kept: Option<ArenaShare>,
    ) -> Result<(Parameters, Reducer), TrainError> {
        let (strategy, layout) = (&self.strategy, &self.layout);
        let (parallel, compute) = (&self.config.parallel, &world.compute);
        let sharding = Arc::new(strategy.sharding(layout, self.rank));
        let policy = strategy.reshard_policy(parallel);
        let home = self.offloads_parameters().then(|| home.clone());
        let memory = ParameterMemory {
            policy,
            home: home.clone(),
            kept,
        };
        let parameters = Parameters::new(set, compute, &self.model, &sharding, memory)?;
        let reduction = ReducerConfig {
            sync: parallel.sync,
            overlap: parallel.overlap,
            accumulate: strategy.accumulate.unwrap_or(Accumulate::Full),
            micro_batches: self.config.train.grad_accumulation,
            home,
        };
        let reducer = Reducer::over(set, compute, layout.clone(), &sharding, reduction)?;
        Ok((parameters, reducer))
    }

    /// The optimizer with the state of what this rank owns, in `home`. It has masters if the parameters are not f32 or not near
    /// the state. Every rank must call it.
    pub(crate) fn optimizer(
        &self,
        parameters: &Parameters,
        home: &Arc<StateMemory>,
    ) -> Result<Optimizer, TrainError> {
        let is_apart = home.place() == StatePlace::Host && !self.offloads_parameters();
        let needs_masters = Dtypes::of(&self.config).has_masters() || is_apart;
        let (set, sharding) = (parameters.replica_set(), parameters.sharding());
        let config = &self.config.train.optimizer;
        let optimizer = Optimizer::new(home.clone(), set, sharding, &self.model.params, config)?;
        Ok(if needs_masters {
            optimizer.with_masters(sharding)?
        } else {
            optimizer
        })
    }

    fn offloads_parameters(&self) -> bool {
        let target = self.config.train.offload.parameters;
        self.strategy.strategy == Strategy::Zero3 && target != OffloadTarget::None
    }

    /// The home of what is offloaded, of an idle world.
    pub(crate) fn planned_home(&self, world: &World) -> Arc<StateMemory> {
        let place = match self.config.train.offload.optimizer {
            OffloadTarget::None => StatePlace::Device,
            OffloadTarget::Host => StatePlace::Host,
            OffloadTarget::File => StatePlace::File,
        };
        Arc::new(StateMemory::planned(world.compute.device.clone(), place))
    }

    /// The rank in an idle world, with an arena of these bytes for activations.
    pub(crate) fn idle(&self, world: &World, activations: usize) -> Result<(Replica, Reducer), TrainError> {
        let groups = self.connect(world)?;
        let (parameters, reducer) = self.allocate(world, &groups, &self.planned_home(world), None)?;
        let replica = self.replica(world, groups, parameters, activations)?;
        Ok((replica, reducer))
    }

    /// The rank with its parameters, and an arena of these bytes for activations.
    pub(crate) fn replica(
        &self,
        world: &World,
        groups: Groups,
        parameters: Parameters,
        activations: usize,
    ) -> Result<Replica, TrainError> {
        let parts = ReplicaParts {
            model: self.model.clone(),
            parameters,
            plan: self.plan.clone(),
            activations,
            shape: micro_batch_shape(&self.config),
            routers: RouterTable::new(world, &self.config)?,
        };
        Replica::new(world, groups, parts)
    }

    /// Bytes of the arena in which the activations of all micro-batches in flight find a place.
    pub(crate) fn activations(&self) -> Result<usize, TrainError> {
        let mesh = self.strategy.mesh;
        // One after the other, micro-batches use the same memory. Else the last step of an epoch may be short.
        let is_piped = mesh.size(&[Axis::Pipeline]) > 1;
        let longest = if is_piped { self.plan.micro_batches() } else { 1 };
        // A few lengths are enough: what finds no place in the memory is put beside it.
        let steps = match self.config.data.last_batch {
            LastBatch::Wrap => BTreeSet::from([longest]),
            LastBatch::Short => BTreeSet::from([longest, (longest - 1).max(1), longest.div_ceil(2), 1]),
        };
        let world = idle_world(mesh, self.rank);
        let (mut replica, mut reducer) = self.idle(&world, 0)?;
        replica.pool = ActivationPool::planned(world.compute.device.clone(), isize::MAX as usize)?;
        for micro_batches in steps.into_iter().rev() {
            rehearse_step(&mut replica, &mut reducer, micro_batches, &|_| {})?;
            rehearse_evaluation(&mut replica, micro_batches)?;
        }
        Ok(replica.pool.extent())
    }
}

#[cfg(test)]
#[path = "rank_spec_tests.rs"]
mod tests;
