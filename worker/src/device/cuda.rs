//! The GPU as a device, and the host beside it: page-locked arenas, copies to and from them, work of the host in a stream.
//!
//! A CUDA stream calls the host itself, between what comes before and what comes after: nobody waits for it. The
//! driver's thread that does so must not call the driver, not even to free memory. So what is done is put aside,
//! and freed by whoever enqueues the next work.
#![allow(unsafe_code, reason = "copies and calls of the CUDA driver")]

use std::any::Any;
use std::ffi::c_void;
use std::mem::take;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use parking_lot::{Mutex, RwLock};

use super::{
    Arena, ArenaSpec, Buffer, Device, DeviceError, Event, Fetch, HostSide, HostWork, Stream,
    expect_same_bytes,
};
use crate::cuda::calls;
use crate::cuda::driver::{CudaContext, GpuFacts, driver_error};
use crate::cuda::launch::{CudaOptions, DeviceKernels, LaunchContext};
use crate::cuda::memory::{DeviceMemory, DevicePtr, FETCH_BYTES, PinnedMemory, PinnedPool, address_of};
use crate::cuda::stream::{CudaEvent, CudaStream, EventPool, StreamState};
use crate::ops::Op;

/// A GPU.
#[derive(Debug)]
pub struct CudaDevice {
    kernels: DeviceKernels,
    events: Arc<EventPool>,
    pinned: Arc<PinnedPool>,
    streams: RwLock<Vec<Result<Arc<CudaStream>, DeviceError>>>,
    /// What [`Device::stamp`] copies: an f64.
    stamp: PinnedMemory,
}

impl CudaDevice {
    /// Starts the driver and opens a device.
    pub fn open(options: CudaOptions) -> Result<Self, DeviceError> {
        let context = CudaContext::open(options.ordinal, options.memory_patience)?;
        context.bind()?;
        Ok(Self {
            events: EventPool::new(context.clone()),
            pinned: PinnedPool::new(context.clone()),
            stamp: PinnedMemory::new(&context, size_of::<f64>())?,
            streams: RwLock::default(),
            kernels: DeviceKernels::new(context, options),
        })
    }

    /// `device` as a GPU, if it is one.
    pub fn of(device: &dyn Device) -> Option<&Self> {
        (device as &dyn Any).downcast_ref()
    }

    /// The driver's side of it.
    pub const fn context(&self) -> &Arc<CudaContext> {
        self.kernels.context()
    }

    /// Before the first communicator is aborted: see [`CudaContext::abandon`] and [`Device::stamp`].
    pub fn abandon(&self) {
        self.context().abandon();
        self.set_stamp(f64::NAN);
    }

    fn set_stamp(&self, stamp: f64) {
        // SAFETY: the memory is aligned to a page, zeroed, and lives as long as `self`; beside this, only the device reads it.
        let place = unsafe { AtomicU64::from_ptr(self.stamp.ptr().cast()) };
        place.store(stamp.to_bits(), Ordering::SeqCst);
    }

    /// A stream with a name for errors and traces. Work of an `urgent` one goes before that of others: a
    /// collective that waits for a multiprocessor would make all ranks wait.
    pub fn named_stream(&self, name: &str, urgent: bool) -> Stream {
        let stream = CudaStream::new(name, urgent, self.context(), &self.events, &self.pinned);
        let mut streams = self.streams.write();
        streams.push(stream.map(Arc::new));
        Stream(streams.len() as u32 - 1)
    }

    /// A stream as CUDA's own libraries take it.
    pub fn raw_stream(&self, stream: Stream) -> Result<sys::CUstream, DeviceError> {
        self.find(stream).map(|stream| stream.raw())
    }

    /// Address of a buffer in its memory.
    pub fn address(&self, buffer: &Buffer) -> Result<DevicePtr, DeviceError> {
        address_of(buffer, self.context())
    }

    /// # Panics
    /// If the stream is another device's.
    fn find(&self, stream: Stream) -> Result<Arc<CudaStream>, DeviceError> {
        let streams = self.streams.read();
        let found = streams.get(stream.0 as usize);
        found.expect("a stream of this device").clone()
    }

