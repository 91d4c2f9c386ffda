//! How bytes get to the other ranks of a group.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pending::Pending;
use super::{Failure, Request, Traffic};
use crate::device::{Arena, ArenaSpec, Device, Held};
use crate::session::Cancel;

/// One group's way to move bytes. Calls come one at a time, in the same order on every rank.
pub trait Transport: Send {
    /// Rank of this process in the group.
    fn rank(&self) -> usize;

    /// Global rank of each member, in order of rank.
    fn members(&self) -> &[usize];

    /// Carries out one operation. `held` is the exclusive hold on the request's buffer.
    fn execute(
        &mut self,
        sequence: u64,
        request: &Request,
        held: &mut Held,
        wait: &Wait,
    ) -> Result<(), Failure>;

    /// Allocates an arena of the same size on every rank of the group, placed so that operations on it need no
    /// copies. A collective call.
    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure>;

    /// A transport for some members, this rank among them, given as ranks of this group in ascending order. A
    /// collective call of all ranks of this group, each with its own subgroup.
    fn split(&mut self, name: &str, members: &[usize], wait: &Wait) -> Result<Box<dyn Transport>, Failure>;

    /// Bytes that this rank has put on the wire so far, counted where they are moved.
    fn wire_bytes(&self) -> WireBytes;
}

/// Bytes that one rank moves between itself and others, by purpose.
///
/// Every byte that crosses from one rank to another is counted once, where it is moved, by one of the two:
/// - what a rank takes from others to sum it, to gather it, to receive it or a broadcast counts for the taker;
/// - the sums of an all-reduce that a rank gives to others count for the giver.
///
/// In shared memory "takes" is a read from another's segment and "gives" a write into it; between nodes both are
/// bytes of a TCP connection, without the 64-byte header of each operation. So with N ranks and S bytes,
/// reduce-scatter and all-gather count (N−1)/N·S and all-reduce 2(N−1)/N·S on each rank where the slices and the nodes are
/// equal, as on a ring; with unequal nodes on average. Sums of bf16 that several ranks of a node give to another node
/// travel in f32, and count so. The one exception is an all-reduce of at most 32 KiB, more than two ranks and
/// [`super::Traffic::Other`], which takes (N−1)·S to be done after one meeting.
///
/// Where a device carries operations out ([`super::StreamTransport`]) the same is counted by formula, when an
/// operation is enqueued: what the library really sends depends on the algorithm that it chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct WireBytes {
    /// Gradients.
    pub grads: u64,
    /// Parameters.
    pub params: u64,
    /// Everything else.
    pub other: u64,
}

impl WireBytes {
    /// Counts bytes for a purpose.
    pub fn add(&mut self, traffic: Traffic, bytes: u64) {
        match traffic {
            Traffic::Grads => self.grads += bytes,
            Traffic::Params => self.params += bytes,
            Traffic::Other => self.other += bytes,
        }
    }
}

/// A wait this long is worth a note of whom it is for.
const LASTING: Duration = Duration::from_millis(250);

/// How long a rank waits for the others, and who may end it earlier.
#[derive(Clone)]
pub struct Wait {
    /// When the wait began.
    pub started: Instant,
    /// When it ends.
    pub deadline: Instant,
    /// Ends it at once.
    pub cancel: Cancel,
    /// Who wants to know for whom.
    pending: Option<Arc<Pending>>,
}

impl Wait {
    /// A wait that begins now.
    #[must_use]
    pub fn new(timeout: Duration, cancel: &Cancel) -> Self {
        let started = Instant::now();
        Self {
            started,
            deadline: started + timeout,
            cancel: cancel.clone(),
            pending: None,
        }
    }

    /// The ranks that it waits for are noted in `pending`, once it has lasted.
    pub(super) fn told_to(mut self, pending: &Arc<Pending>) -> Self {
        self.pending = Some(pending.clone());
        self
    }

    /// An error if the wait is over; `waiting_for` are the global ranks that have not come.
    pub fn check(&self, waiting_for: impl FnOnce() -> Vec<usize>) -> Result<(), Failure> {
        if let Some(cause) = self.cancel.cause() {
            return Err(Failure::GenerationOver(cause.to_owned()));
        }
        let now = Instant::now();
        if now >= self.deadline {
            let waited_ms = now.duration_since(self.started).as_millis() as u64;
            return Err(Failure::TimedOut {
                waiting_for: waiting_for(),
                waited_ms,
            });
        }
        if let Some(pending) = &self.pending
            && now.duration_since(self.started) >= LASTING
        {
            pending.waits_for(waiting_for());
        }
        Ok(())
    }
}
