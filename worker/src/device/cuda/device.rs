//! The GPU as a device, and the host beside it: page-locked arenas, copies to and from them, work of the host in a stream.
//!
//! A CUDA stream calls the host itself, between what comes before and what comes after: nobody waits for it. The
//! driver's thread that does so must not call the driver, not even to free memory. So what is done is put aside,
//! and freed by whoever enqueues the next work.
#![allow(unsafe_code, reason = "copies and calls of the CUDA driver")]

use std::any::Any;
use std::ffi::c_void;
use std::mem::take;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use cudarc::driver::sys;

use super::calls;
use super::driver::{CudaContext, driver_error};
use super::event::{CudaEvent, EventPool};
use super::launch::{CudaOptions, DeviceKernels, LaunchContext};
use super::memory::{Account, DeviceMemory, DevicePtr, FETCH_BYTES, FetchPool, PinnedMemory, address_of};
use super::stream::CudaStream;
use crate::device::{
    Arena, ArenaSpec, Buffer, Device, DeviceError, Event, Fetch, HostSide, HostWork, Stream,
};
use crate::ops::Op;

/// A GPU.
#[derive(Debug)]
pub struct CudaDevice {
    context: Arc<CudaContext>,
    kernels: DeviceKernels,
    account: Arc<Account>,
    events: Arc<EventPool>,
    fetches: FetchPool,
    streams: RwLock<Vec<Result<Arc<CudaStream>, DeviceError>>>,
}

impl CudaDevice {
    /// Starts the driver and opens a device.
    pub fn open(options: CudaOptions) -> Result<Self, DeviceError> {
        let context = CudaContext::open(options.ordinal)?;
        context.bind()?;
        Ok(Self {
            events: EventPool::new(context.clone()),
            account: Arc::default(),
            fetches: FetchPool::default(),
            streams: RwLock::default(),
            kernels: DeviceKernels::new(context.clone(), options),
            context,
        })
    }

    /// `device` as a GPU, if it is one.
    #[must_use]
    pub fn of(device: &dyn Device) -> Option<&Self> {
        (device as &dyn Any).downcast_ref()
    }

    /// What it was opened with.
    #[must_use]
    pub const fn options(&self) -> &CudaOptions {
        self.kernels.options()
    }

    /// The driver's side of it.
    #[must_use]
    pub const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// A stream with a name for errors and traces. Work of an `urgent` one goes before that of others: a
    /// collective that waits for a multiprocessor would make all ranks wait.
    #[must_use]
    pub fn named_stream(&self, name: &str, urgent: bool) -> Stream {
        let stream = CudaStream::new(name, urgent, &self.account, &self.events, &self.context);
        let mut streams = self.streams.write().unwrap_or_else(PoisonError::into_inner);
        streams.push(stream.map(Arc::new));
        Stream(streams.len() as u32 - 1)
    }

    /// A stream as CUDA's own libraries take it.
    pub fn raw_stream(&self, stream: Stream) -> Result<sys::CUstream, DeviceError> {
        self.find(stream).map(|stream| stream.raw())
    }

    /// Address of a buffer in its memory.
    pub fn address(&self, buffer: &Buffer) -> Result<DevicePtr, DeviceError> {
        address_of(buffer, &self.context)
    }

    /// # Panics
    /// If the stream is another device's.
    fn find(&self, stream: Stream) -> Result<Arc<CudaStream>, DeviceError> {
        let streams = self.streams.read().unwrap_or_else(PoisonError::into_inner);
        streams
            .get(stream.0 as usize)
            .expect("a stream of this device")
            .clone()
    }

    /// Enqueues something of the driver's, unless the stream has failed.
    pub(super) fn attempt(
        &self,
        stream: Stream,
        what: &'static str,
        work: impl FnOnce(sys::CUstream) -> Result<(), DeviceError>,
    ) {
        if let Ok(stream) = self.find(stream) {
            stream.attempt(what, |_| work(stream.raw()));
        }
    }

    fn record_by(
        &self,
        stream: Stream,
        record: impl FnOnce(&CudaStream) -> Result<CudaEvent, DeviceError>,
    ) -> Event {
        let recorded = self.find(stream).and_then(|stream| match stream.error() {
            Some(error) => Err(error),
            None => record(&stream),
        });
        recorded.map_or_else(Event::failed, Event::new)
    }

    fn begin_fetch(&self, stream: Stream, src: &Buffer) -> Result<Fetch, DeviceError> {
        let stream = self.find(stream)?;
        if let Some(error) = stream.error() {
            return Err(error);
        }
        self.context.bind()?;
        let copy = self
            .fetches
            .copy(&self.context, stream.raw(), self.address(src)?, src.bytes())?;
        Ok(Fetch::new(Event::new(stream.record()?), move || Ok(copy.read())))
    }
}

impl Device for CudaDevice {
    fn name(&self) -> String {
        let context = &self.context;
        let gib = context.memory_bytes() as f64 / f64::from(1 << 30);
        format!(
            "cuda:{} ({}, {}, {gib:.1} GiB)",
            context.ordinal(),
            context.name(),
            context.arch()
        )
    }

    fn alloc(&self, spec: &ArenaSpec) -> Result<Arena, DeviceError> {
        let bytes = spec.bytes();
        let memory = DeviceMemory::new(&self.context, &self.account, &spec.name, bytes)?;
        Ok(Arena::new(spec, memory))
    }

