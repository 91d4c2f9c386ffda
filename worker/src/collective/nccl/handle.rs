//! One communicator of the library, as an object that is freed once and used by one thread at a time.
//!
//! No call here waits for another rank: where NCCL goes on in the background, [`Handle::is_settled`] says when it
//! is done. Until then nothing else may be asked of the communicator.
#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use super::library::{CallError, Nccl};
use super::sys::{Config, DataType, NO_COLOR, RawComm, RawStream, RedOp, SCALAR_ON_HOST, Status, UniqueId};

/// See the module. Dropped, it is left alone: freeing waits for the device or for other ranks, and the process that
/// drops one is about to end.
pub(super) struct Handle {
    nccl: Nccl,
    raw: RawComm,
}

// SAFETY: a communicator belongs to no thread; calls must not overlap, which `&mut self` and the mutex around a
// handle see to.
unsafe impl Send for Handle {}

/// A collective operation, as NCCL counts: `count` is that of a slice where each rank has one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub(super) what: What,
    pub(super) source: *const c_void,
    pub(super) target: *mut c_void,
    pub(super) count: usize,
    pub(super) dtype: DataType,
    pub(super) stream: RawStream,
}

/// Which operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    AllReduce(RedOp),
    ReduceScatter(RedOp),
    AllGather,
    Broadcast { root: c_int },
    Send { to: c_int },
    Recv { from: c_int },
}

