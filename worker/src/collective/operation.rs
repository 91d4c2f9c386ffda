//! What a group of ranks is asked to do, how a buffer is divided among them, and the handle of one operation.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::error::{CollectiveError, Failure, name};
use crate::device::{Buffer, DType, DeviceError, Event, Signal};
use crate::timeline::{Interval, Kind};

/// Longest wait for an operation between two checks whether it has failed, which may be before its event is reached.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A collective operation. All work in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Every rank ends with the reduction over all ranks.
    AllReduce(ReduceOp),
    /// The buffer is `size` equal slices; rank `r` ends with the reduction of slice `r` in its slice `r`. The
    /// contents of its other slices are unspecified.
    ReduceScatter(ReduceOp),
    /// The buffer is `size` equal slices; rank `r` contributes its slice `r`, every rank ends with all slices.
    AllGather,
    /// Every rank ends with the elements of `root`.
    Broadcast {
        /// Rank within the group.
        root: usize,
    },
    /// Every rank sends a part of its elements to each rank, itself among them, and receives the others' parts in the buffer:
    /// [`AllToAll`]. The only operation that is not in place.
    AllToAll,
    /// Completes once every rank has called it. The buffer is empty.
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
    /// True if no rank completes it before all ranks have started it.
    pub(super) fn needs_all_ranks(self) -> bool {
        match self {
            Self::AllReduce(_)
            | Self::ReduceScatter(_)
            | Self::AllGather
            | Self::AllToAll
            | Self::Barrier => true,
            Self::Broadcast { .. } | Self::Send { .. } | Self::Recv { .. } => false,
        }
    }

    /// The rank within the group at the other end of a message.
    pub(super) fn peer(self) -> Option<usize> {
        match self {
            Self::Send { to: peer } | Self::Recv { from: peer } => Some(peer),
            _ => None,
        }
    }

    /// How elements are reduced, if they are.
    pub(super) fn reduction(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) => Some(op),
            _ => None,
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce(_) => f.write_str("all-reduce"),
            Self::ReduceScatter(_) => f.write_str("reduce-scatter"),
            Self::AllGather => f.write_str("all-gather"),
            Self::Broadcast { root } => write!(f, "broadcast from {root}"),
            Self::AllToAll => f.write_str("all-to-all"),
            Self::Barrier => f.write_str("barrier"),
            Self::Send { to } => write!(f, "send to {to}"),
            Self::Recv { from } => write!(f, "recv from {from}"),
        }
    }
}

/// How elements of several ranks are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReduceOp {
    /// `(x₀ + x₁) + x₂ + …`, in rank order, in f32 for bf16 buffers.
    Sum,
    /// The maximum.
    Max,
}

/// What bytes are for, in the counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Traffic {
    /// Gradients.
    Grads,
    /// Parameters.
    Params,
    /// Activations and their gradients, within tensor groups.
    Activations,
    /// The same between the stages of a pipeline.
    Pipeline,
    /// Everything else: losses, checks, barriers.
    Other,
}

impl Traffic {
    /// Kind of the span in a timeline.
    pub(super) fn kind(self) -> Kind {
        match self {
            Self::Grads => Kind::Gradients,
            Self::Params => Kind::Parameters,
            Self::Activations | Self::Pipeline => Kind::Activations,
            Self::Other => Kind::Other,
        }
    }
}

/// What a rank sends in an all-to-all, and how much it receives of each rank. The parts lie in order of rank, without gaps.
#[derive(Clone, Debug)]
pub struct AllToAll {
    /// What it sends: no element of the buffer that receives, and of its type.
    pub sent: Buffer,
    /// Elements for each rank.
    pub sent_counts: Vec<usize>,
    /// Elements of each rank, which are those that it sends.
    pub received_counts: Vec<usize>,
}

impl AllToAll {
    /// The ranges of the parts that are sent to a rank and received of it, one rank after the other.
    pub(super) fn parts(&self) -> impl Iterator<Item = [Range<usize>; 2]> + '_ {
        let mut ends = [0, 0];
        let counts = self.sent_counts.iter().zip(&self.received_counts);
        counts.map(move |(&sent, &received)| {
            let starts = ends;
            ends = [ends[0] + sent, ends[1] + received];
            [starts[0]..ends[0], starts[1]..ends[1]]
        })
    }

    /// An error if the rank of a group of `size` cannot do it with this buffer.
    fn check(&self, received: &Buffer, rank: usize, size: usize) -> Result<(), Failure> {
        let counts = [&self.sent_counts, &self.received_counts];
        let buffers = [&self.sent, received];
        let lens = counts.map(|counts| (counts.len(), counts.iter().sum()));
        let types = buffers.map(Buffer::dtype);
        let is_possible =
            size > 1 && lens == buffers.map(|buffer| (size, buffer.len())) && types[0] == types[1];
        if is_possible && counts[0][rank] == counts[1][rank] {
            return Ok(());
        }
        let [sent, received] =
            [0, 1].map(|i| format!("{:?} of {} {}", counts[i], buffers[i].len(), buffers[i].dtype()));
        Err(Failure::Invalid(format!(
            "rank {rank} of {size} cannot send the parts {sent} and receive the parts {received}"
        )))
    }
}

