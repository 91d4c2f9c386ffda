//! Memory of the device, page-locked memory of the host, and the pool of the buffers in which numbers travel to the host.
#![allow(unsafe_code, reason = "memory of the CUDA driver")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::calls::{self, DriverError, written};
use super::driver::{CudaContext, driver_error, mib};
use crate::memory::{Buffer, DeviceError, Memory};

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePtr(sys::CUdeviceptr);

impl DevicePtr {
    /// For kernels that take an optional pointer.
    pub const NULL: Self = Self(0);

    /// The address `bytes` further.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }

    /// The address as the driver's type.
    pub const fn raw(self) -> sys::CUdeviceptr {
        self.0
    }

    /// The address as a pointer, for libraries.
    pub const fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }
}

/// Zeroed memory of a device, which the host cannot reach. Freeing it waits for the work in flight on the device, unless
/// that was abandoned; dropped, it waits some seconds at most, and otherwise stays until the process ends.
#[derive(Debug)]
pub struct DeviceMemory {
    address: sys::CUdeviceptr,
    bytes: usize,
    name: String,
    context: Arc<CudaContext>,
}

impl DeviceMemory {
    /// Allocates and zeroes; both are done on return.
    pub(crate) fn new(context: &Arc<CudaContext>, name: &str, bytes: usize) -> Result<Self, DeviceError> {
        context.bind()?;
        let length = bytes.max(1);
        let allocate = || {
            // SAFETY: the function writes one address. Nothing reads the memory before it is zeroed below.
            written(0, |address| unsafe { calls::memory_alloc(address, length) })
        };
        let address = context.await_memory(length, allocate);
        let address = address.map_err(|error| out_of_memory(context, name, bytes, error))?;
        context.account().add(name, length);
        let memory = Self {
            address,
            bytes: length,
            name: name.to_owned(),
            context: context.clone(),
        };
        // SAFETY: the memory was just allocated, with this length, and nobody else knows it.
        let zeroed = unsafe { calls::fill(address, 0, length) };
        let finished = zeroed.and_then(|()| {
            // On the device that is asynchronous to the host, and ordered with the default stream only.
            // SAFETY: the default stream always exists.
            unsafe { calls::stream_synchronize(std::ptr::null_mut()) }
        });
        finished.map_err(|error| driver_error(format!("cannot zero `{name}`"), error))?;
        Ok(memory)
    }

    /// Its first byte.
    pub const fn address(&self) -> DevicePtr {
        DevicePtr(self.address)
    }

    /// Frees it once nothing is in flight on the device. An error if that takes longer than `patience`, or will never be.
    pub(crate) fn free(mut self, patience: Duration) -> Result<(), DeviceError> {
        self.context.come_to_rest(patience)?;
        self.release();
        Ok(())
    }

    /// Once, and only where the device is at rest.
    fn release(&mut self) {
        let address = std::mem::take(&mut self.address);
        if address != 0 {
            // SAFETY: allocated by `new`, freed once. No kernel that was launched with the address is still running.
            let _ = unsafe { calls::memory_free(address) };
            self.context.account().subtract(&self.name, self.bytes);
        }
    }
}

// SAFETY: there is no host pointer.
unsafe impl Memory for DeviceMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Of a device that has failed or was abandoned the memory goes with the process.
        if self.address != 0 && self.context.comes_to_rest() {
            self.release();
        }
    }
}

fn out_of_memory(context: &CudaContext, name: &str, bytes: usize, error: DriverError) -> DeviceError {
    let free = context.free_and_all_bytes();
    let free = free.map_or("an unknown amount".to_owned(), |(free, _)| mib(free));
    let (account, all) = (context.account(), context.facts().memory_bytes);
    let never_fits = never_fits(account.bytes(), bytes, all);
    let verdict = if never_fits {
        "; that is more than the whole GPU has, so a retry would fail too"
    } else {
        ""
    };
    DeviceError::OutOfMemory {
        what: name.to_owned(),
        bytes,
        cause: format!(
            "{}; {context} has {free} free of {}, this rank holds {}: {}{verdict}",
            error.words(),
            mib(all),
            mib(account.bytes()),
            account.words()
        ),
        hint: "lower `train.micro_batch` and raise `train.grad_accumulation`, use `train.precision: bf16`, or \
               shard with `parallel.strategy: zero1`, `zero2` or `zero3`; the table before the first step shows the memory per rank"
            .to_owned(),
        never_fits,
    }
}

