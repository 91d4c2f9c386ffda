//! Numbers on their way to the host: pinned memory that the device writes, lent out and taken back.
#![allow(unsafe_code, reason = "copies of the CUDA driver into pinned memory")]

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::calls;
use super::driver::driver_error;
use super::memory::PinnedMemory;
use super::{Context, DevicePtr};
use crate::device::DeviceError;

/// Bytes of one buffer. Whoever fetches more waits for it.
pub(super) const FETCH_BYTES: usize = 64 << 10;

/// Buffers for fetches that are done, for the next ones. Clones are the same pool.
#[derive(Clone, Debug, Default)]
pub(super) struct FetchPool(Arc<Mutex<Vec<PinnedMemory>>>);

/// A copy in flight.
#[derive(Debug)]
pub(super) struct InFlight {
    memory: PinnedMemory,
    bytes: usize,
    pool: FetchPool,
}

impl FetchPool {
    /// Puts a copy of at most [`FETCH_BYTES`] bytes into the stream.
    pub(super) fn copy(
        &self,
        context: &Arc<Context>,
        stream: sys::CUstream,
        source: DevicePtr,
        bytes: usize,
    ) -> Result<InFlight, DeviceError> {
        assert!(bytes <= FETCH_BYTES, "larger copies are not fetched");
        let recycled = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match recycled {
            Some(memory) => memory,
            None => PinnedMemory::new(context, FETCH_BYTES)?,
        };
        let in_flight = InFlight {
            memory,
            bytes,
            pool: self.clone(),
        };
        // SAFETY: the buffer has room for the bytes and is this copy's alone until it has ended: `read` is called
        // then, and dropping the buffer waits for it. The caller vouches for the source.
        let copied = unsafe { calls::copy_out(in_flight.memory.ptr().cast(), source.raw(), bytes, stream) };
        copied.map_err(|error| driver_error("cannot fetch numbers".to_owned(), error))?;
        Ok(in_flight)
    }
}

impl InFlight {
    /// The bytes. The copy must have ended: an event after it was reached.
    pub(super) fn read(self) -> Vec<u8> {
        // SAFETY: so many bytes of the buffer were zeroed and then written by the copy, which has ended.
        let bytes = unsafe { std::slice::from_raw_parts(self.memory.ptr(), self.bytes) }.to_vec();
        let mut free = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        free.push(self.memory);
        bytes
    }
}
