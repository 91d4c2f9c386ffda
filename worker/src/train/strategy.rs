//! What each strategy holds, as one choice of parameters, gradients and owners; the loop is the same for all.
//!
//! | strategy | parameters | gradients | optimizer |
//! |---|---|---|---|
//! | `ddp` | whole | whole, all-reduced | whole |
//! | `zero1` | whole, gathered after the update | whole, reduce-scattered | shard |
//! | `zero2` | whole, gathered after the update | shard, and parts of buckets in flight | shard |
//! | `zero3` | shard, and the groups gathered at the moment | shard, and groups in flight | shard |
//!
//! With `parallel.accumulate: full`, `zero2` and `zero3` hold whole gradients if there are several micro-batches.
//! With `parallel.shard_group`, all this is within a group of ranks, and slices are summed over the groups. Where a
//! group is one rank, everything is whole, and the strategy is `ddp` whatever it is called.

use std::sync::Arc;

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use super::world::World;
use crate::config::{Accumulate, OptimizerConfig, Parallel, Strategy, TrainConfig};
use crate::data::Vocabulary;
use crate::mesh::{Axis, DATA, MeshShape};
use crate::model::{self, Model};
use crate::optim::{Optimizer, ParamGroups, StateMemory};
use crate::parallel::{
    Dtypes, GradientLayout, LayoutConfig, Parameters, Reducer, ReducerConfig, ReplicaSet, ReshardPolicy,
    Sharding,
};

/// A strategy on a mesh: what is decided before anything is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scheme {
    /// [`Strategy::Ddp`] where nothing can be sharded.
    pub(super) strategy: Strategy,
    pub(super) mesh: MeshShape,
    /// What is held of the gradients of other ranks' parameters; none: these are reduced to all ranks.
    pub(super) accumulate: Option<Accumulate>,
}

impl Scheme {
    /// A pure function: every rank decides the same.
    pub(super) fn new(parallel: &Parallel, micro_batches: usize, mesh: MeshShape) -> Self {
        let strategy = match mesh.size(&[Axis::Shard]) {
            1 => Strategy::Ddp,
            _ => parallel.strategy,
        };
        let is_full = parallel.accumulate == Accumulate::Full && micro_batches > 1;
        Self {
            strategy,
            mesh,
            accumulate: match strategy {
                Strategy::Ddp => None,
                Strategy::Zero1 => Some(Accumulate::Full),
                Strategy::Zero2 | Strategy::Zero3 if is_full => Some(Accumulate::Full),
                Strategy::Zero2 | Strategy::Zero3 => Some(Accumulate::Sharded),
            },
        }
    }

    /// Ranks that read different samples.
    pub(super) fn data_ranks(&self) -> u64 {
        self.mesh.size(&DATA) as u64
    }

    /// Ranks that hold one copy of the state.
    pub(super) fn shard_ranks(&self) -> usize {
        self.mesh.size(&[Axis::Shard])
    }

    /// Copies of the state.
    pub(super) fn copies(&self) -> usize {
        self.mesh.size(&[Axis::Replicate])
    }

    /// The same with another answer to what lies between micro-batches, where a strategy has a choice.
    pub(super) fn accumulating(self, accumulate: Accumulate) -> Self {
        match self.strategy {
            Strategy::Ddp | Strategy::Zero1 => self,
            Strategy::Zero2 | Strategy::Zero3 => Self {
                accumulate: Some(accumulate),
                ..self
            },
        }
    }

    /// What stays gathered of the parameters.
    pub(super) fn reshard_policy(&self, parallel: &Parallel) -> ReshardPolicy {
        match self.strategy {
            Strategy::Ddp | Strategy::Zero1 | Strategy::Zero2 => ReshardPolicy::KeepAll,
            Strategy::Zero3 => ReshardPolicy::Release {
                after_forward: parallel.reshard_after_forward,
                persist_below: parallel.persist_below,
            },
        }
    }

