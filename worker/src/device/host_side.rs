//! The host, as a device that has memory of its own sees it: page-locked memory, copies, and work in a stream.
#![allow(
    unsafe_code,
    reason = "copies that run later, into memory that the host can reach"
)]

use super::{Arena, ArenaSpec, Buffer, DeviceError, Stream};

/// Work of the host in a stream. It is called once, when the stream gets there, maybe by a thread of the device's
/// driver: it must not call the device. What it owns is dropped later, by a thread that may.
pub type HostWork = Box<dyn FnMut() + Send>;

/// What a device offers beside its own memory; [`super::Ferry`] makes something safe of it.
pub trait HostSide: Send + Sync {
    /// Zeroed memory of the host, to and from which the device copies while the host goes on: page-locked on a GPU.
    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError>;

    /// A new stream with a name for errors and traces.
    fn named_stream(&self, name: &str) -> Stream;

    /// Puts a copy of `from` into `to`, which has as many bytes, on the stream. One of them is the device's, the
    /// other one from [`HostSide::alloc`].
    ///
    /// # Safety
    /// The device does not borrow the host's side as the host does. From now until the copy has ended nobody but work
    /// that the stream orders before or after it may touch that range.
    unsafe fn copy(&self, stream: Stream, from: &Buffer, to: &Buffer);

    /// Puts `work` on the stream.
    fn run(&self, stream: Stream, work: HostWork);
}
