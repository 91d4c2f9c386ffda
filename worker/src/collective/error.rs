//! Errors of collectives name the rank, the operation, its sequence number, its bytes and what it was for.

use std::fmt;

use ddp_proto::words::numbered;

use crate::device::DeviceError;

/// A collective operation failed on this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveError {
    /// Global rank of the speaker.
    pub rank: usize,
    /// Name of the communicator.
    pub communicator: String,
    /// Name of the operation.
    pub operation: String,
    /// Number of the operation in its communicator, from 0.
    pub sequence: u64,
    /// Size of the buffer.
    pub bytes: usize,
    /// What the operation was for.
    pub tag: String,
    /// What happened.
    pub failure: Failure,
}

impl fmt::Display for CollectiveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            rank,
            communicator,
            operation,
            sequence,
            tag,
            failure,
            ..
        } = self;
        let size = size(self.bytes);
        let name = format!("{operation} #{sequence} of `{communicator}` ({tag}{size})");
        match failure {
            // It is not the operation's: it waited for what comes before it on the device.
            Failure::Device(error) => write!(f, "rank {rank}: before {name} had ended: {error}"),
            _ => write!(f, "rank {rank}: {name} failed: {failure}"),
        }
    }
}

impl std::error::Error for CollectiveError {}

/// An operation by its names, for the error that it may end with.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) rank: usize,
    pub(super) communicator: String,
    pub(super) operation: String,
    pub(super) sequence: u64,
    pub(super) bytes: usize,
    pub(super) tag: String,
}

impl Named {
    pub(super) fn error(self, failure: Failure) -> CollectiveError {
        let Self {
            rank,
            communicator,
            operation,
            sequence,
            bytes,
            tag,
        } = self;
        CollectiveError {
            rank,
            communicator,
            operation,
            sequence,
            bytes,
            tag,
            failure,
        }
    }
}

/// What happened to a collective operation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Some ranks did not come in time.
    #[error(
        "waited {waited_ms} ms for {}\n  hint: a rank that is waited for is slow, stopped or in another operation; its log says which",
        numbered("rank", waiting_for)
    )]
    TimedOut {
        /// Global ranks that did not come.
        waiting_for: Vec<usize>,
        /// For how long.
        waited_ms: u64,
    },
    /// A rank went away.
    #[error("lost rank {rank}: {how}")]
    PeerLost {
        /// Global rank.
        rank: usize,
        /// What was seen of it.
        how: String,
    },
    /// The agent said that the generation is over.
    #[error("the generation is over: {0}")]
    GenerationOver(String),
    /// Ranks issued different operations.
    #[error(
        "rank {rank} is in {theirs}, this rank in {ours}\n  hint: all ranks must issue the same operations in the same order"
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
    /// A rank could not do its part of a collective call, so none did.
    #[error("rank {rank} refused: {why}")]
    Refused {
        /// Global rank.
        rank: usize,
        /// Its words.
        why: String,
    },
    /// An earlier operation of the same communicator failed.
    #[error("an earlier operation failed: {0}")]
    Poisoned(String),
    /// Another operation of this process failed, and everything on the device was given up with it.
    #[error("given up because of {because_of}: {failure}")]
    GivenUp {
        /// In words: `#31 of world`, in backquotes what is a name.
        because_of: String,
        /// What happened to that one.
        failure: Box<Self>,
    },
    /// The library that carries operations out reported an error.
    #[error("{call}: {words}")]
    Library {
        /// What was asked of it.
        call: String,
        /// Its words.
        words: String,
        /// It says that another process failed, or the way to it.
        of_peer: bool,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The system refused something.
    #[error("{what}: {cause}")]
    System {
        /// What was tried.
        what: String,
        /// The system's words.
        cause: String,
    },
}

impl CollectiveError {
    /// True if it failed only because another rank failed.
    #[must_use]
    pub fn is_consequence(&self) -> bool {
        self.failure.is_consequence()
    }
}

impl Failure {
    /// The device's own error, if that was it.
    pub(crate) fn device(&self) -> Option<&DeviceError> {
        match self {
            Self::Device(error) => Some(error),
            Self::GivenUp { failure, .. } => failure.device(),
            _ => None,
        }
    }

    fn is_consequence(&self) -> bool {
        match self {
            Self::PeerLost { .. }
            | Self::GenerationOver(_)
            | Self::Refused { .. }
            | Self::Poisoned(_)
            | Self::Library { of_peer: true, .. } => true,
            Self::GivenUp { failure, .. } => failure.is_consequence(),
            Self::TimedOut { .. }
            | Self::Mismatch { .. }
            | Self::Invalid(_)
            | Self::Library { of_peer: false, .. }
            | Self::Device(_)
            | Self::System { .. } => false,
        }
    }
}

/// Nothing for operations without a buffer.
fn size(bytes: usize) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(", {bytes} bytes"),
    }
}