/// True if `bytes` more than what is held are more than `all` that a device has: others' memory may be freed, that may not.
const fn never_fits(held: usize, bytes: usize, all: usize) -> bool {
    held.saturating_add(bytes) > all
}

/// Page-locked memory of the host, which copies to and from the device need to be asynchronous.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    ptr: NonNull<u8>,
    bytes: usize,
    context: Arc<CudaContext>,
}

// SAFETY: plain memory, owned by this value; access to it is regulated by the arena, or by whoever has it alone.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above; `&PinnedMemory` only gives out the address.
unsafe impl Sync for PinnedMemory {}

// SAFETY: so many zeroed bytes at `ptr`, which the driver aligns to a page, owned by this value until it is dropped.
// The device reads and writes them only in copies whose callers order them with everybody else.
unsafe impl Memory for PinnedMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        Some(self.ptr)
    }
}

impl PinnedMemory {
    /// Allocates zeroed memory.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
        context.bind()?;
        let length = bytes.max(1);
        let refuse = |cause| DeviceError::OutOfMemory {
            what: "pinned staging".to_owned(),
            bytes,
            cause,
            hint: "raise the limit on locked memory (`ulimit -l`), or free main memory".to_owned(),
            never_fits: false,
        };
        let allocated = written(std::ptr::null_mut(), |address| {
            // SAFETY: the function writes one address. The memory is zeroed before anybody sees it.
            unsafe { calls::host_alloc(address, length, 0) }
        });
        let ptr = allocated.map_err(|error| refuse(error.words()))?;
        let ptr =
            NonNull::new(ptr.cast::<u8>()).ok_or_else(|| refuse("the driver gave no address".to_owned()))?;
        // SAFETY: `length` bytes were allocated at `ptr`.
        unsafe { ptr.write_bytes(0, length) };
        Ok(Self {
            ptr,
            bytes: length,
            context: context.clone(),
        })
    }

    /// Its first byte, for copies that the caller orders.
    pub(crate) const fn ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if self.context.comes_to_rest() {
            // SAFETY: allocated by `new`, freed once. No copy from it is in flight any more.
            let _ = unsafe { calls::host_free(self.ptr.as_ptr().cast::<c_void>()) };
        }
    }
}

/// Most bytes that are fetched while the host goes on: whoever fetches more waits for it. No buffer of the pool has less.
pub(crate) const FETCH_BYTES: usize = 64 << 10;

/// Page-locked buffers whose copies have ended, for the next ones.
#[derive(Debug)]
pub(crate) struct PinnedPool {
    context: Arc<CudaContext>,
    free: Mutex<Vec<PinnedMemory>>,
}

impl PinnedPool {
    pub(crate) fn new(context: Arc<CudaContext>) -> Arc<Self> {
        let free = Mutex::default();
        Arc::new(Self { context, free })
    }

    /// A buffer of at least so many bytes.
    pub(crate) fn take(&self, bytes: usize) -> Result<PinnedMemory, DeviceError> {
        let recycled = {
            let mut free = self.free.lock();
            let fits = free.iter().position(|memory| memory.bytes() >= bytes);
            fits.map(|at| free.swap_remove(at))
        };
        recycled.map_or_else(|| PinnedMemory::new(&self.context, bytes.max(FETCH_BYTES)), Ok)
    }

    /// Gives a buffer back that no copy uses any more.
    pub(crate) fn put(&self, memory: PinnedMemory) {
        let mut free = self.free.lock();
        free.push(memory);
    }
}

/// Address of a buffer in the memory of this device.
pub(crate) fn address_of(buffer: &Buffer, context: &CudaContext) -> Result<DevicePtr, DeviceError> {
    match buffer.arena().memory_as::<DeviceMemory>() {
        Some(memory) if memory.context.ordinal() == context.ordinal() => {
            Ok(memory.address().offset(buffer.start()))
        }
        _ => Err(DeviceError::NotDevice {
            arena: buffer.arena().name().to_owned(),
            device: context.to_string(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_hold_may_be_freed_and_a_card_does_not_grow() {
        assert!(!never_fits(30, 70, 100), "others hold some of it");
        assert!(never_fits(30, 71, 100));
        assert!(never_fits(1, usize::MAX, 100));
    }
}