    fn stream(&self) -> Stream {
        let first = self
            .streams
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .is_empty();
        self.named_stream(if first { "compute" } else { "auxiliary" }, false)
    }

    fn enqueue(&self, stream: Stream, op: Op) {
        if let Ok(stream) = self.find(stream) {
            let name = op.name();
            stream.attempt(name, |state| {
                op.launch(&mut LaunchContext::new(name, &self.kernels, &stream, state))
            });
        }
    }

    fn record(&self, stream: Stream) -> Event {
        self.record_by(stream, CudaStream::record)
    }

    fn record_timed(&self, stream: Stream) -> Event {
        self.record_by(stream, CudaStream::record_timed)
    }

    /// An event of CUDA's holds up the stream alone, and so does one made of them; for any other the host waits,
    /// here and now.
    fn wait_event(&self, stream: Stream, event: &Event, deadline: Instant) {
        let Ok(found) = self.find(stream) else {
            return;
        };
        if let Some(event) = event.state().as_any().downcast_ref::<CudaEvent>() {
            found.attempt("wait for an event", |_| event.hold(found.raw()));
        } else if event.state().parts().is_empty() {
            let outcome = event.wait(deadline);
            found.attempt("wait for an event", |_| outcome);
        } else {
            for part in event.state().parts() {
                self.wait_event(stream, part, deadline);
            }
        }
    }

    fn synchronize(&self, stream: Stream) -> Result<(), DeviceError> {
        self.find(stream)?.synchronize()
    }

    fn upload(&self, stream: Stream, dst: &Buffer, bytes: &[u8]) {
        let Ok(stream) = self.find(stream) else {
            return;
        };
        stream.attempt("upload", |state| {
            if dst.bytes() != bytes.len() {
                return Err(DeviceError::Shape {
                    op: "upload",
                    what: format!("{} bytes into a buffer of {}", bytes.len(), dst.bytes()),
                });
            }
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

    fn fetch(&self, stream: Stream, src: &Buffer) -> Fetch {
        if src.bytes() > FETCH_BYTES {
            return Fetch::arrived(self.download(stream, src));
        }
        self.begin_fetch(stream, src)
            .unwrap_or_else(|error| Fetch::arrived(Err(error)))
    }

    fn host_side(&self) -> Option<&dyn HostSide> {
        Some(self)
    }

    fn peak_bytes(&self) -> Option<usize> {
        Some(self.account.peak())
    }

    fn taken_bytes(&self) -> Option<usize> {
        let (free, all) = self.context.free_and_all_bytes()?;
        Some(all.saturating_sub(free))
    }
}

/// Of the process, so that the last to know of a piece of work is never the driver's thread.
static DONE: Done = Done(Mutex::new(Vec::new()));

/// Work that has been done and is still to be freed.
struct Done(Mutex<Vec<HostWork>>);

impl Done {
    fn put(&self, work: HostWork) {
        self.lock().push(work);
    }

    /// Frees what is there. Not under the lock, which the driver's thread takes: to free page-locked memory the driver
    /// may wait for its streams, and with them for that thread.
    fn free(&self) {
        let done = take(&mut *self.lock());
        drop(done);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<HostWork>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
        self.attempt(stream, "copy beside the host", |stream| {
            if from.bytes() != to.bytes() {
                let what = format!("{} bytes into {}", from.bytes(), to.bytes());
                return Err(DeviceError::Shape { op: "copy", what });
            }
            let copied = if is_pinned(to) {
                let source = self.address(from)?.raw();
                // SAFETY: the memory is page-locked and has so many bytes, and until the copy has ended nobody touches
                // them who is not ordered by the stream: the caller vouches for it.
                unsafe { calls::copy_out(to.byte_ptr()?.cast(), source, to.bytes(), stream) }
            } else {
                let target = self.address(to)?.raw();
                // SAFETY: as above.
                unsafe { calls::copy_in(target, from.byte_ptr()?.cast(), from.bytes(), stream) }
            };
            copied.map_err(|error| driver_error(format!("cannot copy `{}`", from.arena().name()), error))
        });
    }

    fn run(&self, stream: Stream, work: HostWork) {
        DONE.free();
        self.attempt(stream, "work of the host", |stream| {
            let work = Box::into_raw(Box::new(work)).cast::<c_void>();
            // SAFETY: the stream is alive; `call` takes what it is given once. Of a device that has failed it is never
            // called, and the work is leaked with the process.
            let launched = unsafe { calls::stream_call(stream, Some(call), work) };
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
    DONE.put(*work);
}

fn is_pinned(buffer: &Buffer) -> bool {
    buffer.arena().memory().as_any().is::<PinnedMemory>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    /// Says whether the lock was free when it was dropped.
    struct Witness {
        done: Arc<Done>,
        unlocked: Arc<AtomicBool>,
    }

    impl Drop for Witness {
        fn drop(&mut self) {
            self.unlocked
                .store(self.done.0.try_lock().is_ok(), Ordering::Relaxed);
        }
    }

    #[test]
    fn what_was_done_is_not_freed_under_the_lock_that_the_drivers_thread_takes() {
        let done = Arc::new(Done(Mutex::default()));
        let unlocked = Arc::new(AtomicBool::new(false));
        let witness = Witness {
            done: done.clone(),
            unlocked: unlocked.clone(),
        };
        done.put(Box::new(move || {
            let _ = &witness;
        }));
        done.free();
        assert!(unlocked.load(Ordering::Relaxed));
        assert!(done.lock().is_empty());
    }
}
