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
//! group is one rank, everything is whole, and the strategy is `ddp` whatever it is called.

use std::collections::BTreeSet;
use std::sync::Arc;

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use super::idle_world::idle_world;
use super::schedule::{MicroBatchShape, rehearse};
use super::world::World;
use crate::checkpoint::read_bounded;
use crate::config::{
    self, Accumulate, LastBatch, OptimizerConfig, OptimizerKind, Parallel, Problem, Strategy, TrainConfig,
};
use crate::data::Vocabulary;
use crate::mesh::{Axis, DATA, MeshShape};
use crate::model::{self, Model, ModelPart};
use crate::optim::{Optimizer, ParamGroups, StateMemory};
use crate::parallel::pipeline::{LayerCosts, PipelinePlan, csv};
use crate::parallel::{
    Dtypes, GradientLayout, LayoutConfig, NormOrder, ONE_COPY, Parameters, Reducer, ReducerConfig,
    ReplicaSet, ReshardPolicy, Sharding, is_counted,
};
use crate::plan::Work;

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
        // In a pipeline a chunk may be done with all micro-batches before another one is with the first.
        let is_full = (parallel.accumulate == Accumulate::Full && micro_batches > 1)
            || mesh.size(&[Axis::Pipeline]) > 1;
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
    /// What this rank holds of it.
    pub(super) model: Model,
    pub(super) layout: Arc<GradientLayout>,
    /// That of a rank with the blocks of all stages.
    pub(super) whole: Arc<GradientLayout>,
    pub(super) scheme: Scheme,
    pub(super) plan: Arc<PipelinePlan>,
    /// Bytes of the activations of all micro-batches that are in the air at once.
    pub(super) activations: usize,
}

impl Blueprint {
    pub(super) fn of(config: &TrainConfig, env: &WorkerEnv) -> Result<Self, TrainError> {
        let mesh = mesh(config, env)?;
        let (plan, rank) = (Arc::new(pipeline_plan(config)?), env.rank.get() as usize);
        let part = part_of(config, &mesh, &plan, rank);
        let (model, layout) = held(config, &mesh, &part)?;
        let layout = Arc::new(layout);
        let whole = match &part.chunks {
            None => layout.clone(),
            Some(_) => Arc::new(held(config, &mesh, &ModelPart { chunks: None, ..part })?.1),
        };
        Ok(Self {
            whole,
            layout,
            scheme: Scheme::new(&config.parallel, config.train.grad_accumulation, mesh),
            activations: activations(config, &model, &plan, (mesh, rank))?,
            plan,
            model,
        })
    }

    /// In which order the norm of `rank` is summed, over the ranks that hold one copy of the model with it. A pure
    /// function: it lays out what each of them holds.
    pub(super) fn norm_order(&self, config: &TrainConfig, rank: usize) -> Result<NormOrder, TrainError> {
        let mesh = self.scheme.mesh;
        // Ranks of one stage have the same layout: a tensor group cuts everything into equal parts.
        let stages = mesh.members(rank, &[Axis::Pipeline]).into_iter().map(|first| {
            let (_, layout) = held(config, &mesh, &part_of(config, &mesh, &self.plan, first))?;
            let sharding = self.scheme.sharding(&layout, 0);
            Ok::<_, TrainError>((layout, sharding))
        });
        let stages = stages.collect::<Result<Vec<_>, _>>()?;
        let chunks = mesh.members(rank, &ONE_COPY).into_iter().map(|member| {
            let at = |axis| mesh.index(member, &[axis]);
            let (layout, sharding) = &stages[at(Axis::Pipeline)];
            let counts = |id| is_counted(&layout.spec(id).roles, at);
            NormOrder::chunks((layout, sharding), at(Axis::Shard), &self.whole, counts)
        });
        Ok(NormOrder::new(&chunks.collect::<Vec<_>>()))
    }
}

/// The mesh of a job, if the optimizer can work on it.
pub(super) fn mesh(config: &TrainConfig, env: &WorkerEnv) -> Result<MeshShape, TrainError> {
    let mesh = MeshShape::new(&config.parallel, env).map_err(TrainError::Mesh)?;
    check_whole_matrices(&config.train.optimizer, &mesh)?;
    model::check_rows(config).map_err(TrainError::Mesh)?;
    Ok(mesh)
}

