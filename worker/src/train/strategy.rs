//! What each strategy holds, as one choice of parameters, gradients and owners; the loop is the same for all.
//!
//! | strategy | parameters | gradients | optimizer |
//! |---|---|---|---|
//! | `ddp` | whole | whole, all-reduced | whole |
//! | `zero1` | whole, gathered after the update | whole, reduce-scattered | shard |
//! | `zero2` | whole, gathered after the update | shard, and parts of buckets in flight | shard |
//! | `zero3` | shard, and the groups gathered at the moment | shard, and groups in flight | shard |
//!
//! With `parallel.accumulate: full`, `zero2` and `zero3` hold whole gradients if there are several micro-batches; a stage
//! of a pipeline holds them anyway, and reduces them once a step.
//! With `parallel.shard_group`, all this is within a group of ranks, and slices are summed over the groups. Where a
//! group is one rank, everything is whole, and the strategy is `ddp` whatever it is called, unless parameters are offloaded:
//! they come in by groups on one rank too.

use std::ops::Range;

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use crate::config::{
    self, Accumulate, Offload, OffloadTarget, OptimizerConfig, OptimizerKind, Parallel, Problem, Strategy,
    TrainConfig,
};
use crate::costs::Work;
use crate::mesh::{Axis, GRADIENTS, MeshShape};
use crate::model::{self, Model, ModelPart};
use crate::optim::ParamGroups;
use crate::parallel::pipeline::{LayerCosts, PipelinePlan};
use crate::parallel::{Dtypes, GradientLayout, LayoutConfig, ReshardPolicy, Sharding};

/// The strategy of `parallel.strategy` on a mesh: what is sharded, over which ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShardingStrategy {
    /// [`Strategy::Ddp`] where nothing can be sharded.
    pub(crate) strategy: Strategy,
    pub(crate) mesh: MeshShape,
    /// What is held of the gradients of other ranks' parameters. With `None` all ranks get all sums, and with `ddp` and
    /// `Sharded`, in every micro-batch.
    pub(crate) accumulate: Option<Accumulate>,
}

impl ShardingStrategy {
    /// A pure function, so that every rank decides the same.
    pub(crate) fn new(parallel: &Parallel, offload: &Offload, micro_batches: usize, mesh: MeshShape) -> Self {
        let strategy = match (mesh.size(mesh.sharded()), offload.parameters) {
            (1, OffloadTarget::None) => Strategy::Ddp,
            _ => parallel.strategy,
        };
        // In a pipeline a chunk may be done with all micro-batches before another one is with the first.
        let is_pipeline = mesh.size(&[Axis::Pipeline]) > 1;
        let is_full = (parallel.accumulate == Accumulate::Full && micro_batches > 1) || is_pipeline;
        let syncs_each = parallel.sync_each_batch && micro_batches > 1 && !is_pipeline;
        Self {
            strategy,
            mesh,
            accumulate: match strategy {
                Strategy::Ddp => syncs_each.then_some(Accumulate::Sharded),
                Strategy::Zero1 => Some(Accumulate::Full),
                Strategy::Zero2 | Strategy::Zero3 if is_full => Some(Accumulate::Full),
                Strategy::Zero2 | Strategy::Zero3 => Some(Accumulate::Sharded),
            },
        }
    }

    /// Ranks that hold one copy of the state.
    pub(crate) fn shard_ranks(&self) -> usize {
        self.mesh.size(self.mesh.sharded())
    }

    /// What stays gathered of the parameters.
    pub(crate) fn reshard_policy(&self, parallel: &Parallel) -> ReshardPolicy {
        match self.strategy {
            Strategy::Ddp | Strategy::Zero1 | Strategy::Zero2 => ReshardPolicy::KeepAll,
            Strategy::Zero3 => ReshardPolicy::Release {
                after_forward: parallel.reshard_after_forward,
                persist_below: parallel.persist_below,
            },
        }
    }

    /// Which rank owns what, for a rank of the mesh.
    pub(crate) fn sharding(&self, layout: &GradientLayout, rank: usize) -> Sharding {
        let mesh = self.mesh;
        match (self.strategy, self.accumulate) {
            (Strategy::Ddp, None) => Sharding::replicated(layout),
            (Strategy::Zero2, Some(Accumulate::Sharded)) => Sharding::of_parts(layout, mesh, rank),
            (Strategy::Ddp | Strategy::Zero1 | Strategy::Zero2, _) => {
                Sharding::of_buckets(layout, mesh, rank)
            }
            (Strategy::Zero3, _) => Sharding::of_groups(layout, mesh, rank),
        }
    }
}

/// The mesh of a job, if the optimizer can work on it.
pub(crate) fn mesh(config: &TrainConfig, env: &WorkerEnv) -> Result<MeshShape, TrainError> {
    let mesh = MeshShape::new(&config.parallel, env)?;
    check_whole_matrices(&config.train.optimizer, &mesh)?;
    config::check_rows(config)?;
    Ok(mesh)
}

/// A part of the model, and the layout of its gradients.
pub(crate) fn held(
    config: &TrainConfig,
    mesh: &MeshShape,
    part: &ModelPart,
) -> Result<(Model, GradientLayout), TrainError> {
    let dtypes = Dtypes::of(config);
    let model = network(config, dtypes, part)?;
    check_groups(&config.train.optimizer, &model)?;
    let layout = LayoutConfig::of(&config.parallel, mesh.size(&GRADIENTS)).with_dtypes(dtypes);
    let layout = GradientLayout::of_model(&model, &layout)?;
    Ok((model, layout))
}

