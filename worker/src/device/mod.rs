//! Devices: where memory lives and operations run.
//!
//! A device takes operations ([`crate::ops::Op`]) on *streams*: in order within a stream, in any order
//! between streams except where an [`Event`] orders them. Enqueueing never fails and may return before the
//! operation ran; errors surface at [`Device::synchronize`] and at events. The CPU runs an operation at once.
//!
//! | type | what it is |
//! |---|---|
//! | [`Device`] | the trait: allocate, enqueue, record, wait |
//! | [`Compute`] | a device and the stream of it that computes |
//! | [`CpuDevice`] | operations on host memory, at once, by the threads of a [`Cpu`] |
//! | [`CudaDevice`] | an NVIDIA GPU |
//! | [`HostSide`], [`HostPipeline`], [`HostPass`] | work of the host on numbers of a device with memory of its own |
//! | [`StateMemory`] | where state lies: on the device, on the host beside it, in a file |
//! | [`IdleDevice`] | carries nothing out, and has no memory |
//!
//! Their memory is [`crate::memory`]'s, whose types are passed on.

mod cpu;
mod cuda;
mod host_work;
mod offload;

pub use cpu::CpuDevice;
pub use cuda::CudaDevice;
pub use host_work::{HostPass, HostPipeline, HostSide, HostWork, PassWork};
pub use offload::{HostState, PIECE, StateBytes, StateMemory, StatePlace, evict, prefetch};

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytemuck::NoUninit;

use crate::cuda::GpuFacts;
pub(crate) use crate::memory::dtype;
pub use crate::memory::{
    Arena, ArenaSpec, Buffer, DType, DeviceError, Element, Event, EventState, Fetch, FileMemory, Held,
    HostMemory, HostMut, HostRef, Memory, Result, Sharing, Signal,
};
use crate::ops::Op;
pub use crate::ops::{Cpu, Isa};

/// An ordered queue of operations of one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream(pub u32);

/// Where memory lives and operations run.
pub trait Device: Any + Send + Sync {
    /// For people: `cpu (2 threads, avx512)`.
    fn name(&self) -> String;

    /// The GPU that it is, if it is one.
    fn gpu(&self) -> Option<&GpuFacts> {
        None
    }

    /// Zeroed memory.
    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError>;

    /// A new stream.
    fn stream(&self) -> Stream;

    /// Puts an operation at the end of a stream. After an error the stream skips operations until it is
    /// synchronised.
    fn enqueue(&self, stream: Stream, op: Op);

    /// Puts operations at the end of a stream, in this order. Whoever has several at once gives them at once: a device
    /// that carries numbers to the host for them can overlap one with the next.
    fn enqueue_all(&self, stream: Stream, ops: Vec<Op>) {
        for op in ops {
            self.enqueue(stream, op);
        }
    }

    /// The event "all that is in the stream now has run".
    fn record(&self, stream: Stream) -> Event;

    /// The same, for a point from or to which time is measured ([`EventState::since`]).
    fn record_timed(&self, stream: Stream) -> Event {
        self.record(stream)
    }

    /// Later operations of the stream run after `event`; `deadline` bounds the wait.
    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant);

    /// Blocks the host until the stream is empty; returns its first error since the last call.
    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError>;

    /// Puts a copy of `bytes` into `dst`, in stream order. `bytes` may be reused on return.
    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]);

    /// True if operations may still have to run when [`Device::enqueue`] returns. Whoever enqueues then reads results
    /// later, when more work is in the stream, so that the device does not wait for the host.
    fn is_asynchronous(&self) -> bool {
        false
    }

    /// Writes into `dst`, `[1]`, f64, in stream order: NaN if by then the device was abandoned, so that what the stream waited
    /// for may have been aborted. Else 0; a device that is never abandoned leaves the 0 that is there.
    fn stamp(&self, _stream: Stream, _dst: &Buffer) {}

    /// When collectives have failed and were aborted: waits, no longer than `patience`, until nothing is in flight, so that
    /// `stream` and memory can be used again. Other streams are gone. Of operations that failed with the collectives nothing is
    /// told; any other error is returned, and what the memory contains is then unknown.
    fn recover(&self, stream: Stream, _patience: Duration) -> Result<(), DeviceError> {
        // It has skipped operations since it waited for one that failed.
        let _ = self.synchronize(stream);
        Ok(())
    }

    /// Puts a copy of `src` into memory of the host, in stream order. A device that runs asynchronously has its own;
    /// this one synchronises.
    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        Fetch::arrived(self.download(stream, src))
    }

    /// Synchronises, then returns the bytes of `src`.
    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError>;

    /// Synchronises, then copies the bytes of `src` to `dst`, which has as many.
    fn download_to(&self, stream: Stream, src: &Buffer, dst: &mut [u8]) -> Result<(), DeviceError> {
        copy_same_length(&self.download(stream, src)?, dst)
    }

    /// What it offers beside its own memory; none if its memory is the host's.
    fn host_side(&self) -> Option<&dyn HostSide> {
        None
    }

    /// Most bytes of the device's own memory that this process held at one time; none if its memory is the host's.
    fn peak_bytes(&self) -> Option<usize> {
        None
    }

    /// Bytes of the device's own memory that are taken now: by this process with all that its libraries hold, and by all
    /// others; none if its memory is the host's, or that is unknown.
    fn taken_bytes(&self) -> Option<usize> {
        None
    }
}

