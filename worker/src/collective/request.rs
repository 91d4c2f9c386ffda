//! What is asked of a group of ranks.

use std::fmt;

use crate::device::Buffer;
use crate::timeline::Kind;

/// A collective operation. All work in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Every rank ends with the reduction over all ranks.
    AllReduce,
    /// The buffer is `size` equal slices; rank `r` ends with the reduction of slice `r` in its slice `r`. Its
    /// other slices keep no meaning.
    ReduceScatter,
    /// The buffer is `size` equal slices; rank `r` gives its slice `r`, every rank ends with all slices.
    AllGather,
    /// Every rank ends with the elements of `root`.
    Broadcast {
        /// Rank within the group.
        root: usize,
    },
    /// No rank goes on before all have come. The buffer is empty.
    Barrier,
    /// Sends the buffer to one rank, which must [`Operation::Recv`] as many bytes.
    Send {
        /// Rank within the group.
        to: usize,
    },
    /// Receives what one rank sends.
    Recv {
        /// Rank within the group.
        from: usize,
    },
}

impl Operation {
    /// True if no rank is done before all have come.
    pub(super) fn needs_all_ranks(self) -> bool {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::AllGather | Self::Barrier => true,
            Self::Broadcast { .. } | Self::Send { .. } | Self::Recv { .. } => false,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce => f.write_str("all-reduce"),
            Self::ReduceScatter => f.write_str("reduce-scatter"),
            Self::AllGather => f.write_str("all-gather"),
            Self::Broadcast { root } => write!(f, "broadcast from {root}"),
            Self::Barrier => f.write_str("barrier"),
            Self::Send { to } => write!(f, "send to {to}"),
            Self::Recv { from } => write!(f, "recv from {from}"),
        }
    }
}

/// How contributions become one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ReduceOp {
    /// `scale · ((x₀ + x₁) + x₂ + …)`, in rank order, in f32 for bf16 buffers; scaled once, after the sum.
    Sum {
        /// 1/(accumulation × world size) for gradients, 1 for plain sums.
        scale: f32,
    },
    /// The largest.
    Max,
}

/// What bytes are for, in the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Gradients.
    Grads,
    /// Parameters.
    Params,
    /// Everything else: losses, checks, barriers.
    Other,
}

impl Traffic {
    /// Of a span.
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Grads => Kind::Gradients,
            Self::Params => Kind::Parameters,
            Self::Other => Kind::Other,
        }
    }
}

/// One operation of the queue.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub operation: Operation,
    /// How to reduce, for reducing operations.
    pub reduce: ReduceOp,
    /// On what.
    pub buffer: Buffer,
    /// What for.
    pub traffic: Traffic,
    /// In words, for errors and traces: `bucket 3`, `loss`.
    pub tag: String,
}
