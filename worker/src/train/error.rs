//! Why a worker cannot go on.

use ddp_proto::words::numbered;

use crate::checkpoint::CheckpointError;
use crate::collective::{CollectiveError, WorkError};
use crate::config::Problem;
use crate::data::DataError;
use crate::device::DeviceError;
use crate::metrics::RunFilesError;
use crate::parallel::{AgreementError, Difference, JoinError, LayoutError, ReduceError};
use crate::pretrained::PretrainedError;
use crate::session::StoreError;

/// Training failed on this rank.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The agent said that the launcher stopped the workers: another rank failed first.
    #[error(
        "rank {rank} stopped{}: the launcher stopped the workers: {cause}",
        activity.as_ref().map_or_else(String::new, |activity| format!(" ({activity})"))
    )]
    GenerationOver {
        /// This rank.
        rank: usize,
        /// Where in a step it was, if it has said so.
        activity: Option<String>,
        /// Why it is over, in the agent's words.
        cause: String,
    },
    /// Loss or gradient are no numbers any more.
    #[error(
        "{complaint} in step {step}{}: {seen}\n  hint: lower `train.optimizer.lr`, warm up longer, or set `train.grad_clip`{}",
        after(*skipped),
        if *skipped == 0 { "; `train.on_nonfinite: skip` skips such steps" } else { "" }
    )]
    NonFinite {
        /// What is not finite.
        complaint: String,
        /// The step, from 1.
        step: u64,
        /// Steps before it that were skipped, in a row.
        skipped: u64,
        /// The rank that saw it first, and where.
        seen: String,
    },
    /// The configuration asks for what the machine lacks, or what the run that is to be resumed does not allow, in words.
    #[error("{0}")]
    Refused(String),
    /// In a later generation, this node lacks a device that the job began with. In words.
    #[error("this node cannot train any more: {0}")]
    NodeUnfit(String),
    /// The last state of a run is lost, although training is done or was stopped in order.
    #[error(
        "training ended after step {step}, but the state after it could not be saved on {}, {}{}",
        numbered("rank", ranks),
        latest.as_ref().map_or_else(|| "and there is no earlier checkpoint".into(), |name| format!("the latest checkpoint is `{name}`")),
        cause.as_ref().map_or_else(String::new, |cause| format!(": {cause}"))
    )]
    NotSaved {
        /// Steps finished.
        step: u64,
        /// Name of the checkpoint before.
        latest: Option<String>,
        /// Ranks that failed.
        ranks: Vec<usize>,
        /// Why, if this rank is one of them.
        cause: Option<Box<CheckpointError>>,
    },
    /// A value of the configuration does not fit the others, or the ranks.
    #[error(transparent)]
    Config(#[from] Problem),
    /// The other ranks could not be joined.
    #[error(transparent)]
    Join(#[from] JoinError),
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
    Replicas(#[from] Difference),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The weights that the run is to begin with cannot be used.
    #[error(transparent)]
    Pretrained(#[from] PretrainedError),
    /// The folder of the run, or a file in it, cannot be used.
    #[error(transparent)]
    RunFiles(#[from] RunFilesError),
}

fn after(skipped: u64) -> String {
    match skipped {
        0 => String::new(),
        1 => ", after 1 skipped step".into(),
        steps => format!(", after {steps} skipped steps in a row"),
    }
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
    pub fn is_consequence(&self) -> bool {
        match self {
            Self::GenerationOver { .. }
            | Self::NotSaved { cause: None, .. }
            | Self::RunFiles(RunFilesError::RankZero(_))
            // Operations that waited for a collective.
            | Self::Device(DeviceError::Upstream(_))
            | Self::Reduce(ReduceError::Device(DeviceError::Upstream(_)) | ReduceError::Poisoned(_)) => true,
            Self::Agreement(AgreementError::Failed(failure)) => failure.is_consequence(),
            Self::RunFiles(RunFilesError::Store(source)) => matches!(source, StoreError::Superseded(_)),
            _ => self.collective().is_some_and(CollectiveError::is_consequence),
        }
    }

    /// The rank whose process ended, or whose connection broke, if that is why this rank failed.
    pub fn lost_rank(&self) -> Option<usize> {
        self.collective()?.lost_rank()
    }

    /// The collective that failed, if one did.
    fn collective(&self) -> Option<&CollectiveError> {
        match self {
            Self::Collective(error)
            | Self::Reduce(ReduceError::Collective(error))
            | Self::Join(JoinError::Collective(error)) => Some(error),
            _ => None,
        }
    }

    /// True if the cause lies in this rank alone, or was found here, so that the end of the generation does not explain
    /// it away.
    pub fn is_own(&self) -> bool {
        match self {
            Self::RunFiles(_) => !self.is_consequence(),
            _ if self.never_fits() => true,
            Self::Device(DeviceError::TooOld { .. } | DeviceError::NoInstructionSet { .. })
            | Self::NonFinite { .. }
            | Self::NotSaved { cause: Some(_), .. }
            | Self::Refused(_)
            | Self::NodeUnfit(_)
            | Self::Config(_)
            | Self::Layout(_)
            | Self::Data(_)
            | Self::Agreement(AgreementError::Differs(_))
            | Self::Replicas(_)
            | Self::Pretrained(_)
            | Self::Checkpoint(_) => true,
            _ => false,
        }
    }

    /// True of memory that the device would lack at every try.
    pub fn never_fits(&self) -> bool {
        let device = match self {
            Self::Device(error) | Self::Reduce(ReduceError::Device(error)) => Some(error),
            _ => self.collective().and_then(|error| error.failure.device()),
        };
        matches!(device, Some(DeviceError::OutOfMemory { never_fits: true, .. }))
    }

    /// True if every rank has met the same error at the same point, so that all can still work together.
    pub fn is_unanimous(&self) -> bool {
        match self {
            Self::NonFinite { .. } => true,
            Self::Replicas(difference) => difference.is_of_all(),
            _ => false,
        }
    }

    /// Message and hint apart, as the agent wants them.
    pub fn message_and_hint(&self) -> (String, Option<String>) {
        let text = self.to_string();
        match text.split_once("\n  hint: ") {
            Some((message, hint)) => (message.to_owned(), Some(hint.to_owned())),
            None => (text, None),
        }
    }
}
