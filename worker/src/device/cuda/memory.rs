//! Memory of the device, pinned memory of the host, accounts of who holds how much, and the pool of pinned buffers in which
//! numbers travel to the host.
#![allow(unsafe_code, reason = "memory of the CUDA driver")]

use std::any::Any;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt::Write;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys;

use super::calls::{self, DriverError, written};
use super::driver::CudaContext;
use super::driver::driver_error;
use crate::device::{Buffer, DeviceError, Memory};

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePtr(sys::CUdeviceptr);

impl DevicePtr {
    /// For kernels that take an optional pointer.
    pub const NULL: Self = Self(0);

    pub(super) const fn new(address: sys::CUdeviceptr) -> Self {
        Self(address)
    }

    /// So many bytes further.
    #[must_use]
    pub const fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }

    /// As the driver writes it.
    #[must_use]
    pub const fn raw(self) -> sys::CUdeviceptr {
        self.0
    }

    /// As libraries take it.
    #[must_use]
    pub const fn as_ptr(self) -> *mut c_void {
        self.0 as *mut c_void
    }

    /// True if the address is a multiple of `bytes`: 16 for the widest accesses.
    #[must_use]
    pub const fn is_aligned(self, bytes: usize) -> bool {
        self.0.is_multiple_of(bytes as u64)
    }
}

/// Names of the largest holders in an error.
const LARGEST_NAMED: usize = 6;

/// How many bytes of a device this process holds, by name.
#[derive(Debug, Default)]
pub(super) struct Account(Mutex<Balance>);

#[derive(Debug, Default)]
struct Balance {
    held: BTreeMap<String, usize>,
    bytes: usize,
    peak: usize,
}

impl Account {
    fn add(&self, name: &str, bytes: usize) {
        let mut balance = self.balance();
        *balance.held.entry(name.to_owned()).or_default() += bytes;
        balance.bytes += bytes;
        balance.peak = balance.peak.max(balance.bytes);
    }

    fn subtract(&self, name: &str, bytes: usize) {
        let mut balance = self.balance();
        balance.bytes = balance.bytes.saturating_sub(bytes);
        if let Some(held) = balance.held.get_mut(name) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                balance.held.remove(name);
            }
        }
    }

    /// Bytes held now.
    pub(super) fn bytes(&self) -> usize {
        self.balance().bytes
    }

    /// Most bytes held at one time.
    pub(super) fn peak(&self) -> usize {
        self.balance().peak
    }

    /// `params 496 MiB, gradients 248 MiB, 3 others 1 MiB`: the largest first.
    fn words(&self) -> String {
        let balance = self.balance();
        let mut held: Vec<_> = balance.held.iter().map(|(name, bytes)| (*bytes, name)).collect();
        held.sort_unstable_by(|a, b| b.cmp(a));
        let (named, others) = held.split_at(held.len().min(LARGEST_NAMED));
        let mut text = String::new();
        for (bytes, name) in named {
            let comma = if text.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{comma}{name} {}", mib(*bytes));
        }
        if !others.is_empty() {
            let bytes = others.iter().map(|(bytes, _)| bytes).sum();
            let _ = write!(text, ", {} others {}", others.len(), mib(bytes));
        }
        if text.is_empty() {
            "nothing".to_owned()
        } else {
            text
        }
    }

    fn balance(&self) -> MutexGuard<'_, Balance> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Zeroed memory of a device, which the host cannot reach. Freeing it waits for the work in flight on the device, unless
/// that was abandoned; dropped, it waits some seconds at most, and otherwise stays until the process ends.
#[derive(Debug)]
pub struct DeviceMemory {
    address: sys::CUdeviceptr,
    bytes: usize,
    name: String,
    context: Arc<CudaContext>,
    account: Arc<Account>,
}

