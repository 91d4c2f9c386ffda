//! How bytes get to the other ranks of a group, and the transport of a group of one rank.

use std::ops::{Add, Sub};
use std::sync::Arc;

use super::error::Failure;
use super::operation::{Request, StreamWork, Traffic};
use super::wait::Wait;
use crate::device::{Arena, ArenaSpec, Device, Event, Held};

/// How the ranks of a group talk to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommPattern {
    /// Operations of all its ranks.
    Collectives,
    /// Messages between two of its ranks. NCCL connects two ranks in their first message, in which each waits for the other,
    /// so the user sends a first message over each link, in one order of all ranks.
    Messages,
}

/// A part of a group of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subgroup {
    /// What it is for, in errors and timelines. Two subgroups of one rank have two names.
    pub name: String,
    /// Ranks of the group that is split, in ascending order.
    pub members: Vec<usize>,
    /// How they talk.
    pub pattern: CommPattern,
}

impl Subgroup {
    /// For collectives.
    pub fn new(name: &str, members: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.to_owned(),
            members: members.into(),
            pattern: CommPattern::Collectives,
        }
    }
}

/// How one group moves bytes. Calls come one at a time, in the same order on every rank.
pub trait Transport: Send {
    /// Rank of this process in the group.
    fn rank(&self) -> usize;

    /// Global rank of each member, in order of rank.
    fn members(&self) -> &[usize];

    /// Allocates an arena of the same size on every rank of the group, placed where operations on it are fastest. A
    /// collective call. Without anything better that is the device's own memory.
    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        _wait: &Wait,
    ) -> Result<Arena, Failure> {
        Ok(device.alloc(spec)?)
    }

    /// A transport for some members, this rank among them. A collective call of all ranks of this group, each with its own
    /// subgroup.
    fn split(&mut self, subgroup: &Subgroup, wait: &Wait) -> Result<Box<dyn Transport>, Failure>;

    /// Carries out one operation on the calling thread. `held` is the exclusive hold on the request's buffer meanwhile. Returns
    /// what this rank put on the wire, as [`WireBytes`] counts it. Not called where there is a stream.
    fn execute(&mut self, _request: &Request, _held: Held, _wait: &Wait) -> Result<u64, Failure> {
        Err(Failure::Invalid("the transport has a stream".into()))
    }

    /// True where the host only enqueues operations on a stream of the device: always, or never.
    fn is_on_stream(&self) -> bool {
        false
    }

    /// Enqueues one operation on a stream of the transport's own, to run after `after` and after those before it, beside
    /// whatever else the device computes. `wait` bounds the call, not the operation, whose own time-out is the transport's
    /// and begins when the operations before it have ended. The transport keeps the buffer's memory until the operation
    /// has ended. Only called where there is a stream.
    fn enqueue(
        &mut self,
        _sequence: u64,
        _request: &Request,
        _after: &Event,
        _wait: &Wait,
    ) -> Result<Arc<dyn StreamWork>, Failure> {
        Err(Failure::Invalid("the transport has no stream".into()))
    }

    /// Waits for what is in the stream and leaves the group. The last call.
    fn shutdown(&mut self, _wait: &Wait) {}

    /// Instead of [`Transport::shutdown`] where something failed: aborts the operations of this group and of its subgroups, and
    /// waits for that a bounded time. The last call.
    fn abandon(&mut self) {}
}

/// Bytes that one rank moves between itself and others, by purpose.
///
/// Every byte that crosses from one rank to another is counted once, where it is moved, by one of the two:
/// - what a rank takes from others to sum it, to gather it, to receive it, a broadcast or a part counts for the taker;
/// - the sums of an all-reduce that a rank gives to others count for the giver.
///
/// In shared memory "takes" is a read from another's segment and "gives" a write into it; between nodes both are
/// bytes of a TCP connection, without the 64-byte header of each operation. So with N ranks and S bytes,
/// reduce-scatter and all-gather count (N−1)/N·S and all-reduce 2(N−1)/N·S on each rank where the slices and the nodes are
/// equal, as on a ring; with unequal nodes on average. Sums of bf16 that several ranks of a node give to another node
/// travel in f32, and count so. The one exception is an all-reduce of at most 32 KiB, more than two ranks and
/// [`Traffic::Other`], which takes (N−1)·S to need one synchronisation only.
///
/// Where a device carries operations out ([`Transport::is_on_stream`]) the same is counted by formula, when an operation is
/// enqueued: what the library really sends depends on the algorithm that it chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct WireBytes {
    /// Gradients.
    pub grads: u64,
    /// Parameters.
    pub params: u64,
    /// Activations and their gradients, within tensor groups.
    pub activations: u64,
    /// The same between the stages of a pipeline.
    pub pipeline: u64,
    /// Everything else.
    pub other: u64,
}

impl WireBytes {
    pub(super) fn count(&mut self, traffic: Traffic, bytes: u64) {
        let counter = match traffic {
            Traffic::Grads => &mut self.grads,
            Traffic::Params => &mut self.params,
            Traffic::Activations => &mut self.activations,
            Traffic::Pipeline => &mut self.pipeline,
            Traffic::Other => &mut self.other,
        };
        *counter += bytes;
    }
}

impl WireBytes {
    fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            grads: f(self.grads, other.grads),
            params: f(self.params, other.params),
            activations: f(self.activations, other.activations),
            pipeline: f(self.pipeline, other.pipeline),
            other: f(self.other, other.other),
        }
    }
}

impl Add for WireBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u64::add)
    }
}

impl Sub for WireBytes {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.zip(other, u64::sub)
    }
}

/// An error unless `members` are a subgroup with this rank.
pub(super) fn check_members(members: &[usize], rank: usize, size: usize) -> Result<(), Failure> {
    let ascending = members.windows(2).all(|pair| pair[0] < pair[1]);
    if ascending && members.iter().all(|&rank| rank < size) && members.contains(&rank) {
        return Ok(());
    }
    Err(Failure::Invalid(format!(
        "{members:?} are not ascending ranks of this group with rank {rank} among them"
    )))
}

/// The transport of a group of one rank: nothing moves.
#[derive(Clone)]
pub struct SingleRank {
    members: [usize; 1],
    is_on_stream: bool,
}

impl SingleRank {
    /// For buffers in host memory.
    pub fn new(global_rank: usize) -> Self {
        Self {
            members: [global_rank],
            is_on_stream: false,
        }
    }

    /// For buffers of a device that runs asynchronously.
    pub fn on_stream(global_rank: usize) -> Self {
        Self {
            members: [global_rank],
            is_on_stream: true,
        }
    }
}

impl Transport for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn split(&mut self, _: &Subgroup, _: &Wait) -> Result<Box<dyn Transport>, Failure> {
        Ok(Box::new(self.clone()))
    }

    fn execute(&mut self, request: &Request, _held: Held, _wait: &Wait) -> Result<u64, Failure> {
        request.check(0, 1)?;
        Ok(0)
    }

    fn is_on_stream(&self) -> bool {
        self.is_on_stream
    }

    fn enqueue(
        &mut self,
        _sequence: u64,
        request: &Request,
        after: &Event,
        _wait: &Wait,
    ) -> Result<Arc<dyn StreamWork>, Failure> {
        request.check(0, 1)?;
        Ok(Arc::new(after.clone()))
    }
}

/// An operation of a group of one rank is done when its input is ready.
impl StreamWork for Event {
    fn done(&self) -> &Event {
        self
    }

    fn outcome(&self) -> Option<Result<(), Failure>> {
        Some(self.poll()?.map_err(Failure::Device))
    }
}
