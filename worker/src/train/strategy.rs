//! What each strategy holds, as one choice of weights, gradients and owners; the loop is the same for all.
//!
//! | strategy | parameters | gradients | optimizer |
//! |---|---|---|---|
//! | `ddp` | whole | whole, all-reduced | whole |
//! | `zero1` | whole, gathered after the update | whole, reduce-scattered | shard |
//! | `zero2` | whole, gathered after the update | shard, and parts of buckets in flight | shard |
//! | `zero3` | shard, and the groups gathered at the moment | shard, and groups in flight | shard |
//!
//! With `parallel.accumulate: full`, `zero2` and `zero3` hold whole gradients if there are several micro-batches.
//! With `parallel.shard_group`, all this is within a group of ranks, and slices are averaged over the groups. Where a
//! group is one rank, everything is whole, and the strategy is `ddp` whatever it is called.

use std::sync::Arc;

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use super::world::{World, executor};
use crate::config::{Accumulate, Parallel, ShardGroup, Strategy, TrainConfig};
use crate::model::Model;
use crate::parallel::{
    Between, GatheredWeights, GradientLayout, Group, Reducer, ReducerConfig, Residence, ShardGroups,
    Sharding, Weights, WholeWeights,
};

/// A strategy on a world of some size: what is decided before anything is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Scheme {
    /// [`Strategy::Ddp`] where nothing can be sharded.
    pub(super) strategy: Strategy,
    /// Ranks that hold one copy of the state.
    pub(super) shard_ranks: usize,
    /// Copies of the state.
    pub(super) copies: usize,
    /// What is held of the gradients of other ranks' parameters; none: these are averaged too.
    pub(super) between: Option<Between>,
}

impl Scheme {
    /// A pure function: every rank decides the same.
    pub(super) fn new(
        parallel: &Parallel,
        micro_batches: usize,
        env: &WorkerEnv,
    ) -> Result<Self, TrainError> {
        let world = env.world_size.get() as usize;
        let refuse = |found: String, why: String| Err(TrainError::ShardGroup { found, why });
        let shard_ranks = match parallel.shard_group {
            None => world,
            Some(ShardGroup::Node) => {
                let local = env.local_world_size as usize;
                if local * env.node_count as usize != world {
                    let why = format!(
                        "the {world} ranks are not spread evenly over {} nodes: this one has {local}",
                        env.node_count
                    );
                    return refuse("node".into(), why);
                }
                local
            }
            Some(ShardGroup::Ranks(ranks)) if ranks == 0 || !world.is_multiple_of(ranks) => {
                return refuse(
                    ranks.to_string(),
                    format!("{world} ranks are not groups of {ranks}"),
                );
            }
            Some(ShardGroup::Ranks(ranks)) => ranks,
        };
        let (strategy, shard_ranks) = match (parallel.strategy, shard_ranks) {
            (Strategy::Ddp, _) | (_, 1) => (Strategy::Ddp, 1),
            sharded => sharded,
        };
        let is_full = parallel.accumulate == Accumulate::Full && micro_batches > 1;
        Ok(Self {
            strategy,
            shard_ranks,
            copies: world / shard_ranks,
            between: match strategy {
                Strategy::Ddp => None,
                Strategy::Zero1 => Some(Between::Full),
                Strategy::Zero2 | Strategy::Zero3 if is_full => Some(Between::Full),
                Strategy::Zero2 | Strategy::Zero3 => Some(Between::Shard),
            },
        })
    }

    /// The same with another answer to what lies between micro-batches, where a strategy has a choice.
    pub(super) fn accumulating(self, accumulate: Accumulate) -> Self {
        let between = match accumulate {
            Accumulate::Full => Between::Full,
            Accumulate::Sharded => Between::Shard,
        };
        match self.strategy {
            Strategy::Ddp | Strategy::Zero1 => self,
            Strategy::Zero2 | Strategy::Zero3 => Self {
                between: Some(between),
                ..self
            },
        }
    }

    /// Who owns what, as a rank of its copy sees it.
    pub(super) fn sharding(&self, layout: &GradientLayout, rank: usize) -> Sharding {
        match (self.strategy, self.between) {
            (Strategy::Ddp, _) => Sharding::replicated(layout),
            (Strategy::Zero2, Some(Between::Shard)) => Sharding::of_parts(layout, self.shard_ranks, rank),
            (Strategy::Zero1 | Strategy::Zero2, _) => Sharding::of_buckets(layout, self.shard_ranks, rank),
            (Strategy::Zero3, _) => Sharding::of_groups(layout, self.shard_ranks, rank),
        }
    }
}

