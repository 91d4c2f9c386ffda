//! Operations that run on a stream of the device: the host only puts them there.

use std::sync::Arc;

use super::{Failure, Request, Transport, Wait, WireBytes, WorkTimes};
use crate::device::{Arena, ArenaSpec, Device, Event};

/// One group's way to move bytes on a stream. Calls come one at a time, in the same order on every rank.
///
/// The stream is the transport's own: an operation runs after its input is ready and after those before it, beside
/// whatever else the device computes.
pub trait StreamTransport: Send {
    /// Rank of this process in the group.
    fn rank(&self) -> usize;

    /// Global rank of each member, in order of rank.
    fn members(&self) -> &[usize];

    /// Puts one operation, to run after `after`, at the end of the stream. `wait` bounds the call, not the operation,
    /// whose own bound is that of the transport and begins when its turn comes. The transport keeps the buffer's
    /// memory until the operation has ended.
    fn enqueue(
        &mut self,
        sequence: u64,
        request: &Request,
        after: &Event,
        wait: &Wait,
    ) -> Result<Arc<dyn Flight>, Failure>;

    /// Allocates an arena of the same size on every rank of the group, placed where operations on it are fastest. A
    /// collective call.
    fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure>;

    /// As [`Transport::split`].
    fn split(
        &mut self,
        name: &str,
        members: &[usize],
        wait: &Wait,
    ) -> Result<Box<dyn StreamTransport>, Failure>;

    /// Bytes of the operations that were enqueued, by the formulas of [`WireBytes`].
    fn wire_bytes(&self) -> WireBytes;

    /// Waits for what is in the stream and leaves the group. The last call.
    fn shutdown(&mut self, wait: &Wait);

    /// The process is about to end without that, because something failed: waits, a bounded time, for threads that give
    /// up what is in the streams of this group and of its parts, and ends them. The last call.
    fn abandon(&mut self);
}

/// One operation in a stream.
pub trait Flight: Send + Sync {
    /// The point behind it. The stream may also get there because the operation was given up: only
    /// [`Flight::outcome`] knows.
    fn done(&self) -> &Event;

    /// The point at which its turn had come and its input was there, if the stream has one that is timed, as the other
    /// one then is.
    fn started(&self) -> Option<&Event> {
        None
    }

    /// How it ended, once it has. It has when [`Flight::done`] is reached; if it failed, perhaps before.
    fn outcome(&self) -> Option<Result<WorkTimes, Failure>>;
}

/// Either kind of transport.
pub(super) enum Route {
    /// The host carries operations out.
    Host(Box<dyn Transport>),
    /// The device does.
    Stream(Box<dyn StreamTransport>),
}

impl Route {
    pub(super) fn rank(&self) -> usize {
        match self {
            Self::Host(transport) => transport.rank(),
            Self::Stream(transport) => transport.rank(),
        }
    }

    pub(super) fn members(&self) -> &[usize] {
        match self {
            Self::Host(transport) => transport.members(),
            Self::Stream(transport) => transport.members(),
        }
    }

    pub(super) fn alloc_shared(
        &mut self,
        device: &Arc<dyn Device>,
        spec: &ArenaSpec,
        wait: &Wait,
    ) -> Result<Arena, Failure> {
        match self {
            Self::Host(transport) => transport.alloc_shared(device, spec, wait),
            Self::Stream(transport) => transport.alloc_shared(device, spec, wait),
        }
    }

    pub(super) fn split(&mut self, name: &str, members: &[usize], wait: &Wait) -> Result<Self, Failure> {
        match self {
            Self::Host(transport) => Ok(Self::Host(transport.split(name, members, wait)?)),
            Self::Stream(transport) => Ok(Self::Stream(transport.split(name, members, wait)?)),
        }
    }

    pub(super) fn wire_bytes(&self) -> WireBytes {
        match self {
            Self::Host(transport) => transport.wire_bytes(),
            Self::Stream(transport) => transport.wire_bytes(),
        }
    }
}
