//! Why a worker cannot go on.

use crate::checkpoint::CheckpointError;
use crate::collective::{CollectiveError, WorkError};
use crate::data::DataError;
use crate::device::DeviceError;
use crate::metrics::RunFilesError;
use crate::model::ModelError;
use crate::parallel::{AgreementError, JoinError, LayoutError, ReduceError, ReplicasError};
use crate::session::StoreError;

/// Training failed on this rank.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The agent said that the generation is over: another rank failed first.
    #[error("rank {rank} stopped: the generation is over: {cause}")]
    GenerationOver {
        /// This rank.
        rank: usize,
        /// Why it is over, in the agent's words.
        cause: String,
    },
    /// The loss is no number any more.
    #[error(
        "loss is {loss} on rank {rank} in step {step}\n  hint: lower `train.optimizer.lr`, warm up longer, or set `train.grad_clip`; the checkpoint before is whole"
    )]
    NonFiniteLoss {
        /// The first such rank.
        rank: usize,
        /// The step, from 1.
        step: u64,
        /// NaN or infinite.
        loss: f64,
    },
    /// The gradient is no number any more.
    #[error(
        "norm of the averaged gradient is {norm} in step {step}, although every rank's loss is finite\n  hint: lower `train.optimizer.lr` or warm up longer; the checkpoint before is whole"
    )]
    NonFiniteGradient {
        /// The step, from 1.
        step: u64,
        /// NaN or infinite.
        norm: f32,
    },
    /// The configuration contradicts the checkpoint that the run is to be resumed from.
    #[error(
        "cannot resume from `{checkpoint}`: `{key}` is {found}, the run was begun with {begun}\n  hint: set it back, or start another run with another `run.out_dir`"
    )]
    Contradiction {
        /// Folder of the checkpoint.
        checkpoint: String,
        /// The first differing key.
        key: String,
        /// Its value now.
        found: String,
        /// Its value in the checkpoint.
        begun: String,
    },
    /// The other ranks could not be joined.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// The `model` section describes no model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The gradients cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The tokens cannot be read.
    #[error(transparent)]
    Data(#[from] DataError),
    /// The ranks are about to do different things.
    #[error(transparent)]
    Agreement(#[from] AgreementError),
    /// Gradients could not be averaged.
    #[error(transparent)]
    Reduce(#[from] ReduceError),
    /// Parameters differ between ranks.
    #[error(transparent)]
    Replicas(#[from] ReplicasError),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The folder of the run, or a file in it, cannot be used.
    #[error(transparent)]
    RunFiles(#[from] RunFilesError),
}

impl From<WorkError> for TrainError {
    fn from(error: WorkError) -> Self {
        match error {
            WorkError::Failed(error) => Self::Collective(error),
            WorkError::Pending(error) => Self::Device(error),
        }
    }
}

impl TrainError {
    /// True if this rank failed only because another one did.
    #[must_use]
    pub fn is_consequence(&self) -> bool {
        match self {
            Self::GenerationOver { .. }
            | Self::RunFiles(RunFilesError::RankZero(_))
            // Operations that waited for a collective.
            | Self::Device(DeviceError::Upstream(_))
            | Self::Reduce(ReduceError::Device(DeviceError::Upstream(_)) | ReduceError::Poisoned(_))
            | Self::Replicas(ReplicasError::Device(DeviceError::Upstream(_))) => true,
            Self::Collective(error)
            | Self::Reduce(ReduceError::Collective(error))
            | Self::Replicas(ReplicasError::Collective(error))
            | Self::Join(JoinError::Collective(error)) => error.is_consequence(),
            Self::Agreement(AgreementError::Store { source, .. })
            | Self::RunFiles(RunFilesError::Store(source)) => matches!(source, StoreError::Superseded(_)),
            _ => false,
        }
    }

    /// True if the cause lies in this rank alone, so that the end of the generation does not explain it away.
    #[must_use]
    pub fn is_own(&self) -> bool {
        match self {
            Self::RunFiles(_) => !self.is_consequence(),
            Self::NonFiniteLoss { .. }
            | Self::NonFiniteGradient { .. }
            | Self::Contradiction { .. }
            | Self::Model(_)
            | Self::Layout(_)
            | Self::Data(_)
            | Self::Agreement(AgreementError::Differs(_))
            | Self::Checkpoint(_) => true,
            _ => false,
        }
    }

    /// Message and hint apart, as the agent wants them.
    #[must_use]
    pub fn message_and_hint(&self) -> (String, Option<String>) {
        let text = self.to_string();
        match text.split_once("\n  hint: ") {
            Some((message, hint)) => (message.to_owned(), Some(hint.to_owned())),
            None => (text, None),
        }
    }
}
