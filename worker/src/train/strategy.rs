//! What each strategy holds, as one choice of weights, gradients and owners; the loop is the same for all.
//!
//! | strategy | parameters | gradients | optimizer |
//! |---|---|---|---|
//! | `ddp` | whole | whole, all-reduced | whole |
//! | `zero1` | whole, gathered after the update | whole, reduce-scattered | shard |
//! | `zero2` | whole, gathered after the update | shard, and buckets in flight | shard |
//! | `zero3` | shard, and the groups gathered at the moment | shard, and groups in flight | shard |
//!
//! With `parallel.accumulate: full`, `zero2` and `zero3` hold whole gradients if there are several micro-batches.

use std::sync::Arc;

use super::TrainError;
use super::world::{World, executor};
use crate::config::{Accumulate, Strategy, TrainConfig};
use crate::model::Model;
use crate::parallel::{
    Between, GatheredWeights, GradientLayout, Group, Reducer, ReducerConfig, Sharding, Weights, WholeWeights,
};

/// See the module.
pub(super) struct Held {
    pub(super) weights: Arc<dyn Weights>,
    pub(super) reducer: Reducer,
}

impl Held {
    /// Allocates parameters and gradients. Every rank must call it.
    pub(super) fn new(
        world: &World,
        config: &TrainConfig,
        model: &Model,
        layout: &Arc<GradientLayout>,
    ) -> Result<Self, TrainError> {
        let strategy = config.parallel.strategy;
        let sharding = Arc::new(match strategy {
            Strategy::Ddp => Sharding::replicated(layout),
            Strategy::Zero1 | Strategy::Zero2 => Sharding::of_buckets(layout, world.size(), world.rank()),
            Strategy::Zero3 => Sharding::of_groups(layout, world.size(), world.rank()),
        });
        Ok(Self {
            weights: weights(world, config, model, &sharding)?,
            reducer: reducer(world, config, layout, &sharding)?,
        })
    }
}

fn weights(
    world: &World,
    config: &TrainConfig,
    model: &Model,
    sharding: &Arc<Sharding>,
) -> Result<Arc<dyn Weights>, TrainError> {
    let mut group = Group {
        comm: world.comm.clone(),
        device: world.device.clone(),
        stream: world.stream,
    };
    if config.parallel.strategy != Strategy::Zero3 {
        return Ok(Arc::new(WholeWeights::new(&group, model, sharding)?));
    }
    // Apart from the gradients', so that gathering does not queue behind reducing.
    let all: Vec<usize> = (0..world.size()).collect();
    group.comm = world.comm.split("parameters", &all, executor(config))?;
    let reshard = config.parallel.reshard_after_forward;
    Ok(Arc::new(GatheredWeights::new(&group, model, sharding, reshard)?))
}

fn reducer(
    world: &World,
    config: &TrainConfig,
    layout: &Arc<GradientLayout>,
    sharding: &Arc<Sharding>,
) -> Result<Reducer, TrainError> {
    let (comm, layout) = (world.comm.clone(), layout.clone());
    let Some(between) = between(config) else {
        let sync = ReducerConfig {
            sync: config.parallel.sync,
            overlap: config.parallel.overlap,
        };
        return Ok(Reducer::new(comm, &world.device, layout, sync)?);
    };
    let compute = (&world.device, world.stream);
    let overlap = config.parallel.overlap;
    Ok(Reducer::sharded(
        comm, compute, layout, sharding, between, overlap,
    )?)
}

/// What is held of the gradients of other ranks' parameters; none: these are averaged too.
pub(super) fn between(config: &TrainConfig) -> Option<Between> {
    let full = config.parallel.accumulate == Accumulate::Full && config.train.grad_accumulation > 1;
    match config.parallel.strategy {
        Strategy::Ddp => None,
        Strategy::Zero1 => Some(Between::Full),
        Strategy::Zero2 | Strategy::Zero3 if full => Some(Between::Full),
        Strategy::Zero2 | Strategy::Zero3 => Some(Between::Shard),
    }
}