/// Bytes of the activations of all micro-batches that are in the air at once on a rank, which holds `model`.
pub(super) fn activations(
    config: &TrainConfig,
    model: &Model,
    plan: &Arc<PipelinePlan>,
    (mesh, rank): (MeshShape, usize),
) -> Result<usize, TrainError> {
    // One after the other, micro-batches use the same memory. Else the last step of an epoch may be short.
    let is_piped = mesh.size(&[Axis::Pipeline]) > 1;
    let longest = if is_piped { plan.micro_batches() } else { 1 };
    // A few lengths are enough: what finds no place in the memory is put beside it.
    let steps = match config.data.last_batch {
        LastBatch::Wrap => BTreeSet::from([longest]),
        LastBatch::Short => BTreeSet::from([longest, (longest - 1).max(1), longest.div_ceil(2), 1]),
    };
    let steps = steps.into_iter().rev();
    let idle = idle_world(mesh, rank).mesh;
    rehearse(model, plan, &idle, MicroBatchShape::of(config), steps)
}

/// A part of the model, and the layout of its gradients.
pub(super) fn held(
    config: &TrainConfig,
    mesh: &MeshShape,
    part: &ModelPart,
) -> Result<(Model, GradientLayout), TrainError> {
    let dtypes = Dtypes::of(config);
    let model = network(config, dtypes, part)?;
    check_groups(&config.train.optimizer, &model)?;
    let layout = LayoutConfig::of(&config.parallel, mesh.size(&DATA)).with_dtypes(dtypes);
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

/// Arithmetic of a token in a layer, and in the head.
pub(super) fn layer_work(config: &TrainConfig) -> Result<[Work; 2], TrainError> {
    let vocabulary = match config.model.vocab_size {
        Some(size) => size,
        None => Vocabulary::of(&config.data.tokenizer)?.size,
    };
    let arithmetic = |n_layer, vocabulary: usize| {
        let model = config::Model {
            n_layer,
            ..config.model.clone()
        };
        Work::of(&model, vocabulary as u64, config.train.recompute)
    };
    Ok([arithmetic(1, 0), arithmetic(0, vocabulary)])
}

/// The schedule of every rank, and the layers of every stage.
pub fn pipeline_plan(config: &TrainConfig) -> Result<PipelinePlan, TrainError> {
    let pipeline = &config.parallel.pipeline;
    let [layer, head] = layer_work(config)?;
    let costs = LayerCosts {
        // Rows are looked up.
        embedding: 0,
        layers: vec![layer.total(); config.model.n_layer],
        head: head.total(),
    };
    let csv = pipeline.file.as_deref().map(|path| {
        let read = read_bounded(path, csv::MAX_BYTES).map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        read.map_err(|error| {
            TrainError::Refused(format!(
                "`parallel.pipeline.file`: `{}`: {error}\n  hint: expected a schedule as PyTorch's pipelining writes it, one row per rank",
                path.display()
            ))
        })
    });
    let micro_batches = config.train.grad_accumulation;
    Ok(PipelinePlan::new(
        pipeline,
        micro_batches,
        csv.transpose()?.as_deref(),
        &costs,
    )?)
}

/// What a rank holds of the model: a pure function, so that every rank knows it of all others.
pub(super) fn part_of(config: &TrainConfig, mesh: &MeshShape, plan: &PipelinePlan, rank: usize) -> ModelPart {
    let tensor = mesh.size(&[Axis::Tensor]);
    let is_piped = mesh.size(&[Axis::Pipeline]) > 1;
    ModelPart {
        tensor: (mesh.index(rank, &[Axis::Tensor]), tensor),
        sequence: config.parallel.sequence && tensor > 1,
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
pub(super) fn network(config: &TrainConfig, dtypes: Dtypes, part: &ModelPart) -> Result<Model, TrainError> {
    let vocabulary = Vocabulary::of(&config.data.tokenizer)?.size;
    let model = model::build_part(&config.model, vocabulary, part)?;
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
        micro_batches: config.train.grad_accumulation,
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
    let owners = (&parameters.replica_set().reduce, &**parameters.sharding());
    let optimizer = Optimizer::new(home, owners, &model.params, &config.train.optimizer)?;
    Ok(if needs_masters {
        optimizer.with_masters(owners.1)?
    } else {
        optimizer
    })
}

#[cfg(test)]
mod tests {
    use ddp_proto::ids::WorldSize;

    use super::*;
    use crate::config::Pipeline;

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
        let scheme = |strategy, stages| {
            let parallel = Parallel {
                strategy,
                accumulate: Accumulate::Sharded,
                pipeline: Pipeline {
                    stages,
                    ..Pipeline::default()
                },
                ..Parallel::default()
            };
            Scheme::new(&parallel, 1, mesh(&parallel, 4)).accumulate
        };
        for strategy in [Strategy::Zero2, Strategy::Zero3] {
            assert_eq!(scheme(strategy, 1), Some(Accumulate::Sharded));
            assert_eq!(scheme(strategy, 2), Some(Accumulate::Full));
        }
        assert_eq!(scheme(Strategy::Ddp, 2), None);
    }
}
