//! One thing that ran.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// What follows one after the other: a stream, a communicator, the thread that trains.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// Whole steps.
    Steps,
    /// The thread that trains, where it only tells the device what to do.
    Host,
    /// The stream that computes; on a CPU it is the thread that trains.
    Compute,
    /// Operations of a communicator.
    Communicator(String),
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps => f.write_str("steps"),
            Self::Host => f.write_str("host"),
            Self::Compute => f.write_str("compute"),
            Self::Communicator(name) => write!(f, "{COMMUNICATION}{name}"),
        }
    }
}

const COMMUNICATION: &str = "communication: ";

impl Lane {
    /// The lane that is displayed so.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "steps" => Some(Self::Steps),
            "host" => Some(Self::Host),
            "compute" => Some(Self::Compute),
            _ => Some(Self::Communicator(name.strip_prefix(COMMUNICATION)?.to_owned())),
        }
    }
}

/// What it was for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A whole step.
    Step,
    /// Tokens for a micro-batch.
    Data,
    /// Forward of a micro-batch, and of each of its blocks.
    Forward,
    /// Backward, likewise.
    Backward,
    /// Norm, clipping and update.
    Optimizer,
    /// One operation of a block.
    Operation,
    /// Nothing: it stands still until gradients or parameters have come.
    Wait,
    /// Gradients between ranks.
    Gradients,
    /// Parameters between ranks.
    Parameters,
    /// Whatever else goes between ranks: losses, norms.
    Other,
    /// Nothing: another rank has not come yet. Known of merged traces only.
    Late,
}

/// One thing that ran. Times are in microseconds since the timeline was opened.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// Where.
    pub lane: Lane,
    /// What for.
    pub kind: Kind,
    /// `backward h.3`, `all-reduce (bucket 2)`.
    pub name: Cow<'static, str>,
    /// When it began.
    pub start_us: f64,
    /// When it ended.
    pub end_us: f64,
    /// If it is an operation of a communicator.
    pub collective: Option<Collective>,
}

/// Which operation of which communicator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Collective {
    /// Size of its buffer.
    pub bytes: u64,
    /// Global rank of the communicator's first rank.
    pub first_rank: u32,
    /// Number of its ranks.
    pub ranks: u32,
    /// Number of the operation in its communicator, from 0, if it moves nothing before all ranks have come.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub sequence: Option<u64>,
}

impl Span {
    /// How long it took, in microseconds.
    #[must_use]
    pub fn length_us(&self) -> f64 {
        self.end_us - self.start_us
    }
}