/// Refuses an optimizer of whole matrices where no rank of a shard group has one.
fn check_whole_matrices(config: &OptimizerConfig, mesh: &MeshShape) -> Result<(), TrainError> {
    let tensor = mesh.size(&[Axis::Tensor]);
    if config.kind != OptimizerKind::Muon || tensor == 1 {
        return Ok(());
    }
    Err(TrainError::Refused(format!(
        "`train.optimizer.kind: muon` makes whole matrices orthogonal, but with `parallel.tensor: {tensor}` each rank has only a part of each matrix\n  hint: set `parallel.tensor: 1` and split the model with `parallel.strategy: zero3` or `parallel.pipeline.stages`, or use a different optimizer"
    )))
}

/// Arithmetic of a token in some layers.
pub(crate) fn layer_work(config: &TrainConfig, layers: Range<usize>) -> Work {
    Work::of(&config.model, layers, 0, config.train.recompute)
}

/// Arithmetic of a token in the head, of which nothing is repeated.
pub(crate) fn head_work(config: &TrainConfig) -> u64 {
    let vocabulary = config.model.vocab_size.unwrap_or(config.vocabulary.size);
    Work::of(&config.model, 0..0, vocabulary as u64, config.train.recompute).model
}

/// Arithmetic of a token.
pub(crate) fn work(config: &TrainConfig) -> Work {
    let layers = layer_work(config, 0..config.model.n_layer);
    Work {
        model: layers.model + head_work(config),
        ..layers
    }
}

/// The schedule of every rank, and the layers of every stage.
pub fn pipeline_plan(config: &TrainConfig) -> Result<PipelinePlan, TrainError> {
    let layer = |layer| layer_work(config, layer..layer + 1).total();
    let costs = LayerCosts {
        // Rows are looked up.
        embedding: 0,
        layers: (0..config.model.n_layer).map(layer).collect(),
        head: head_work(config),
    };
    Ok(PipelinePlan::new(
        &config.parallel.pipeline,
        config.train.grad_accumulation,
        &costs,
    )?)
}

/// What a rank holds of the model: a pure function, so that every rank knows it of all others.
pub(crate) fn part_of(config: &TrainConfig, mesh: &MeshShape, plan: &PipelinePlan, rank: usize) -> ModelPart {
    let tensor = mesh.size(&[Axis::Tensor]);
    let is_piped = mesh.size(&[Axis::Pipeline]) > 1;
    ModelPart {
        tensor: (mesh.index(rank, &[Axis::Tensor]), tensor),
        sequence: config.parallel.sequence && tensor > 1,
        experts: (
            mesh.index(rank, mesh.expert_axes()),
            mesh.size(mesh.expert_axes()),
        ),
        chunks: is_piped.then(|| plan.chunks_of(mesh.index(rank, &[Axis::Pipeline]))),
    }
}

/// Refuses a parameter group that would be empty.
fn check_groups(config: &OptimizerConfig, model: &Model) -> Result<(), TrainError> {
    let Some(index) = ParamGroups::unmatched(config, &model.all_params) else {
        return Ok(());
    };
    let (key, params) = (
        format!("train.optimizer.groups[{index}].params"),
        &model.all_params,
    );
    let pattern = &config.groups[index].params;
    let what = format!(
        "`{key}` is `{pattern}`, which matches none of the {} parameters",
        params.len()
    );
    let example = &params[params.len() / 2].key;
    let hint = format!("`*` matches any characters; a parameter name looks like `{example}`");
    Err(Problem::new(key, what).with_hint(hint).into())
}

/// A part of the model that the configuration describes.
pub(crate) fn network(config: &TrainConfig, dtypes: Dtypes, part: &ModelPart) -> Result<Model, TrainError> {
    let model = model::build_part(&config.model, config.vocabulary.size, part)?;
    Ok(Model {
        recompute: config.train.recompute,
        ..model.with_dtype(dtypes.params)
    })
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::config::{Pipeline, Train};

    fn mesh(parallel: &Parallel, ranks: u32) -> MeshShape {
        let env = WorkerEnv {
            world_size: WorldSize(ranks),
            local_world_size: ranks,
            ..WorkerEnv::single()
        };
        MeshShape::new(parallel, &env).unwrap()
    }

    #[test]
    fn a_stage_of_a_pipeline_holds_whole_gradients() {
        let accumulate = |strategy, stages| {
            let parallel = Parallel {
                strategy,
                accumulate: Accumulate::Sharded,
                pipeline: Pipeline {
                    stages,
                    ..Pipeline::default()
                },
                ..Parallel::default()
            };
            ShardingStrategy::new(&parallel, &Train::default().offload, 1, mesh(&parallel, 4)).accumulate
        };
        for strategy in [Strategy::Zero2, Strategy::Zero3] {
            assert_eq!(accumulate(strategy, 1), Some(Accumulate::Sharded));
            assert_eq!(accumulate(strategy, 2), Some(Accumulate::Full));
        }
        assert_eq!(accumulate(Strategy::Ddp, 2), None);
    }
}
