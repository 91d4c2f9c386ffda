//! CUDA's events, as events that anybody can wait for.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::any::Any;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys;

use super::calls::{self, written};
use super::driver::{CudaContext, answer, driver_error, wait_until};
use crate::device::{DeviceError, Event, EventState};

/// Events of one device that nobody waits for any more, for the next one who records.
#[derive(Debug)]
pub(super) struct EventPool {
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
    pub(super) fn new(context: Arc<CudaContext>) -> Arc<Self> {
        Arc::new(Self {
            context,
            free: Default::default(),
        })
    }

    /// The event "all that is in the stream now has run".
    pub(super) fn record(
        self: &Arc<Self>,
        stream: sys::CUstream,
        stream_name: &Arc<str>,
        timed: bool,
    ) -> Result<CudaEvent, DeviceError> {
        self.context.bind()?;
        let failed = |error| driver_error(format!("cannot record an event on stream `{stream_name}`"), error);
        let recycled = self.free(timed).pop();
        let raw = if let Some(raw) = recycled {
            raw
        } else {
            let flags = if timed {
                sys::CUevent_flags::CU_EVENT_DEFAULT
            } else {
                sys::CUevent_flags::CU_EVENT_DISABLE_TIMING
            };
            // SAFETY: the function writes one pointer.
            let made = written(ptr::null_mut(), |event| unsafe {
                calls::event_create(event, flags as u32)
            });
            RawEvent(made.map_err(failed)?)
        };
        let event = CudaEvent {
            raw,
            timed,
            stream: stream_name.clone(),
            pool: self.clone(),
        };
        // SAFETY: the event was created above or before by this pool; the caller's stream is alive.
        unsafe { calls::event_record(event.raw.0, stream) }.map_err(failed)?;
        Ok(event)
    }

    fn free(&self, timed: bool) -> MutexGuard<'_, Vec<RawEvent>> {
        self.free[usize::from(timed)]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        for free in &mut self.free {
            for RawEvent(event) in free.get_mut().unwrap_or_else(PoisonError::into_inner).drain(..) {
                // SAFETY: created by this pool, destroyed once.
                let _ = unsafe { calls::event_destroy(event) };
            }
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub(super) struct CudaEvent {
    raw: RawEvent,
    timed: bool,
    stream: Arc<str>,
    pool: Arc<EventPool>,
}

impl CudaEvent {
    /// Lets later work of `stream` run after it.
    pub(super) fn hold(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
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
        self.pool.free(self.timed).push(raw);
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
        let earlier = earlier.state().as_any().downcast_ref::<Self>()?;
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

    fn as_any(&self) -> &dyn Any {
        self
    }
}