/// A device, and the stream of it that computes. Its methods are those of the device on that stream. Clones are the same
/// stream.
#[derive(Clone)]
pub struct Compute {
    /// Holds the memory and runs the operations.
    pub device: Arc<dyn Device>,
    /// The compute stream.
    pub stream: Stream,
}

impl Compute {
    /// A new stream of a device.
    pub fn new(device: Arc<dyn Device>) -> Self {
        let stream = device.stream();
        Self { device, stream }
    }

    /// See [`Device::enqueue`].
    pub fn enqueue(&self, op: impl Into<Op>) {
        self.device.enqueue(self.stream, op.into());
    }

    /// See [`Device::record`].
    pub fn record(&self) -> Event {
        self.device.record(self.stream)
    }

    /// See [`Device::wait_event`].
    pub fn wait_event(&self, event: &Event, deadline: Instant) {
        self.device.wait_event(self.stream, event, deadline);
    }

    /// See [`Device::upload`].
    pub fn upload(&self, dst: &Buffer, numbers: &[impl NoUninit]) {
        (self.device).upload(self.stream, dst, bytemuck::cast_slice(numbers));
    }

    /// See [`Device::download`].
    pub fn download(&self, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        self.device.download(self.stream, src)
    }

    /// See [`Device::synchronize`].
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.device.synchronize(self.stream)
    }
}

/// A device that carries nothing out and whose memory is not there: for code that is followed to see what it would ask of
/// a device.
#[derive(Clone, Copy, Debug)]
pub struct IdleDevice;

impl Device for IdleDevice {
    fn name(&self) -> String {
        "idle".to_owned()
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        Ok(Arena::new(spec, Nowhere(spec.bytes())))
    }

    fn stream(&self) -> Stream {
        Stream(0)
    }

    fn enqueue(&self, _stream: Stream, _op: Op) {}

    fn record(&self, _stream: Stream) -> Event {
        Event::reached()
    }

    fn wait_event(&self, _stream: Stream, _event: &Event, _deadline: Instant) {}

    fn synchronize(&self, _stream: Stream) -> Result<(), DeviceError> {
        Ok(())
    }

    fn upload(&self, _stream: Stream, _dst: &Buffer, _bytes: &[u8]) {}

    fn download(&self, _stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        Err(DeviceError::NotHost(src.arena().name().to_owned()))
    }
}

/// Memory that is not there: so many bytes.
struct Nowhere(usize);

#[expect(unsafe_code, reason = "memory of its own kind")]
// SAFETY: there is no host pointer.
unsafe impl Memory for Nowhere {
    fn bytes(&self) -> usize {
        self.0
    }
}

/// An error unless what is copied has as much room where it goes.
pub(crate) fn expect_same_bytes(op: &'static str, from: usize, to: usize) -> Result<(), DeviceError> {
    if from == to {
        return Ok(());
    }
    let what = format!("{from} bytes into {to}");
    Err(DeviceError::Shape { op, what })
}

/// Copies, unless the lengths differ.
pub(crate) fn copy_same_length(bytes: &[u8], dst: &mut [u8]) -> Result<(), DeviceError> {
    expect_same_bytes("download", bytes.len(), dst.len())?;
    dst.copy_from_slice(bytes);
    Ok(())
}