/// See the module.
pub(super) struct Held {
    pub(super) weights: Arc<dyn Weights>,
    pub(super) reducer: Reducer,
    pub(super) groups: ShardGroups,
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
        let groups = match scheme.strategy {
            Strategy::Ddp => ShardGroups::one(world.comm.clone()),
            _ => ShardGroups::of(&world.comm, scheme.shard_ranks, executor(config))?,
        };
        let sharding = Arc::new(scheme.sharding(layout, groups.shard().rank()));
        let allocation = Allocation {
            world,
            config,
            scheme,
            groups: &groups,
            sharding: &sharding,
        };
        Ok(Self {
            weights: allocation.weights(model)?,
            reducer: allocation.reducer(layout)?,
            groups,
        })
    }
}

struct Allocation<'a> {
    world: &'a World,
    config: &'a TrainConfig,
    scheme: &'a Scheme,
    groups: &'a ShardGroups,
    sharding: &'a Arc<Sharding>,
}

impl Allocation<'_> {
    fn weights(&self, model: &Model) -> Result<Arc<dyn Weights>, TrainError> {
        let mut group = Group {
            comm: self.groups.shard().clone(),
            device: self.world.device.clone(),
            stream: self.world.stream,
        };
        if self.scheme.strategy != Strategy::Zero3 {
            return Ok(Arc::new(WholeWeights::new(&group, model, self.sharding)?));
        }
        // Apart from the gradients', so that gathering does not queue behind reducing.
        let all: Vec<usize> = (0..group.comm.size()).collect();
        group.comm = group.comm.split("parameters", &all, executor(self.config))?;
        let residence = Residence {
            reshard: self.config.parallel.reshard_after_forward,
            persist_below: self.config.parallel.persist_below,
        };
        Ok(Arc::new(GatheredWeights::new(
            &group,
            model,
            self.sharding,
            residence,
        )?))
    }

    fn reducer(&self, layout: &Arc<GradientLayout>) -> Result<Reducer, TrainError> {
        let World {
            comm, device, stream, ..
        } = self.world;
        let parallel = &self.config.parallel;
        let (layout, overlap) = (layout.clone(), parallel.overlap);
        let Some(between) = self.scheme.between else {
            let sync = ReducerConfig {
                sync: parallel.sync,
                overlap,
            };
            let reducer = Reducer::new(comm, device, layout, sync)?;
            return Ok(reducer.with_unused(parallel.unused));
        };
        let compute = (device, *stream);
        let reducer = Reducer::sharded(self.groups, compute, layout, self.sharding, between, overlap)?;
        Ok(reducer.with_unused(parallel.unused))
    }
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::WorldSize;

    use super::*;

    /// Ranks of a group and copies, for so many nodes of so many ranks.
    fn scheme(
        group: Option<ShardGroup>,
        nodes: u32,
        ranks: u32,
        world: u32,
    ) -> Result<(usize, usize), String> {
        let parallel = Parallel {
            strategy: Strategy::Zero2,
            shard_group: group,
            ..Parallel::default()
        };
        let mut env = WorkerEnv::single();
        env.world_size = WorldSize(world);
        env.node_count = nodes;
        env.local_world_size = ranks;
        let scheme = Scheme::new(&parallel, 1, &env).map_err(|error| error.to_string())?;
        Ok((scheme.shard_ranks, scheme.copies))
    }

    #[test]
    fn groups_are_all_ranks_or_a_node_or_as_many_as_asked_for() {
        assert_eq!(scheme(None, 2, 3, 6), Ok((6, 1)));
        assert_eq!(scheme(Some(ShardGroup::Node), 2, 3, 6), Ok((3, 2)));
        assert_eq!(scheme(Some(ShardGroup::Ranks(2)), 2, 3, 6), Ok((2, 3)));
    }

    #[test]
    fn groups_that_do_not_fit_are_refused() {
        insta::assert_snapshot!(scheme(Some(ShardGroup::Ranks(4)), 2, 3, 6).unwrap_err(), @r"
        `parallel.shard_group` is 4, but 6 ranks are not groups of 4
          hint: all groups must have the same number of ranks; change `--nproc-per-node` or `parallel.shard_group`
        ");
        insta::assert_snapshot!(scheme(Some(ShardGroup::Node), 2, 2, 3).unwrap_err(), @r"
        `parallel.shard_group` is node, but the 3 ranks are not spread evenly over 2 nodes: this one has 2
          hint: all groups must have the same number of ranks; change `--nproc-per-node` or `parallel.shard_group`
        ");
    }
}
