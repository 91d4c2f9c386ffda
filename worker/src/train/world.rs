//! One rank among the others: its device, its stream, the communicator of the world, and its groups.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ddp_proto::env::WorkerEnv;

use super::TrainError;
use crate::collective::{Communicator, Executor, Transport};
use crate::config::TrainConfig;
use crate::costs::residual_rows;
use crate::device::Compute;
use crate::mesh::{Axis, Mesh, MeshShape};
use crate::model::{Model, zigzag};
use crate::parallel::pipeline::PipelinePlan;
use crate::parallel::{
    BlockGroups, JoinOptions, MessageShape, ReplicaSet, StageMessages, join_world_on, join_world_through,
};
use crate::session::{Cancel, Session};
use crate::timeline::{Kind, Mark};

/// Longest bound that a wait can have: what `parallel.timeout_s` is cut to.
const MAX_TIMEOUT: Duration = Duration::from_hours(7 * 24);

/// Comes between the communicators and the transport of host memory.
pub type WrapTransport = Arc<dyn Fn(Box<dyn Transport>) -> Box<dyn Transport> + Send + Sync>;

/// This rank's device, stream and communicators. Clones are the same rank.
#[derive(Clone)]
pub(crate) struct World {
    pub(crate) compute: Compute,
    /// All ranks.
    pub(super) comm: Communicator,
    /// Their groups.
    pub(crate) mesh: Arc<Mesh>,
    /// Set when the generation is over.
    pub(super) cancel: Cancel,
}

impl World {
    /// Finds the other ranks. Every rank of the generation must call it.
    pub(super) fn connect(
        config: &TrainConfig,
        session: &Session,
        compute: Compute,
        transport: Option<WrapTransport>,
        shape: MeshShape,
    ) -> Result<Self, TrainError> {
        let options = JoinOptions {
            executor: if config.parallel.overlap {
                Executor::Thread
            } else {
                Executor::Inline
            },
            threads: threads(config),
            timeout: timeout(config),
        };
        let comm = match transport {
            Some(wrap) => join_world_through(session, &options, |transport| wrap(transport))?,
            None => join_world_on(session, &compute.device, &options)?,
        };
        Ok(Self {
            mesh: Arc::new(Mesh::new(shape, comm.clone(), options.executor)),
            compute,
            comm,
            cancel: session.cancel(),
        })
    }

    pub(super) fn rank(&self) -> usize {
        self.comm.rank()
    }

    pub(super) fn size(&self) -> usize {
        self.comm.size()
    }

    /// The positions of each sample that this rank computes.
    pub(super) fn stretches(&self, positions: usize) -> Vec<Range<usize>> {
        let along = [Axis::Context];
        zigzag(positions, self.mesh.index(&along), self.mesh.size(&along))
    }

    /// When the host stops waiting for one collective that begins now.
    pub(super) fn deadline(&self) -> Instant {
        self.comm.deadline()
    }

    /// A span of the timeline begins at the end of the stream, if the timeline is open.
    pub(super) fn begin_span(&self) -> Option<Mark> {
        self.comm.timeline().mark(&self.compute)
    }

    /// It ends at what is the end of the stream now.
    pub(super) fn end_span(&self, began: Option<Mark>, kind: Kind, name: impl FnOnce() -> String) {
        if let Some(began) = began {
            self.comm.timeline().end(began, &self.compute, kind, name());
        }
    }

    /// An error once the generation is over. Called often enough that a rank that only computes notices soon.
    pub(super) fn check(&self) -> Result<(), TrainError> {
        match self.cancel.cause() {
            Some(cause) => Err(TrainError::GenerationOver {
                rank: self.comm.members()[self.rank()],
                activity: None,
                cause: cause.to_owned(),
            }),
            None => Ok(()),
        }
    }
}

/// True if the job was restarted before.
pub(super) fn is_restarted(env: &WorkerEnv) -> bool {
    env.restart_count > 0 || env.generation.get() > 1
}

/// `parallel.timeout_s`
pub(super) fn timeout(config: &TrainConfig) -> Duration {
    let asked = Duration::try_from_secs_f64(config.parallel.timeout_s).unwrap_or(MAX_TIMEOUT);
    asked.min(MAX_TIMEOUT)
}

/// Compute threads of a rank: `train.threads`, else `OMP_NUM_THREADS`, else 1.
pub(super) fn threads(config: &TrainConfig) -> usize {
    let from_env = || std::env::var("OMP_NUM_THREADS").ok()?.trim().parse().ok();
    config.train.threads.or_else(from_env).unwrap_or(1).max(1)
}

/// The groups of ranks that a rank talks to. All connect before memory is allocated: NCCL takes some of it.
pub(crate) struct Groups {
    pub(super) set: ReplicaSet,
    pub(super) blocks: BlockGroups,
    /// To the stages before and behind.
    pub(super) messages: StageMessages,
}

/// Between the stages of the pipeline. Every rank must call it.
pub(super) fn stage_messages(
    world: &World,
    config: &TrainConfig,
    model: &Model,
    plan: &PipelinePlan,
) -> Result<StageMessages, TrainError> {
    let shape = MessageShape {
        dimensions: vec![residual_rows(config), config.model.n_embd],
        dtype: model.dtype(),
    };
    let (mesh, compute) = (&world.mesh, &world.compute);
    Ok(StageMessages::connect(mesh, compute, plan.placement(), shape)?)
}
