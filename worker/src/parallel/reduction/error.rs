//! Errors of the reducer name the parameter and its bucket.

use crate::collective::{CollectiveError, WorkError};
use crate::device::DeviceError;

/// Why gradients could not be reduced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReduceError {
    /// There is no such parameter.
    #[error("a gradient of parameter {id} was reported, but there are {count} parameters")]
    Unknown {
        /// Its index.
        id: usize,
        /// How many there are.
        count: usize,
    },
    /// Reported more often than the layout says.
    #[error("gradient of `{param}` (bucket {bucket}) was reported {times} times, expected {expected}")]
    Double {
        /// Name of the parameter.
        param: String,
        /// Its bucket.
        bucket: usize,
        /// How often it was reported.
        times: usize,
        /// How often it should be.
        expected: usize,
    },
    /// Not reported, or less often than the layout says.
    #[error(
        "gradient of `{param}` (bucket {bucket}) was reported {times} times, expected {expected}; {missing} gradients are missing in all\n  hint: every parameter must take part in every micro-batch"
    )]
    Missing {
        /// Name of the first missing parameter in layout order.
        param: String,
        /// Its bucket.
        bucket: usize,
        /// How often it was reported.
        times: usize,
        /// How often it should be.
        expected: usize,
        /// Number of parameters with a report missing.
        missing: usize,
    },
    /// A block did not use parameters that it lists.
    #[error(
        "rank {rank}: {unused}\n  hint: take them out of the model, or set `parallel.unused: zero` to train them with a gradient of zero from this rank"
    )]
    Unused {
        /// Rank in the group.
        rank: usize,
        /// Which, and of which block.
        unused: String,
    },
    /// Memory of a gradient was asked for after its last report: it may be on its way to other ranks.
    #[error("gradient of `{param}` (bucket {bucket}) was asked for after it was reported ready")]
    Late {
        /// Name of the parameter.
        param: String,
        /// Its bucket.
        bucket: usize,
    },
    /// A gradient was written while others that lie before it were still missing, and there is no memory for both.
    #[error(
        "gradients of {param} were begun before earlier ones were complete\n  hint: with sharded gradients, backward must finish them in the order of the layout"
    )]
    OutOfOrder {
        /// The unit that was begun.
        param: String,
    },
    /// All elements of a gradient were asked for where a rank has only those that it owns.
    #[error("gradient of `{param}` is sharded over the ranks, so no rank can read all of it")]
    Sharded {
        /// Name of the parameter.
        param: String,
    },
    /// An earlier step left the ranks in disagreement.
    #[error("the reducer cannot be used any more: {0}")]
    Poisoned(String),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

impl From<WorkError> for ReduceError {
    fn from(error: WorkError) -> Self {
        match error {
            WorkError::Failed(error) => Self::Collective(error),
            WorkError::Pending(error) => Self::Device(error),
        }
    }
}

impl From<ReduceError> for DeviceError {
    fn from(error: ReduceError) -> Self {
        match error {
            ReduceError::Device(error) => error,
            other => Self::Upstream(other.to_string()),
        }
    }
}