    /// Enqueues something, unless the stream has failed.
    fn attempt(
        &self,
        stream: Stream,
        what: &'static str,
        work: impl FnOnce(&CudaStream, &mut StreamState) -> Result<(), DeviceError>,
    ) {
        if let Ok(stream) = self.find(stream) {
            stream.attempt(what, |state| work(&stream, state));
        }
    }

    /// Loads the kernels of an operation and sets its scratch memory aside, so that nothing has to wait for that when it is
    /// enqueued. Its buffers may be anywhere, and are left alone. Only its products are made, in `spare`, if they find
    /// room there: the library loads its kernels when it first uses them. The first error is the stream's.
    pub fn prepare(&self, stream: Stream, op: &Op, spare: &Buffer) {
        self.launch(stream, op, Some(spare));
    }

    fn launch(&self, stream: Stream, op: &Op, spare: Option<&Buffer>) {
        let name = op.name();
        self.attempt(stream, name, |stream, state| {
            let spare = spare.map(|spare| Ok::<_, DeviceError>((self.address(spare)?, spare.bytes())));
            op.launch(&mut LaunchContext {
                op: name,
                device: &self.kernels,
                stream,
                state,
                spare: spare.transpose()?,
            })
        });
    }

    fn record_event(&self, stream: Stream, timed: bool) -> Event {
        let recorded = self.find(stream).and_then(|stream| match stream.error() {
            Some(error) => Err(error),
            None => stream.record(timed),
        });
        recorded.map_or_else(Event::failed, Event::new)
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        let (context, facts) = (self.context(), self.context().facts());
        let gib = facts.memory_bytes as f64 / f64::from(1 << 30);
        format!(
            "cuda:{} ({}, {}, {gib:.1} GiB)",
            context.ordinal(),
            facts.name,
            facts.arch()
        )
    }

    fn gpu(&self) -> Option<&GpuFacts> {
        Some(self.context().facts())
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let memory = DeviceMemory::new(self.context(), &spec.name, spec.bytes())?;
        Ok(Arena::new(spec, memory))
    }

    fn stream(&self) -> Stream {
        let is_first = self.streams.read().is_empty();
        self.named_stream(if is_first { "compute" } else { "auxiliary" }, false)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        self.launch(stream, &op, None);
    }

    fn record(&self, stream: Stream) -> Event {
        self.record_event(stream, false)
    }

    fn record_timed(&self, stream: Stream) -> Event {
        self.record_event(stream, true)
    }

    /// An event of CUDA's holds up the stream alone, and so does one made of them; for any other the host waits,
    /// here and now.
    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        let what = "wait for an event";
        if let Some(event) = event.state_as::<CudaEvent>() {
            self.attempt(stream, what, |stream, _| event.hold(stream.raw()));
        } else if event.parts().is_empty() {
            let outcome = event.wait(deadline);
            self.attempt(stream, what, |_, _| outcome);
        } else {
            for part in event.parts() {
                self.wait_event(stream, part, deadline);
            }
        }
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.find(stream)?.synchronize()
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        self.attempt(stream, "upload", |stream, state| {
            expect_same_bytes("upload", bytes.len(), dst.bytes())?;
            stream.upload(state, self.address(dst)?, bytes)
        });
    }

    fn download(&self, stream: Stream, src: &Buffer) -> Result<Vec<u8>, DeviceError> {
        let stream = self.find(stream)?;
        stream.synchronize()?;
        stream.download(self.address(src)?, src.bytes())
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn stamp(&self, stream: Stream, dst: &Buffer) {
        self.attempt(stream, "stamp", |stream, _| {
            expect_same_bytes("stamp", size_of::<f64>(), dst.bytes())?;
            let target = self.address(dst)?.raw();
            // SAFETY: the page-locked memory has this size, and lives as long as the device, which drops its streams before.
            let copied =
                unsafe { calls::copy_in(target, self.stamp.ptr().cast(), dst.bytes(), stream.raw()) };
            copied.map_err(|error| driver_error("cannot copy the stamp".to_owned(), error))
        });
    }

    fn recover(&self, stream: Stream, patience: Duration) -> Result<(), DeviceError> {
        self.context().recover(patience)?;
        self.set_stamp(0.0);
        for (number, other) in self.streams.write().iter_mut().enumerate() {
            if let Ok(other) = other {
                other.forget_upstream()?;
            }
            if number != stream.0 as usize {
                *other = Err(DeviceError::Upstream("the stream has gone".into()));
            }
        }
        Ok(())
    }

    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        if src.bytes() > FETCH_BYTES {
            return Fetch::arrived(self.download(stream, src));
        }
        let fetch = self.find(stream);
        let fetch = fetch.and_then(|stream| stream.fetch(self.address(src)?, src.bytes()));
        fetch.unwrap_or_else(|error| Fetch::arrived(Err(error)))
    }

    fn host_side(&self) -> Option<&dyn HostSide> {
        Some(self)
    }

    fn peak_bytes(&self) -> Option<usize> {
        Some(self.context().account().peak())
    }

    fn taken_bytes(&self) -> Option<usize> {
        let (free, all) = self.context().free_and_all_bytes()?;
        Some(all.saturating_sub(free))
    }
}

