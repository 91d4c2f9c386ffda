//! One stream: its first error, the operations it ran last, its scratch memory, and its copies to and from the host; and
//! CUDA's events, as events that anybody can wait for.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::collections::VecDeque;
use std::ptr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::calls::{self, DriverError, written};
use super::driver::{CudaContext, RawStream, answer, driver_error, wait_until};
use super::memory::{DeviceMemory, DevicePtr, PinnedMemory, PinnedPool};
use crate::memory::{DeviceError, Event, EventState, Fetch, Memory};

/// Operations that an error of the stream names.
const RECENT: usize = 8;

/// Scratch memory starts at this size and grows to what operations ask for.
const SCRATCH_BYTES: usize = 32 << 20;

/// Bytes of one staging buffer; longer copies are cut.
const STAGING_BYTES: usize = 4 << 20;

/// Staging buffers of a stream. With several, the host fills one while others are copied.
const STAGING_SLOTS: usize = 4;

/// Longest wait of the host for what a stream has in flight. Collectives that never end are ended by their
/// communicator long before; this bounds a device that has stopped answering.
const PATIENCE: Duration = Duration::from_mins(30);

/// One stream of CUDA's.
#[derive(Debug)]
pub(crate) struct CudaStream {
    name: Arc<str>,
    raw: RawStream,
    context: Arc<CudaContext>,
    events: Arc<EventPool>,
    pinned: Arc<PinnedPool>,
    state: Mutex<StreamState>,
}

/// What changes as a stream is used.
#[derive(Debug, Default)]
pub(crate) struct StreamState {
    error: Option<DeviceError>,
    recent: VecDeque<&'static str>,
    scratch: Option<DeviceMemory>,
    /// Buffers of uploads, each with the event after its last copy, in the order of the copies.
    uploads: VecDeque<(PinnedMemory, CudaEvent)>,
}

/// A copy of device memory on its way to a buffer of the host.
#[derive(Debug)]
struct InFlight {
    memory: PinnedMemory,
    bytes: usize,
    copied: Event,
    pool: Arc<PinnedPool>,
}

impl InFlight {
    /// Waits for the copy, and shows its bytes.
    fn read<T>(self, deadline: Instant, show: impl FnOnce(&[u8]) -> T) -> Result<T, DeviceError> {
        self.copied.wait(deadline)?;
        // SAFETY: so many bytes of the buffer were zeroed and then written by the copy, which has ended.
        let shown = show(unsafe { std::slice::from_raw_parts(self.memory.ptr(), self.bytes) });
        self.pool.put(self.memory);
        Ok(shown)
    }
}

impl CudaStream {
    /// A stream that does not synchronise with the default one. Work of an `urgent` one goes first.
    pub(crate) fn new(
        name: &str,
        urgent: bool,
        context: &Arc<CudaContext>,
        events: &Arc<EventPool>,
        pinned: &Arc<PinnedPool>,
    ) -> Result<Self, DeviceError> {
        context.bind()?;
        let failed = |error| driver_error(format!("cannot make stream `{name}`"), error);
        let mut greatest = 0;
        // SAFETY: the function writes two integers.
        let least = written(0, |least| unsafe {
            calls::stream_priorities(least, &raw mut greatest)
        });
        let least = least.map_err(failed)?;
        let priority = if urgent { greatest } else { least };
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let made = written(ptr::null_mut(), |stream| {
            // SAFETY: the function writes one pointer.
            unsafe { calls::stream_create(stream, flags, priority) }
        });
        let raw = RawStream(made.map_err(failed)?);
        context.streams().add(raw);
        Ok(Self {
            name: name.into(),
            raw,
            context: context.clone(),
            events: events.clone(),
            pinned: pinned.clone(),
            state: Mutex::default(),
        })
    }

    /// For libraries that enqueue by themselves.
    pub(crate) const fn raw(&self) -> sys::CUstream {
        self.raw.0
    }

    /// For errors and traces.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Enqueues something, unless an earlier attempt failed. The first error stays until the next
    /// synchronisation.
    pub(crate) fn attempt(
        &self,
        op: &'static str,
        work: impl FnOnce(&mut StreamState) -> Result<(), DeviceError>,
    ) {
        let mut state = self.state.lock();
        if state.error.is_some() {
            return;
        }
        if state.recent.len() == RECENT {
            state.recent.pop_front();
        }
        state.recent.push_back(op);
        let outcome = self.context.bind().and_then(|()| work(&mut state));
        state.error = outcome.err();
    }

    /// The error that made the stream skip, if one did; it stays.
    pub(crate) fn error(&self) -> Option<DeviceError> {
        self.state.lock().error.clone()
    }