/// One operation on one buffer.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub operation: Operation,
    /// On what.
    pub buffer: Buffer,
    /// What an all-to-all sends; no other operation has it.
    pub all_to_all: Option<AllToAll>,
    /// What for.
    pub traffic: Traffic,
    /// For errors and traces: `bucket 3`, `loss`.
    pub tag: String,
}

impl Request {
    /// All that it uses.
    pub(super) fn buffers(&self) -> impl Iterator<Item = &Buffer> {
        let sent = self.all_to_all.as_ref().map(|parts| &parts.sent);
        std::iter::once(&self.buffer).chain(sent)
    }

    /// An error if `rank` of a group of `size` cannot do it.
    pub(super) fn check(&self, rank: usize, size: usize) -> Result<(), Failure> {
        match &self.all_to_all {
            Some(parts) => parts.check(&self.buffer, rank, size),
            None => Descriptor::of(self).check(rank, size),
        }
    }

    /// Bytes on the wire of one rank, by the formulas of [`super::WireBytes`].
    pub(super) fn wire_bytes(&self, rank: usize, size: usize) -> u64 {
        match &self.all_to_all {
            Some(parts) => {
                ((self.buffer.len() - parts.received_counts[rank]) * self.buffer.dtype().bytes()) as u64
            }
            None => Descriptor::of(self).wire_bytes(rank, size),
        }
    }

    /// The operation with this number of a communicator, in words.
    pub(super) fn name(&self, sequence: u64, communicator: &str) -> String {
        name(
            self.operation,
            sequence,
            communicator,
            &self.tag,
            self.buffer.bytes(),
        )
    }
}

/// An operation without its buffer: only the type and the number of the elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Descriptor {
    pub(super) operation: Operation,
    pub(super) dtype: DType,
    /// Number of elements.
    pub(super) len: usize,
    pub(super) traffic: Traffic,
}

impl Descriptor {
    pub(super) fn of(request: &Request) -> Self {
        Self {
            operation: request.operation,
            dtype: request.buffer.dtype(),
            len: request.buffer.len(),
            traffic: request.traffic,
        }
    }

    /// Size in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.len * self.dtype.bytes()
    }

    /// An error if `rank` of a group of `size` cannot do it.
    pub(super) fn check(&self, rank: usize, size: usize) -> Result<(), Failure> {
        let (operation, len) = (self.operation, self.len);
        let problem = match operation {
            Operation::ReduceScatter(_) | Operation::AllGather if !len.is_multiple_of(size) => format!(
                "{len} elements cannot be split into {size} equal slices\n  hint: pad the buffer to a multiple of the group's size"
            ),
            Operation::AllReduce(op) | Operation::ReduceScatter(op) => return self.check_reduction(op),
            Operation::Broadcast { root } if root >= size => {
                format!("there is no rank {root} in a group of {size}")
            }
            Operation::Send { .. } | Operation::Recv { .. } if size == 1 => "there is no other rank".into(),
            Operation::Send { to: peer } | Operation::Recv { from: peer } if peer >= size || peer == rank => {
                format!("rank {peer} is not another rank of this group")
            }
            _ => return Ok(()),
        };
        Err(Failure::Invalid(problem))
    }

    /// An error if the type of the elements has no such reduction.
    fn check_reduction(&self, op: ReduceOp) -> Result<(), Failure> {
        match (self.dtype, op) {
            (dtype @ (DType::I32 | DType::U8), ReduceOp::Sum) => Err(Failure::Invalid(format!(
                "{dtype} cannot be summed\n  hint: reduce f64, f32 or bf16, or take the maximum"
            ))),
            _ => Ok(()),
        }
    }

    /// Bytes on the wire of one rank of an operation in place.
    fn wire_bytes(&self, rank: usize, size: usize) -> u64 {
        let own = slice(self.len, size, rank).len();
        let elements = match self.operation {
            // The others' contributions to the own slice in, its sums out to the others.
            Operation::AllReduce(_) => 2 * (size - 1) * own,
            Operation::ReduceScatter(_) | Operation::AllGather => (size - 1) * own,
            Operation::Broadcast { root } if root != rank => self.len,
            Operation::Recv { .. } => self.len,
            Operation::Broadcast { .. }
            | Operation::Barrier
            | Operation::Send { .. }
            | Operation::AllToAll => 0,
        };
        (elements * self.dtype.bytes()) as u64
    }
}

/// Slice `index` of `len` elements in `parts`: as equal as they can be, longer ones first.
pub(super) fn slice(len: usize, parts: usize, index: usize) -> Range<usize> {
    let (each, longer) = (len / parts, len % parts);
    let start = index * each + index.min(longer);
    start..start + each + usize::from(index < longer)
}

/// One operation of a communicator. Dropping it does not cancel the operation.
#[derive(Clone)]
pub struct Work {
    event: Event,
    outcome: Arc<dyn Fn() -> Option<Outcome> + Send + Sync>,
    /// The stream of a communicator that it is in, whose operations end in order.
    stream: Option<usize>,
}

