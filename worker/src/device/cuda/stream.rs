//! One stream: its first error, the operations it ran last, its scratch memory, and pinned staging for copies.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::collections::VecDeque;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::calls::{self, written};
use super::driver::{CudaContext, RawStream, answer, driver_error, wait_until};
use super::event::{CudaEvent, EventPool};
use super::memory::{Account, DeviceMemory, DevicePtr, PinnedMemory};
use crate::device::{DeviceError, EventState, Memory};

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
pub(super) struct CudaStream {
    name: Arc<str>,
    raw: RawStream,
    context: Arc<CudaContext>,
    account: Arc<Account>,
    events: Arc<EventPool>,
    state: Mutex<StreamState>,
}

/// What changes as a stream is used.
#[derive(Debug, Default)]
pub(super) struct StreamState {
    error: Option<DeviceError>,
    recent: VecDeque<&'static str>,
    scratch: Option<DeviceMemory>,
    staging: VecDeque<StagingBuffer>,
}

/// A staging buffer, and the copy that last used it.
#[derive(Debug)]
struct StagingBuffer {
    memory: PinnedMemory,
    copied: Option<CudaEvent>,
}

impl CudaStream {
    /// A stream that does not synchronise with the default one. Work of an `urgent` one goes first.
    pub(super) fn new(
        name: &str,
        urgent: bool,
        account: &Arc<Account>,
        events: &Arc<EventPool>,
        context: &Arc<CudaContext>,
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
            account: account.clone(),
            events: events.clone(),
            state: Mutex::default(),
        })
    }

    /// For libraries that enqueue by themselves.
    pub(super) const fn raw(&self) -> sys::CUstream {
        self.raw.0
    }

    /// For errors and traces.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Enqueues something, unless an earlier attempt failed. The first error stays until the next
    /// synchronisation.
    pub(super) fn attempt(
        &self,
        op: &'static str,
        work: impl FnOnce(&mut StreamState) -> Result<(), DeviceError>,
    ) {
        let mut state = self.lock();
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
    pub(super) fn error(&self) -> Option<DeviceError> {
        self.lock().error.clone()
    }

    /// The event "all that is in the stream now has run".
    pub(super) fn record(&self) -> Result<CudaEvent, DeviceError> {
        self.events.record(self.raw(), &self.name, false)
    }

    /// The same, for measuring time.
    pub(super) fn record_timed(&self) -> Result<CudaEvent, DeviceError> {
        self.events.record(self.raw(), &self.name, true)
    }

    /// Blocks the host until the stream is empty; gives its first error and forgets it.
    pub(super) fn synchronize(&self) -> Result<(), DeviceError> {
        self.context.bind()?;
        // SAFETY: the stream is alive.
        let poll = || answer(unsafe { calls::stream_query(self.raw()) }, &self.name);
        let emptied = wait_until(poll, Instant::now() + PATIENCE, || {
            format!("stream `{}`", self.name)
        });
        let mut state = self.lock();
        let recent: Vec<_> = state.recent.drain(..).collect();
        if let Some(error) = state.error.take() {
            return Err(error);
        }
        emptied.map_err(|error| with_operations(error, &recent))
    }

    /// Scratch memory of at least so many bytes, for the operation that is being enqueued. The next operation of
    /// the stream may overwrite it.
    pub(super) fn scratch(&self, state: &mut StreamState, bytes: usize) -> Result<DevicePtr, DeviceError> {
        let enough = state
            .scratch
            .as_ref()
            .is_some_and(|scratch| scratch.bytes() >= bytes);
        if !enough {
            // Freed first: both at once might not fit. That waits for the kernels that use it.
            if let Some(scratch) = state.scratch.take() {
                scratch.free(PATIENCE)?;
            }
            let wanted = bytes.max(SCRATCH_BYTES);
            let name = format!("scratch of stream {}", self.name);
            state.scratch = Some(DeviceMemory::new(&self.context, &self.account, &name, wanted)?);
        }
        let scratch = state
            .scratch
            .as_ref()
            .expect("allocated above if it was not there");
        Ok(DevicePtr::new(scratch.address()))
    }

    /// Copies bytes of the host into device memory; they may be reused on return.
    pub(super) fn upload(
        &self,
        state: &mut StreamState,
        target: DevicePtr,
        bytes: &[u8],
    ) -> Result<(), DeviceError> {
        for (part, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            let mut slot = self.staging(state)?;
            let to = target.offset(part * STAGING_BYTES).raw();
            // SAFETY: a slot has room for a chunk, and its last copy has ended. The copy on the device reads the
            // slot until the event recorded below; the caller vouches for the target.
            let copied = unsafe {
                ptr::copy_nonoverlapping(chunk.as_ptr(), slot.memory.ptr(), chunk.len());
                calls::copy_in(to, slot.memory.ptr().cast(), chunk.len(), self.raw())
            };
            copied
                .map_err(|error| driver_error(format!("cannot upload on stream `{}`", self.name), error))?;
            slot.copied = Some(self.record()?);
            state.staging.push_back(slot);
        }
        Ok(())
    }

    /// Bytes of device memory, once all that is in the stream has run.
    pub(super) fn download(&self, source: DevicePtr, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        let failed = |error| driver_error(format!("cannot download on stream `{}`", self.name), error);
        let mut out = Vec::with_capacity(bytes);
        while out.len() < bytes {
            let length = STAGING_BYTES.min(bytes - out.len());
            let mut state = self.lock();
            let slot = self.staging(&mut state)?;
            let from = source.offset(out.len()).raw();
            // SAFETY: a slot has room for a chunk, and its last copy has ended; nobody has a slice of it. The caller
            // vouches for the source. The slot is read after the copy has ended.
            let copied = unsafe { calls::copy_out(slot.memory.ptr().cast(), from, length, self.raw()) };
            copied.map_err(failed)?;
            let copied = self.record();
            let outcome = copied.and_then(|event| event.wait(Instant::now() + PATIENCE));
            // SAFETY: as above; the copy has ended if `outcome` says so, and is not looked at otherwise.
            let chunk = unsafe { std::slice::from_raw_parts(slot.memory.ptr(), length) };
            outcome.map(|()| out.extend_from_slice(chunk))?;
            state.staging.push_back(slot);
        }
        Ok(out)
    }

    /// A staging buffer whose last copy has ended.
    fn staging(&self, state: &mut StreamState) -> Result<StagingBuffer, DeviceError> {
        if state.staging.len() < STAGING_SLOTS {
            let memory = PinnedMemory::new(&self.context, STAGING_BYTES)?;
            return Ok(StagingBuffer { memory, copied: None });
        }
        let mut slot = state.staging.pop_front().expect("several slots");
        if let Some(copied) = slot.copied.take() {
            copied.wait(Instant::now() + PATIENCE)?;
        }
        Ok(slot)
    }

    fn lock(&self) -> MutexGuard<'_, StreamState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // As long as the stream is known, freeing its memory waits for its work.
        let mut state = self.lock();
        state.scratch = None;
        state.staging.clear();
        drop(state);
        self.context.streams().remove(self.raw);
        if self.context.bind().is_ok() {
            // SAFETY: created in `new`, destroyed once; work in flight goes on without it.
            let _ = unsafe { calls::stream_destroy(self.raw()) };
        }
    }
}

/// Adds what ran last: a kernel that fails does so after it was enqueued.
fn with_operations(error: DeviceError, recent: &[&'static str]) -> DeviceError {
    match error {
        DeviceError::Driver { doing, cause, hint } if !recent.is_empty() => DeviceError::Driver {
            doing: format!(
                "{doing}, in one of the operations {} or before",
                recent.join(", ")
            ),
            cause,
            hint,
        },
        other => other,
    }
}