/// Where NCCL writes the address of a communicator that is being made: from another thread, at any time until it is
/// made. So it is never freed; a process makes few.
#[derive(Clone, Copy)]
pub(super) struct Slot(&'static AtomicPtr<c_void>);

impl Slot {
    fn new() -> Self {
        Self(Box::leak(Box::new(AtomicPtr::new(std::ptr::null_mut()))))
    }

    fn get(self) -> Option<RawComm> {
        let raw = self.0.load(Ordering::Acquire);
        (!raw.is_null()).then_some(raw)
    }
}

impl Handle {
    /// Begins to make a communicator; the calling thread's current device is its device.
    pub(super) fn init(nccl: &Nccl, id: UniqueId, size: usize, rank: usize) -> Result<Self, CallError> {
        let slot = Slot::new();
        let mut config = Config::non_blocking();
        let init = nccl.functions().comm_init;
        // SAFETY: the slot is never freed; the configuration is copied during the call.
        let status = unsafe { init(slot.0.as_ptr(), size as c_int, id, rank as c_int, &raw mut config) };
        // SAFETY: no communicator is asked about.
        unsafe { nccl.check("ncclCommInitRankConfig", status, std::ptr::null_mut()) }?;
        let raw = slot.get().ok_or_else(|| CallError {
            call: "ncclCommInitRankConfig",
            status,
            words: "it gave no communicator".to_owned(),
        })?;
        Ok(Self {
            nccl: nccl.clone(),
            raw,
        })
    }

    /// True if nothing goes on in the background; the error that the communicator met, if it did.
    pub(super) fn is_settled(&mut self) -> Result<bool, CallError> {
        let mut state = Status::SUCCESS;
        // SAFETY: alive, and `state` is valid during the call.
        let status = unsafe { (self.nccl.functions().comm_get_async_error)(self.raw, &raw mut state) };
        self.check("ncclCommGetAsyncError", status)?;
        self.check("ncclCommGetAsyncError", state)
    }

    /// Puts an operation into its stream; it is there once the handle is settled.
    ///
    /// # Safety
    /// The addresses must be those of memory of the device of so many elements, and the memory must stay until the
    /// stream has passed the operation or the communicator is aborted; the stream must be alive.
    pub(super) unsafe fn issue(&mut self, call: &Call) -> Result<(), CallError> {
        let (functions, comm) = (self.nccl.functions(), self.raw);
        let Call {
            what,
            source,
            target,
            count,
            dtype,
            stream,
        } = *call;
        // SAFETY: the communicator is alive and used by nobody else; for the rest the caller vouches.
        let (name, status) = unsafe {
            match what {
                What::AllReduce(op) => (
                    "ncclAllReduce",
                    (functions.all_reduce)(source, target, count, dtype, op, comm, stream),
                ),
                What::ReduceScatter(op) => (
                    "ncclReduceScatter",
                    (functions.reduce_scatter)(source, target, count, dtype, op, comm, stream),
                ),
                What::AllGather => (
                    "ncclAllGather",
                    (functions.all_gather)(source, target, count, dtype, comm, stream),
                ),
                What::Broadcast { root } => (
                    "ncclBroadcast",
                    (functions.broadcast)(source, target, count, dtype, root, comm, stream),
                ),
                What::Send { to } => (
                    "ncclSend",
                    (functions.send)(source, count, dtype, to, comm, stream),
                ),
                What::Recv { from } => (
                    "ncclRecv",
                    (functions.recv)(target, count, dtype, from, comm, stream),
                ),
            }
        };
        self.check(name, status).map(drop)
    }

    /// A sum of products with a factor, given as the bytes of one element.
    pub(super) fn pre_mul_sum(&mut self, factor: &mut [u8], dtype: DataType) -> Result<RedOp, CallError> {
        let mut op = RedOp::SUM;
        let create = self.nccl.functions().create_pre_mul_sum;
        let scalar = factor.as_mut_ptr().cast();
        // SAFETY: alive; the factor is read, and `op` written, during the call.
        let status = unsafe { create(&raw mut op, scalar, dtype, SCALAR_ON_HOST, self.raw) };
        self.check("ncclRedOpCreatePreMulSum", status)?;
        Ok(op)
    }

    /// Frees what [`Handle::pre_mul_sum`] made. Operations that were issued with it keep what they need.
    pub(super) fn destroy_op(&mut self, op: RedOp) -> Result<(), CallError> {
        // SAFETY: made by this communicator, which is alive, and given up by the caller.
        let status = unsafe { (self.nccl.functions().destroy_red_op)(op, self.raw) };
        self.check("ncclRedOpDestroy", status).map(drop)
    }

    /// Begins to split: ranks that say the same color come together, ordered by key. None: only takes part.
    pub(super) fn split(&mut self, color: Option<usize>, key: usize) -> Result<Slot, CallError> {
        let slot = Slot::new();
        let mut config = Config::non_blocking();
        let color = color.map_or(NO_COLOR, |color| color as c_int);
        let split = self.nccl.functions().comm_split;
        // SAFETY: alive; the slot is never freed; the configuration is copied during the call.
        let status = unsafe { split(self.raw, color, key as c_int, slot.0.as_ptr(), &raw mut config) };
        self.check("ncclCommSplit", status)?;
        Ok(slot)
    }

    /// What [`Handle::split`] made, once this handle is settled; none if this rank only took part.
    pub(super) fn part(&self, slot: Slot) -> Option<Self> {
        slot.get().map(|raw| Self {
            nccl: self.nccl.clone(),
            raw,
        })
    }

    /// Begins to leave: done when all ranks have, and the handle is settled. Until then nothing may free it.
    pub(super) fn finalize(&mut self) -> Result<(), CallError> {
        // SAFETY: alive, and used by nobody else.
        let status = unsafe { (self.nccl.functions().comm_finalize)(self.raw) };
        self.check("ncclCommFinalize", status).map(drop)
    }

    /// Frees a communicator that was finalized and has settled, which is this process's affair alone. As for
    /// [`Handle::abort`], the library returns when that is done, also where its other calls go on in the background, and
    /// it forbids to ask about the communicator afterwards: there is nothing left to wait for.
    pub(super) fn destroy(self) -> Result<(), CallError> {
        // SAFETY: alive, and used by nobody afterwards: this value was the only one that knew it.
        let status = unsafe { (self.nccl.functions().comm_destroy)(self.raw) };
        // SAFETY: not asked about any more.
        unsafe { self.nccl.check("ncclCommDestroy", status, std::ptr::null_mut()) }.map(drop)
    }

    /// Lets what runs on the device end, and frees the communicator. Does not wait for other ranks.
    pub(super) fn abort(self) -> Result<(), CallError> {
        // SAFETY: as for `destroy`.
        let status = unsafe { (self.nccl.functions().comm_abort)(self.raw) };
        // SAFETY: not asked about any more.
        unsafe { self.nccl.check("ncclCommAbort", status, std::ptr::null_mut()) }.map(drop)
    }

    fn check(&self, call: &'static str, status: Status) -> Result<bool, CallError> {
        // SAFETY: alive as long as `self`.
        unsafe { self.nccl.check(call, status, self.raw) }
    }
}