    /// Who owns what, as a rank of its copy sees it.
    pub(super) fn sharding(&self, layout: &GradientLayout, rank: usize) -> Sharding {
        let shard = self.shard_ranks();
        match (self.strategy, self.accumulate) {
            (Strategy::Ddp, _) => Sharding::replicated(layout),
            (Strategy::Zero2, Some(Accumulate::Sharded)) => Sharding::of_parts(layout, shard, rank),
            (Strategy::Zero1 | Strategy::Zero2, _) => Sharding::of_buckets(layout, shard, rank),
            (Strategy::Zero3, _) => Sharding::of_groups(layout, shard, rank),
        }
    }
}

/// What is decided before anything is allocated.
pub(super) struct Blueprint {
    pub(super) model: Model,
    pub(super) layout: Arc<GradientLayout>,
    pub(super) scheme: Scheme,
    /// Bytes of the activations of a micro-batch.
    pub(super) activations: usize,
}

impl Blueprint {
    pub(super) fn of(config: &TrainConfig, env: &WorkerEnv) -> Result<Self, TrainError> {
        let dtypes = Dtypes::of(config);
        let model = network(config, dtypes)?;
        check_groups(&config.train.optimizer, &model)?;
        let mesh = MeshShape::new(&config.parallel, env)?;
        let layout = LayoutConfig::of(&config.parallel, mesh.size(&DATA)).with_dtypes(dtypes);
        Ok(Self {
            layout: Arc::new(GradientLayout::of_model(&model, &layout)?),
            scheme: Scheme::new(&config.parallel, config.train.grad_accumulation, mesh),
            activations: model::rehearse(&model, [config.train.micro_batch, config.model.block_size])?,
            model,
        })
    }
}

/// Refuses a parameter group that would be empty.
fn check_groups(config: &OptimizerConfig, model: &Model) -> Result<(), TrainError> {
    let Some(index) = ParamGroups::unmatched(config, &model.params) else {
        return Ok(());
    };
    Err(TrainError::ParamGroup {
        index,
        pattern: config.groups[index].params.clone(),
        params: model.params.len(),
        example: model.params[model.params.len() / 2].key.clone(),
    })
}

/// The model that the configuration describes.
pub(super) fn network(config: &TrainConfig, dtypes: Dtypes) -> Result<Model, TrainError> {
    let model = model::build(&config.model, Vocabulary::of(&config.data.tokenizer)?.size)?;
    Ok(model::recomputing(model, config.train.recompute).with_dtype(dtypes.params))
}

/// Allocates parameters and gradients. Every rank must call it.
pub(super) fn allocate(
    world: &World,
    config: &TrainConfig,
    scheme: &Scheme,
    model: &Model,
    layout: &Arc<GradientLayout>,
) -> Result<(Parameters, Reducer), TrainError> {
    let (parallel, compute) = (&config.parallel, (&world.device, world.stream));
    let set = ReplicaSet::of(&world.mesh, &model.params)?;
    let sharding = Arc::new(scheme.sharding(layout, world.mesh.index(&[Axis::Shard])));
    let policy = scheme.reshard_policy(parallel);
    let gathers = match policy {
        ReshardPolicy::KeepAll => set.reduce.clone(),
        // Apart from the gradients', so that gathering does not queue behind reducing.
        ReshardPolicy::Release { .. } => world.mesh.group_for(&[Axis::Shard], "parameters")?,
    };
    let parameters = Parameters::new((&set, &gathers), compute, model, &sharding, policy)?;
    let reduction = ReducerConfig {
        sync: parallel.sync,
        overlap: parallel.overlap,
        accumulate: scheme.accumulate.unwrap_or(Accumulate::Full),
        unused: parallel.unused,
    };
    let reducer = Reducer::over(&set, compute, layout.clone(), &sharding, reduction)?;
    Ok((parameters, reducer))
}

/// State of what this rank owns, in `home`; and masters, where the parameters are not f32 or not near the state. Every
/// rank must call it.
pub(super) fn optimizer(
    parameters: &Parameters,
    home: StateMemory,
    config: &TrainConfig,
    model: &Model,
) -> Result<Optimizer, TrainError> {
    let needs_masters = Dtypes::of(config).has_masters() || home.host_state().is_some();
    let owners = (&parameters.replica_set().owners, &**parameters.sharding());
    let optimizer = Optimizer::new(home, owners, &model.params, &config.train.optimizer)?;
    Ok(if needs_masters {
        optimizer.with_masters(owners.1)?
    } else {
        optimizer
    })
}
