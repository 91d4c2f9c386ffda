//! Errors of collectives. Each names the rank, the operation with its sequence number and size, and its purpose.

use std::fmt;

use ddp_proto::words::numbered;

use crate::device::DeviceError;

/// A collective operation failed on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveError {
    /// Global rank of this process.
    pub rank: usize,
    /// Which one: the operation, its number in its communicator, what it is for and its bytes.
    pub operation: String,
    /// What happened.
    pub failure: Failure,
}

/// ``all-reduce #3 of `world` (bucket 3, 4096 bytes)``: an operation, its number in its communicator from 0, what it is for,
/// and the size of its buffer, if it has one.
pub(crate) fn name(
    operation: impl fmt::Display,
    sequence: u64,
    communicator: &str,
    tag: &str,
    bytes: usize,
) -> String {
    match bytes {
        0 => format!("{operation} #{sequence} of `{communicator}` ({tag})"),
        _ => format!("{operation} #{sequence} of `{communicator}` ({tag}, {bytes} bytes)"),
    }
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            operation,
            failure,
        } = self;
        match failure {
            // The failed operation is one that ran on the device before this one.
            Failure::Device(error) => write!(f, "rank {rank}: before {operation} had ended: {error}"),
            _ => write!(f, "rank {rank}: {operation} failed: {failure}"),
        }
    }
}

impl std::error::Error for CollectiveError {}

impl CollectiveError {
    /// True if it failed only because another rank failed.
    pub fn is_consequence(&self) -> bool {
        self.failure.is_consequence()
    }

    /// The global rank whose process ended, or whose connection broke, if that is what happened.
    pub fn lost_rank(&self) -> Option<usize> {
        self.failure.lost_rank()
    }
}

/// What happened to a collective operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Some ranks did not reach the operation in time.
    #[error(
        "waited {waited_ms} ms for {}\n  hint: the missing rank is slow, stopped or in a different operation; see its log. If only large transfers to other nodes stall, the path may drop large frames: compare the MTU of both interfaces (`ip link`)",
        numbered("rank", waiting_for)
    )]
    TimedOut {
        /// Global ranks that did not.
        waiting_for: Vec<usize>,
        /// For how long.
        waited_ms: u64,
    },
    /// The process of a rank ended, or its connection broke.
    #[error("lost rank {rank}: {how}")]
    PeerLost {
        /// Global rank.
        rank: usize,
        /// How this rank noticed.
        how: String,
    },
    /// The agent ended the generation.
    #[error("the launcher stopped the workers: {0}")]
    GenerationOver(String),
    /// Ranks issued different operations.
    #[error(
        "rank {rank} is in {theirs}, but this rank is in {ours}\n  hint: all ranks must issue the same operations in the same order"
    )]
    Mismatch {
        /// Global rank of the other.
        rank: usize,
        /// What this rank does.
        ours: String,
        /// What the other does.
        theirs: String,
    },
    /// The operation cannot be done with this buffer.
    #[error("{0}")]
    Invalid(String),
    /// A rank could not take part in a collective call, so no rank did.
    #[error("rank {rank} refused: {why}")]
    Refused {
        /// Global rank.
        rank: usize,
        /// Why.
        why: String,
    },
    /// An earlier operation of the same communicator failed.
    #[error("an earlier operation failed: {0}")]
    Poisoned(Box<Self>),
    /// Another operation of this process failed; all communicators of the device were aborted with it.
    #[error("abandoned because of {because_of}: {failure}")]
    GivenUp {
        /// The operation that failed: ``#31 of `world` ``.
        because_of: String,
        /// What happened to that one.
        failure: Box<Self>,
    },
    /// The library that carries operations out reported an error.
    #[error("{call}: {words}")]
    Library {
        /// The function that was called.
        call: String,
        /// What it reported.
        words: String,
        /// It reports that another process failed, or the network to it.
        of_peer: bool,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A system call failed.
    #[error("{what}: {cause}")]
    System {
        /// What was tried.
        what: String,
        /// Its error message.
        cause: String,
    },
}

impl Failure {
    /// The error of the device, if that is what happened.
    pub(crate) fn device(&self) -> Option<&DeviceError> {
        match self {
            Self::Device(error) => Some(error),
            Self::GivenUp { failure, .. } => failure.device(),
            _ => None,
        }
    }

    fn lost_rank(&self) -> Option<usize> {
        match self {
            Self::PeerLost { rank, .. } => Some(*rank),
            Self::GivenUp { failure, .. } | Self::Poisoned(failure) => failure.lost_rank(),
            _ => None,
        }
    }

    pub(crate) fn is_consequence(&self) -> bool {
        match self {
            Self::PeerLost { .. } | Self::GenerationOver(_) | Self::Refused { .. } | Self::Poisoned(_) => {
                true
            }
            Self::Library { of_peer, .. } => *of_peer,
            Self::GivenUp { failure, .. } => failure.is_consequence(),
            // What the operation waited for has failed.
            Self::Device(error) => matches!(error, DeviceError::Upstream(_)),
            Self::TimedOut { .. } | Self::Mismatch { .. } | Self::Invalid(_) | Self::System { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_whose_input_failed_is_a_consequence() {
        let upstream = Failure::Device(DeviceError::Upstream("an all-gather failed".into()));
        let given_up = Failure::GivenUp {
            because_of: "#7 of `world`".into(),
            failure: Box::new(upstream.clone()),
        };
        assert!(upstream.is_consequence() && given_up.is_consequence());
        assert!(!Failure::Invalid("too long".into()).is_consequence());
    }
}
