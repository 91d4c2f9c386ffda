//! The host beside a GPU: page-locked arenas, copies to and from them, and work of the host in a stream.
//!
//! A CUDA stream calls the host itself, between what comes before and what comes after: nobody waits for it. The
//! driver's thread that does so must not call the driver, not even to free memory. So what is done is put aside,
//! and freed by whoever enqueues the next work.
#![allow(unsafe_code, reason = "copies and calls of the CUDA driver")]

use std::ffi::c_void;
use std::mem::take;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::calls;
use super::device::CudaDevice;
use super::driver::driver_error;
use super::memory::PinnedMemory;
use crate::device::{Arena, ArenaSpec, Buffer, DeviceError, HostSide, HostWork, Stream};

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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

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