impl DeviceMemory {
    /// Allocates and zeroes; both are done on return.
    pub(super) fn new(
        context: &Arc<CudaContext>,
        account: &Arc<Account>,
        name: &str,
        bytes: usize,
    ) -> Result<Self, DeviceError> {
        context.bind()?;
        let length = bytes.max(1);
        // SAFETY: the function writes one address. Nothing reads the memory before it is zeroed below.
        let address = written(0, |address| unsafe { calls::memory_alloc(address, length) })
            .map_err(|error| out_of_memory(context, account, name, bytes, error))?;
        account.add(name, length);
        let memory = Self {
            address,
            bytes: length,
            name: name.to_owned(),
            context: context.clone(),
            account: account.clone(),
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
    #[must_use]
    pub const fn address(&self) -> sys::CUdeviceptr {
        self.address
    }

    /// The device that it belongs to.
    #[must_use]
    pub const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// Frees it once nothing is in flight on the device. An error if that takes longer than `patience`, or will never be.
    pub(super) fn free(mut self, patience: Duration) -> Result<(), DeviceError> {
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
            self.account.subtract(&self.name, self.bytes);
        }
    }
}

// SAFETY: there is no host pointer.
unsafe impl Memory for DeviceMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn host_ptr(&self) -> Option<NonNull<u8>> {
        None
    }

    fn as_any(&self) -> &dyn Any {
        self
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

fn out_of_memory(
    context: &CudaContext,
    account: &Account,
    name: &str,
    bytes: usize,
    error: DriverError,
) -> DeviceError {
    let free = context.free_and_all_bytes();
    let free = free.map_or("an unknown amount".to_owned(), |(free, _)| mib(free));
    let never_fits = never_fits(account.bytes(), bytes, context.memory_bytes());
    let verdict = if never_fits {
        "; that is more than the whole card, so another try would end the same"
    } else {
        ""
    };
    DeviceError::OutOfMemory {
        what: name.to_owned(),
        bytes,
        cause: format!(
            "{}; GPU {} ({}) has {free} free of {}, this rank holds {}: {}{verdict}",
            error.words(),
            context.ordinal(),
            context.name(),
            mib(context.memory_bytes()),
            mib(account.bytes()),
            account.words()
        ),
        hint: "lower `train.micro_batch` and raise `train.grad_accumulation`, use `train.precision: bf16`, or \
               shard with `parallel.strategy: zero1`, `zero2` or `zero3`; the lines before the first step say what a rank holds"
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
pub(super) struct PinnedMemory {
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

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl PinnedMemory {
    /// So many zeroed bytes.
    pub(super) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, DeviceError> {
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
    pub(super) const fn ptr(&self) -> *mut u8 {
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
        context: &Arc<CudaContext>,
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

/// Address of a buffer in the memory of this device.
pub(super) fn address_of(buffer: &Buffer, context: &CudaContext) -> Result<DevicePtr, DeviceError> {
    let memory = buffer.arena().memory().as_any().downcast_ref::<DeviceMemory>();
    match memory {
        Some(memory) if memory.context().ordinal() == context.ordinal() => {
            Ok(DevicePtr(memory.address()).offset(buffer.start()))
        }
        _ => Err(DeviceError::NotDevice {
            arena: buffer.arena().name().to_owned(),
            device: format!("GPU {} ({})", context.ordinal(), context.name()),
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

    #[test]
    fn the_largest_holders_are_named() {
        let account = Account::default();
        assert_eq!(account.words(), "nothing");
        for i in 0..8 {
            account.add(&format!("arena {i}"), (i + 1) << 20);
        }
        account.add("arena 0", 1 << 20);
        account.subtract("arena 7", 8 << 20);
        assert_eq!(
            account.words(),
            "arena 6 7.0 MiB, arena 5 6.0 MiB, arena 4 5.0 MiB, arena 3 4.0 MiB, arena 2 3.0 MiB, arena 1 2.0 MiB, 1 others 2.0 MiB"
        );
        assert_eq!((account.bytes(), account.peak()), (29 << 20, 37 << 20));
    }
}
