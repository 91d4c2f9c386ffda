//! The groups of ranks that a rank talks to. All connect before memory is allocated: NCCL takes some of it.

use super::TrainError;
use super::world::World;
use crate::collective::Communicator;
use crate::config::TrainConfig;
use crate::mesh::Axis;
use crate::model::Model;
use crate::parallel::pipeline::PipelinePlan;
use crate::parallel::{EdgeQueues, ReplicaSet, TensorGroup};

/// What a rank talks over.
pub(super) struct Groups {
    pub(super) set: ReplicaSet,
    /// Gathers parameters.
    pub(super) gathers: Communicator,
    /// The ranks that compute each layer together with this one.
    pub(super) tensor: Option<TensorGroup>,
    /// To the stages before and behind.
    pub(super) edges: EdgeQueues,
}

/// Between the stages of the pipeline. Every rank must call it.
pub(super) fn edge_queues(
    world: &World,
    config: &TrainConfig,
    model: &Model,
    plan: &PipelinePlan,
) -> Result<EdgeQueues, TrainError> {
    let (samples, block_size) = (config.train.micro_batch, config.model.block_size);
    // Under sequence parallelism blocks hand on a rank's own rows.
    let handed_on = if model.part.sequence {
        vec![samples * block_size / model.part.tensor.1, config.model.n_embd]
    } else {
        vec![samples, block_size, config.model.n_embd]
    };
    Ok(EdgeQueues::connect(
        &world.mesh,
        (&world.device, world.stream),
        (plan.placement(), plan.capacity(), plan.actions()),
        (&handed_on, model.dtype()),
    )?)
}

/// This rank in its tensor group, or `None` if it is alone there. Every rank must call it.
pub(super) fn tensor_group(world: &World, is_sequence: bool) -> Result<Option<TensorGroup>, TrainError> {
    if world.mesh.size(&[Axis::Tensor]) == 1 {
        return Ok(None);
    }
    let comm = world.mesh.group_inline(&[Axis::Tensor], "tensor")?;
    let compute = (&world.device, world.stream);
    Ok(Some(TensorGroup::new(comm, compute, is_sequence)))
}