    /// Forgets that it skipped operations because something failed that it waited for. Any other error is returned.
    pub(crate) fn forget_upstream(&self) -> Result<(), DeviceError> {
        let error = self.state.lock().error.take();
        let own = error.filter(|error| !matches!(error, DeviceError::Upstream(_)));
        own.map_or(Ok(()), Err)
    }

    /// The event "all that is in the stream now has run"; `timed` if time is measured from or to it.
    pub(crate) fn record(&self, timed: bool) -> Result<CudaEvent, DeviceError> {
        self.context.bind()?;
        let failed = |error| driver_error(format!("cannot record an event on stream `{}`", self.name), error);
        let event = CudaEvent {
            raw: self.events.take(timed).map_err(failed)?,
            timed,
            stream: self.name.clone(),
            pool: self.events.clone(),
        };
        // SAFETY: the event was created by the pool, and nobody else uses it; the stream is alive.
        unsafe { calls::event_record(event.raw.0, self.raw()) }.map_err(failed)?;
        Ok(event)
    }

    /// Blocks the host until the stream is empty; gives its first error and forgets it.
    pub(crate) fn synchronize(&self) -> Result<(), DeviceError> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        let poll = || answer(unsafe { calls::stream_query(self.raw()) }, &self.name);
        let emptied = wait_until(poll, Instant::now() + PATIENCE, || {
            format!("stream `{}`", self.name)
        });
        let mut state = self.state.lock();
        let recent: Vec<_> = state.recent.drain(..).collect();
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        emptied.map_err(|error| with_operations(error, &recent))
    }

    /// Scratch memory of at least so many bytes, for the operation that is being enqueued. The next operation of
    /// the stream may overwrite it.
    pub(crate) fn scratch(&self, state: &mut StreamState, bytes: usize) -> Result<DevicePtr, DeviceError> {
        // Freed first: both at once might not fit. That waits for the kernels that use it.
        if let Some(small) = state.scratch.take_if(|scratch| scratch.bytes() < bytes) {
            small.free(PATIENCE)?;
        }
        if let Some(scratch) = &state.scratch {
            return Ok(scratch.address());
        }
        let name = format!("scratch of stream {}", self.name);
        let scratch = DeviceMemory::new(&self.context, &name, bytes.max(SCRATCH_BYTES))?;
        Ok(state.scratch.insert(scratch).address())
    }

    /// Copies bytes of the host into device memory; they may be reused on return.
    pub(crate) fn upload(
        &self,
        state: &mut StreamState,
        target: DevicePtr,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        for (part, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            let memory = self.staging(state)?;
            let to = target.offset(part * STAGING_BYTES).raw();
            // SAFETY: the buffer has room for a chunk, and its last copy has ended. The copy on the device reads it until
            // the event recorded below; the caller vouches for the target.
            let copied = unsafe {
                ptr::copy_nonoverlapping(chunk.as_ptr(), memory.ptr(), chunk.len());
                calls::copy_in(to, memory.ptr().cast(), chunk.len(), self.raw())
            };
            copied
                .map_err(|error| driver_error(format!("cannot upload on stream `{}`", self.name), error))?;
            state.uploads.push_back((memory, self.record(false)?));
        }
        Ok(())
    }

    /// A buffer for an upload, whose last copy has ended.
    fn staging(&self, state: &mut StreamState) -> Result<PinnedMemory, DeviceError> {
        if state.uploads.len() < STAGING_SLOTS {
            return PinnedMemory::new(&self.context, STAGING_BYTES);
        }
        let (memory, copied) = state.uploads.pop_front().expect("several slots");
        copied.wait(Instant::now() + PATIENCE)?;
        Ok(memory)
    }

    /// Bytes of device memory, once all that is in the stream has run.
    pub(crate) fn download(&self, source: DevicePtr, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        let mut out = Vec::with_capacity(bytes);
        while out.len() < bytes {
            let length = STAGING_BYTES.min(bytes - out.len());
            let part = self.copy_out(source.offset(out.len()), length)?;
            part.read(Instant::now() + PATIENCE, |bytes| out.extend_from_slice(bytes))?;
        }
        Ok(out)
    }

    /// Bytes of device memory that arrive while the host goes on.
    pub(crate) fn fetch(&self, source: DevicePtr, bytes: usize) -> Result<Fetch, DeviceError> {
        if let Some(error) = self.error() {
            return Err(error);
        }
        let part = self.copy_out(source, bytes)?;
        let arrived = part.copied.clone();
        Ok(Fetch::new(arrived, move || {
            part.read(Instant::now(), <[u8]>::to_vec)
        }))
    }

    /// Puts a copy to the host on the stream.
    fn copy_out(&self, source: DevicePtr, bytes: usize) -> Result<InFlight, DeviceError> {
        self.context.bind()?;
        let memory = self.pinned.take(bytes)?;
        // SAFETY: the buffer has room for the bytes and is this copy's alone until it has ended: it is read then, and
        // dropping it waits for the device. The caller vouches for the source.
        let copied = unsafe { calls::copy_out(memory.ptr().cast(), source.raw(), bytes, self.raw()) };
        copied.map_err(|error| driver_error(format!("cannot download on stream `{}`", self.name), error))?;
        Ok(InFlight {
            copied: Event::new(self.record(false)?),
            memory,
            bytes,
            pool: self.pinned.clone(),
        })
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // As long as the stream is known, freeing its memory waits for its work.
        let mut state = self.state.lock();
        state.scratch = None;
        state.uploads.clear();
        drop(state);
        self.context.streams().remove(self.raw);
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once; work in flight goes on without it.
            let _ = unsafe { calls::stream_destroy(self.raw()) };
        }
    }
}