/// Finished work that is still to be freed. One list for the process, so that the driver's thread never drops the last
/// reference to a piece of work.
static DONE: Mutex<Vec<HostWork>> = Mutex::new(Vec::new());

/// Frees finished work, but not under the lock, which the driver's thread takes: to free page-locked memory the driver
/// may wait for its streams, and with them for that thread.
fn free_done() {
    let done = take(&mut *DONE.lock());
    drop(done);
}

impl HostSide for CudaDevice {
    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let memory = PinnedMemory::new(self.context(), spec.bytes())?;
        Ok(Arena::new(spec, memory))
    }

    fn named_stream(&self, name: &str) -> Stream {
        Self::named_stream(self, name, false)
    }

    unsafe fn copy(&self, stream: Stream, from: &Buffer, to: &Buffer) {
        self.attempt(stream, "copy beside the host", |stream, _| {
            expect_same_bytes("copy", from.bytes(), to.bytes())?;
            let copied = if is_pinned(to) {
                let source = self.address(from)?.raw();
                // SAFETY: the memory is page-locked and has so many bytes, and until the copy has ended nobody touches
                // them who is not ordered by the stream: the caller vouches for it.
                unsafe { calls::copy_out(to.byte_ptr()?.cast(), source, to.bytes(), stream.raw()) }
            } else {
                let target = self.address(to)?.raw();
                // SAFETY: as above.
                unsafe { calls::copy_in(target, from.byte_ptr()?.cast(), from.bytes(), stream.raw()) }
            };
            copied.map_err(|error| driver_error(format!("cannot copy `{}`", from.arena().name()), error))
        });
    }

    fn run(&self, stream: Stream, work: HostWork) {
        free_done();
        self.attempt(stream, "work of the host", |stream, _| {
            let work = Box::into_raw(Box::new(work)).cast::<c_void>();
            // SAFETY: the stream is alive; `call` takes what it is given once. Of a device that has failed it is never
            // called, and the work is leaked with the process.
            let launched = unsafe { calls::stream_call(stream.raw(), Some(call), work) };
            launched.map_err(|error| {
                // SAFETY: made above, and not handed over.
                drop(unsafe { Box::from_raw(work.cast::<HostWork>()) });
                driver_error("cannot put work of the host on a stream".to_owned(), error)
            })
        });
    }
}

/// The driver's thread comes here. A panic ends the process: its message has been written by then.
unsafe extern "C" fn call(work: *mut c_void) {
    // SAFETY: what `run` has made for this one call.
    let mut work = unsafe { Box::from_raw(work.cast::<HostWork>()) };
    work();
    DONE.lock().push(*work);
}

fn is_pinned(buffer: &Buffer) -> bool {
    buffer.arena().memory_as::<PinnedMemory>().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Says whether the lock was free when it was dropped.
    struct Witness(Arc<AtomicBool>);

    impl Drop for Witness {
        fn drop(&mut self) {
            self.0.store(DONE.try_lock().is_some(), Ordering::Relaxed);
        }
    }

    #[test]
    fn what_was_done_is_not_freed_under_the_lock_that_the_drivers_thread_takes() {
        let unlocked = Arc::new(AtomicBool::new(false));
        let witness = Witness(unlocked.clone());
        DONE.lock().push(Box::new(move || {
            let _ = &witness;
        }));
        free_done();
        assert!(unlocked.load(Ordering::Relaxed));
        assert!(DONE.lock().is_empty());
    }
}