/// When it ran, if it moved anything.
type Outcome = Result<Option<Interval>, CollectiveError>;

/// One operation in a stream.
pub trait StreamWork: Send + Sync {
    /// The event behind it. It is also reached when the operation was aborted: only [`StreamWork::outcome`] tells.
    fn done(&self) -> &Event;

    /// From when the operations before it had ended and its input was ready, until it was done. None if nothing moves.
    fn interval(&self) -> Option<Interval> {
        None
    }

    /// How it ended, once it has. It has when [`StreamWork::done`] is reached; if it failed, perhaps before.
    fn outcome(&self) -> Option<Result<(), Failure>>;
}

impl Work {
    /// A handle and the means to complete it.
    pub(super) fn pair(what: &str) -> (Self, Completion) {
        let (event, signal) = Event::pair(what);
        let slot = Arc::new(Mutex::new(None));
        let seen = slot.clone();
        let work = Self {
            event,
            outcome: Arc::new(move || seen.lock().clone()),
            stream: None,
        };
        (work, Completion { signal, slot })
    }

    /// The handle of an operation in the stream of a communicator of a global rank.
    pub(crate) fn enqueued(stream: usize, work: Arc<dyn StreamWork>, rank: usize, operation: String) -> Self {
        let event = work.done().clone();
        let outcome = move || {
            let failed = |failure| CollectiveError {
                rank,
                operation: operation.clone(),
                failure,
            };
            Some(work.outcome()?.map(|()| work.interval()).map_err(failed))
        };
        Self {
            event,
            outcome: Arc::new(outcome),
            stream: Some(stream),
        }
    }

    /// The stream that it is in, if its operations end in order.
    pub(crate) const fn stream(&self) -> Option<usize> {
        self.stream
    }

    /// Blocks the host until the operation is done. Returns when it ran, if it moved anything.
    pub fn wait(&self, deadline: Instant) -> Result<Option<Interval>, WorkError> {
        let began = Instant::now();
        loop {
            if let Some(outcome) = (self.outcome)() {
                return Ok(outcome?);
            }
            let until = deadline.min(Instant::now() + POLL_INTERVAL);
            let waited = self.event.wait(until);
            let reached = self.event.poll();
            if (until < deadline && reached.is_none()) || (self.outcome)().is_some() {
                continue;
            }
            return Err(WorkError::Pending(match (reached, waited) {
                (None, Err(DeviceError::TimedOut { what, .. })) => DeviceError::TimedOut {
                    what,
                    waited_ms: began.elapsed().as_millis() as u64,
                },
                (Some(Err(error)), _) | (None, Err(error)) => error,
                _ => DeviceError::Upstream("the communicator was shut down".into()),
            }));
        }
    }

    /// True once it is done or failed.
    pub fn is_done(&self) -> bool {
        (self.outcome)().is_some() || self.event.poll().is_some()
    }

    /// Reached when the operation is done: for an operation that starts with its result. One that waits for it in a stream
    /// runs also if this one fails in a stream of its own, and may then read incomplete results: only [`Work::wait`]
    /// reports the failure.
    pub fn event(&self) -> &Event {
        &self.event
    }
}

/// Why waiting for an operation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WorkError {
    /// The operation failed.
    #[error(transparent)]
    Failed(#[from] CollectiveError),
    /// The operation has not ended yet, or never will.
    #[error(transparent)]
    Pending(DeviceError),
}

/// Completes a [`Work`].
pub(super) struct Completion {
    signal: Signal,
    slot: Arc<Mutex<Option<Outcome>>>,
}

impl Completion {
    pub(super) fn set(self, outcome: Outcome) {
        let result = match &outcome {
            Ok(_) => Ok(()),
            Err(error) => Err(DeviceError::Upstream(error.to_string())),
        };
        *self.slot.lock() = Some(outcome);
        self.signal.set(result);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_are_adjacent_and_cover_everything() {
        for (len, parts) in [(0, 3), (1, 3), (7, 3), (9, 3), (1024, 7)] {
            let slices: Vec<_> = (0..parts).map(|i| slice(len, parts, i)).collect();
            assert_eq!(slices[0].start, 0);
            assert_eq!(slices[parts - 1].end, len);
            assert!(
                slices
                    .windows(2)
                    .all(|w| w[0].end == w[1].start && w[0].len() >= w[1].len())
            );
            assert!(slices[0].len() - slices[parts - 1].len() <= 1);
        }
    }

    #[test]
    fn integers_have_no_sum() {
        let descriptor = |dtype, reduce| Descriptor {
            operation: Operation::AllReduce(reduce),
            dtype,
            len: 1,
            traffic: Traffic::Other,
        };
        let sum = descriptor(DType::I32, ReduceOp::Sum);
        let error = sum.check(0, 2).unwrap_err().to_string();
        assert!(error.starts_with("i32 cannot be summed\n  hint: "));
        assert!(descriptor(DType::U8, ReduceOp::Max).check(0, 2).is_ok());
    }
}