/// Adds what ran last: a kernel that fails does so after it was enqueued.
fn with_operations(mut error: DeviceError, recent: &[&'static str]) -> DeviceError {
    if let DeviceError::Driver { doing, .. } = &mut error
        && !recent.is_empty()
    {
        let recent = recent.join(", ");
        *doing = format!("{doing}, in one of the operations {recent} or before");
    }
    error
}

/// Events of one device that nobody waits for any more, for the next one who records.
#[derive(Debug)]
pub(crate) struct EventPool {
    context: Arc<CudaContext>,
    /// Untimed and timed ones.
    free: [Mutex<Vec<RawEvent>>; 2],
}

#[derive(Debug)]
struct RawEvent(sys::CUevent);

// SAFETY: events may be used by any thread that has made the context its current one.
unsafe impl Send for RawEvent {}
// SAFETY: as above; the driver serialises.
unsafe impl Sync for RawEvent {}

impl EventPool {
    pub(crate) fn new(context: Arc<CudaContext>) -> Arc<Self> {
        Arc::new(Self {
            context,
            free: Default::default(),
        })
    }

    /// An event that nobody else uses. The context is the calling thread's current one.
    fn take(&self, timed: bool) -> Result<RawEvent, DriverError> {
        if let Some(recycled) = self.free[usize::from(timed)].lock().pop() {
            return Ok(recycled);
        }
        let flags = if timed {
            sys::CUevent_flags::CU_EVENT_DEFAULT
        } else {
            sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        // SAFETY: the function writes one pointer.
        let made = written(ptr::null_mut(), |event| unsafe {
            calls::event_create(event, flags as u32)
        });
        made.map(RawEvent)
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        for free in &mut self.free {
            for RawEvent(event) in free.get_mut().drain(..) {
                // SAFETY: created by this pool, destroyed once.
                let _ = unsafe { calls::event_destroy(event) };
            }
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(crate) struct CudaEvent {
    raw: RawEvent,
    timed: bool,
    stream: Arc<str>,
    pool: Arc<EventPool>,
}

impl CudaEvent {
    /// Lets later work of `stream` run after it.
    pub(crate) fn hold(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        self.pool.context.bind()?;
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: event and stream are alive; the driver keeps what it needs of the event once this returns.
        unsafe { calls::stream_wait(stream, self.raw.0, flags as u32) }
            .map_err(|error| driver_error(format!("cannot wait for stream `{}`", self.stream), error))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let raw = RawEvent(self.raw.0);
        self.pool.free[usize::from(self.timed)].lock().push(raw);
    }
}

impl EventState for CudaEvent {
    fn poll(&self) -> Option<Result<(), DeviceError>> {
        if let Err(error) = self.pool.context.bind() {
            return Some(Err(error));
        }
        // SAFETY: the event is alive.
        let answer = answer(unsafe { calls::event_query(self.raw.0) }, &self.stream)?;
        Some(answer.map_err(|error| self.pool.context.explain(error)))
    }

    fn wait(&self, deadline: Instant) -> Result<(), DeviceError> {
        wait_until(|| self.poll(), deadline, || format!("stream `{}`", self.stream))
    }

    fn since(&self, earlier: &Event) -> Option<Duration> {
        let earlier = earlier.state_as::<Self>()?;
        if !(self.timed && earlier.timed) {
            return None;
        }
        self.pool.context.bind().ok()?;
        let elapsed = written(0.0, |ms| {
            // SAFETY: both events are alive; one that is not reached is an error. The function writes one number.
            unsafe { calls::event_elapsed(ms, earlier.raw.0, self.raw.0) }
        });
        let ms: f32 = elapsed.ok()?;
        Duration::try_from_secs_f64(f64::from(ms) * 1e-3).ok()
    }
}
