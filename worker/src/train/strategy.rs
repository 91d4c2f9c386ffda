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
    Dtypes, GatherGroup, GatheredParameters, GradientLayout, LayoutConfig, Parameters, Reducer,
    ReducerConfig, ReplicaSet, ReshardPolicy, Sharding, WholeParameters,
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

/// Parameters, gradients and the ranks that they are shared with.
pub(super) struct Held {
    pub(super) parameters: Arc<dyn Parameters>,
    pub(super) reducer: Reducer,
    pub(super) replicas: ReplicaSet,
}

impl Held {
    /// Allocates parameters and gradients. Every rank must call it.
    pub(super) fn new(
        world: &World,
        config: &TrainConfig,
        scheme: &Scheme,
        model: &Model,
        layout: &Arc<GradientLayout>,
    ) -> Result<Self, TrainError> {
        let replicas = ReplicaSet::of(&world.mesh)?;
        let sharding = Arc::new(scheme.sharding(layout, world.mesh.index(&[Axis::Shard])));
        let allocation = Allocation {
            world,
            config,
            scheme,
            replicas: &replicas,
            sharding: &sharding,
        };
        Ok(Self {
            parameters: allocation.parameters(model)?,
            reducer: allocation.reducer(layout)?,
            replicas,
        })
    }

    /// State of what this rank owns, in `home`; and masters, where the parameters are not f32 or not near the state.
    /// Every rank must call it.
    pub(super) fn optimizer(
        &self,
        home: StateMemory,
        config: &TrainConfig,
        model: &Model,
    ) -> Result<Optimizer, TrainError> {
        let needs_masters = Dtypes::of(config).has_masters() || home.host_state().is_some();
        let owners = (self.replicas.reduce(), &**self.parameters.sharding());
        let optimizer = Optimizer::new(home, owners, &model.params, &config.train.optimizer)?;
        Ok(if needs_masters {
            optimizer.with_masters(owners.1)?
        } else {
            optimizer
        })
    }
}

struct Allocation<'a> {
    world: &'a World,
    config: &'a TrainConfig,
    scheme: &'a Scheme,
    replicas: &'a ReplicaSet,
    sharding: &'a Arc<Sharding>,
}

impl Allocation<'_> {
    fn parameters(&self, model: &Model) -> Result<Arc<dyn Parameters>, TrainError> {
        let mut group = GatherGroup {
            comm: self.replicas.reduce().clone(),
            device: self.world.device.clone(),
            stream: self.world.stream,
        };
        if self.scheme.strategy != Strategy::Zero3 {
            return Ok(Arc::new(WholeParameters::new(&group, model, self.sharding)?));
        }
        // Apart from the gradients', so that gathering does not queue behind reducing.
        group.comm = self.world.mesh.group_for(&[Axis::Shard], "parameters")?;
        let policy = ReshardPolicy {
            reshard: self.config.parallel.reshard_after_forward,
            persist_below: self.config.parallel.persist_below,
        };
        Ok(Arc::new(GatheredParameters::new(
            &group,
            model,
            self.sharding,
            policy,
        )?))
    }

    fn reducer(&self, layout: &Arc<GradientLayout>) -> Result<Reducer, TrainError> {
        let World { device, stream, .. } = self.world;
        let parallel = &self.config.parallel;
        let (layout, overlap) = (layout.clone(), parallel.overlap);
        let Some(accumulate) = self.scheme.accumulate else {
            let sync = ReducerConfig {
                sync: parallel.sync,
                overlap,
            };
            let reducer = Reducer::new(self.replicas.all(), device, layout, sync)?;
            return Ok(reducer.with_unused(parallel.unused));
        };
        let compute = (device, *stream);
        let reducer = Reducer::sharded(self.replicas, compute, layout, self.sharding, accumulate, overlap)?;
        Ok(reducer.with_unused(parallel.unused))
    }
}
