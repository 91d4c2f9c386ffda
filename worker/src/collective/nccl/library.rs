//! NCCL behind safe functions: types and functions of its public header, its version and error messages, its communicators,
//! and requests in its terms.
//!
//! NCCL 2.18 is the least: it can split a communicator, and does not block while one is made. Later versions take
//! its configuration as it is: the structure says its own size and version.
#![allow(unsafe_code, reason = "functions of a C library")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::collective::error::Failure;
use crate::collective::operation::{AllToAll, Operation, ReduceOp, Request};
use crate::collective::transport::CommPattern;
use crate::device::DType;
use crate::libraries::{Library, LibraryError, LibraryKind, Version, table};

/// The oldest version that is accepted.
const LEAST: Version = Version {
    major: 2,
    minor: 18,
    patch: 0,
};

/// NCCL, loaded. Clones are the same.
#[derive(Clone)]
pub struct Nccl(Arc<LoadedNccl>);

struct LoadedNccl {
    functions: Functions,
    version: Version,
    path: PathBuf,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NCCL {} of `{}`", self.0.version, self.0.path.display())
    }
}

impl Nccl {
    /// Loads the first NCCL of the search path of this process.
    pub fn load() -> Result<Self, LibraryError> {
        let library = Library::open(LibraryKind::Nccl)?;
        let functions = Functions::load(&library)?;
        let version = library.version()?;
        if version < LEAST {
            return Err(library.unusable(format!("is NCCL {version}, but at least {LEAST} is required")));
        }
        let path = library.path().to_owned();
        Ok(Self(Arc::new(LoadedNccl {
            functions,
            version,
            path,
        })))
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.0.version
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// A new id at which the ranks of a communicator meet; this process listens for them from now on.
    pub(super) fn unique_id(&self) -> Result<UniqueId, Failure> {
        let mut id = UniqueId([0; UNIQUE_ID_BYTES]);
        // SAFETY: writes an identifier to this address.
        let status = unsafe { (self.0.functions.get_unique_id)(&raw mut id) };
        // SAFETY: no communicator is asked about.
        unsafe { self.check("ncclGetUniqueId", status, std::ptr::null_mut()) }?;
        Ok(id)
    }

    /// An error unless a call has succeeded or goes on; true if it has succeeded.
    ///
    /// # Safety
    /// `comm` must be null or a communicator that is alive.
    pub(super) unsafe fn check(
        &self,
        call: &'static str,
        status: Status,
        comm: RawComm,
    ) -> Result<bool, Failure> {
        match status {
            Status::SUCCESS => Ok(true),
            Status::IN_PROGRESS => Ok(false),
            _ => {
                // SAFETY: any status may be asked for; the caller vouches for the communicator.
                let (meaning, last) = unsafe {
                    (
                        text((self.0.functions.get_error_string)(status)),
                        text((self.0.functions.get_last_error)(comm)),
                    )
                };
                let words = match last.trim() {
                    "" => meaning,
                    last => format!("{meaning}: {}", last.replace('\n', " ")),
                };
                Err(Failure::Library {
                    call: call.to_owned(),
                    words,
                    of_peer: status == Status::REMOTE_ERROR,
                })
            }
        }
    }
}

/// # Safety
/// `text` must be null or end with a zero.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// One communicator of the library, freed once and used by one thread at a time. Dropped, it is not freed: that waits for
/// the device or for other ranks, and the process that drops one is about to end.
///
/// No call here waits for another rank: where NCCL goes on in the background, [`Handle::is_settled`] says when it
/// is done. Until then no other call may be made for the communicator.
pub(super) struct Handle {
    nccl: Nccl,
    raw: RawComm,
}

// SAFETY: a communicator belongs to no thread; calls must not overlap, which `&mut self` and the mutex around a
// handle see to.
unsafe impl Send for Handle {}

/// Where NCCL writes the address of a communicator that is being made: from another thread, at any time until it is
/// made. So it is never freed; a process makes few.
#[derive(Clone, Copy)]
pub(super) struct CommAddress(&'static AtomicPtr<c_void>);

impl CommAddress {
    fn new() -> Self {
        Self(Box::leak(Box::new(AtomicPtr::new(std::ptr::null_mut()))))
    }

    /// The communicator, once `call` has made it.
    fn get(self, nccl: &Nccl, call: &str) -> Result<Handle, Failure> {
        let raw = self.0.load(Ordering::Acquire);
        if raw.is_null() {
            return Err(Failure::Library {
                call: call.into(),
                words: "it gave no communicator".into(),
                of_peer: false,
            });
        }
        let nccl = nccl.clone();
        Ok(Handle { nccl, raw })
    }
}

impl Handle {
    /// Begins to make a communicator; the calling thread's current device is its device.
    pub(super) fn init(nccl: &Nccl, id: UniqueId, size: usize, rank: usize) -> Result<Self, Failure> {
        let address = CommAddress::new();
        let mut config = Config::of(CommPattern::Collectives);
        let init = nccl.0.functions.comm_init;
        // SAFETY: the address is never freed; the configuration is copied during the call.
        let status = unsafe {
            init(
                address.0.as_ptr(),
                size as c_int,
                id,
                rank as c_int,
                &raw mut config,
            )
        };
        // SAFETY: no communicator is asked about.
        unsafe { nccl.check("ncclCommInitRankConfig", status, std::ptr::null_mut()) }?;
        address.get(nccl, "ncclCommInitRankConfig")
    }

    /// True if no call goes on in the background. The error of the communicator, if it has one.
    pub(super) fn is_settled(&mut self) -> Result<bool, Failure> {
        let mut state = Status::SUCCESS;
        // SAFETY: alive, and `state` is valid during the call.
        let status = unsafe { (self.nccl.0.functions.comm_get_async_error)(self.raw, &raw mut state) };
        self.check("ncclCommGetAsyncError", status)?;
        self.check("ncclCommGetAsyncError", state)
    }

    /// Puts a checked operation into a stream; it is there once the handle is settled. `base` is the start of its buffer, `own`
    /// this rank's slice of it, `sent` the start of what an all-to-all sends. A barrier is an all-reduce of one element.
    ///
    /// # Safety
    /// The buffer must be at that address of the device, and stay until the stream has passed the operation or the
    /// communicator is aborted; the stream must be alive.
    pub(super) unsafe fn issue(
        &mut self,
        request: &Request,
        own: &Range<usize>,
        [sent, base]: [*mut c_void; 2],
        stream: RawStream,
    ) -> Result<(), Failure> {
        let (functions, comm) = (self.nccl.0.functions, self.raw);
        let (len, each) = (request.buffer.len(), own.len());
        let mine = base.wrapping_byte_add(own.start * request.buffer.dtype().bytes());
        let dtype = data_type(request.buffer.dtype());
        let op = match request.operation.reduction() {
            Some(ReduceOp::Sum) => RedOp::SUM,
            Some(ReduceOp::Max) | None => RedOp::MAX,
        };
        // SAFETY: the communicator is alive and not used elsewhere; for the rest the caller vouches.
        let (name, status) = unsafe {
            match request.operation {
                Operation::AllReduce(_) | Operation::Barrier => (
                    "ncclAllReduce",
                    (functions.all_reduce)(base, base, len, dtype, op, comm, stream),
                ),
                Operation::ReduceScatter(_) => (
                    "ncclReduceScatter",
                    (functions.reduce_scatter)(base, mine, each, dtype, op, comm, stream),
                ),
                Operation::AllGather => (
                    "ncclAllGather",
                    (functions.all_gather)(mine, base, each, dtype, comm, stream),
                ),
                Operation::Broadcast { root } => (
                    "ncclBroadcast",
                    (functions.broadcast)(base, base, len, dtype, root as c_int, comm, stream),
                ),
                Operation::AllToAll => {
                    let parts = request.all_to_all.as_ref().expect("it comes with its parts");
                    ("ncclGroupEnd", self.all_to_all(parts, [sent, base], stream)?)
                }
                Operation::Send { to } => (
                    "ncclSend",
                    (functions.send)(base, len, dtype, to as c_int, comm, stream),
                ),
                Operation::Recv { from } => (
                    "ncclRecv",
                    (functions.recv)(base, len, dtype, from as c_int, comm, stream),
                ),
            }
        };
        self.check(name, status).map(drop)
    }

    /// Puts the messages of an all-to-all into a stream, as one group: they run side by side. Nothing is sent where a part
    /// is empty.
    ///
    /// # Safety
    /// As [`Handle::issue`].
    unsafe fn all_to_all(
        &self,
        parts: &AllToAll,
        bases: [*mut c_void; 2],
        stream: RawStream,
    ) -> Result<Status, Failure> {
        let (functions, comm, dtype) = (self.nccl.0.functions, self.raw, parts.sent.dtype());
        // SAFETY: it has no arguments.
        self.check("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let mut issued = Ok(true);
        for (peer, [out, into]) in parts.parts().enumerate() {
            let [from, to] = [(bases[0], &out), (bases[1], &into)]
                .map(|(base, part)| base.wrapping_byte_add(part.start * dtype.bytes()));
            let (peer, dtype) = (peer as c_int, data_type(dtype));
            // SAFETY: parts of the buffers that the caller vouches for.
            unsafe {
                if !out.is_empty() {
                    let status = (functions.send)(from, out.len(), dtype, peer, comm, stream);
                    issued = issued.and_then(|_| self.check("ncclSend", status));
                }
                if !into.is_empty() {
                    let status = (functions.recv)(to, into.len(), dtype, peer, comm, stream);
                    issued = issued.and_then(|_| self.check("ncclRecv", status));
                }
            }
        }
        // The group ends also if a call of it failed.
        // SAFETY: it has no arguments, and the group was begun.
        let status = unsafe { (functions.group_end)() };
        issued.map(|_| status)
    }

    /// Begins to split: ranks with the same color form a communicator, ordered by key. None: only takes part.
    pub(super) fn split(
        &mut self,
        color: Option<usize>,
        key: usize,
        pattern: CommPattern,
    ) -> Result<CommAddress, Failure> {
        let address = CommAddress::new();
        let mut config = Config::of(pattern);
        let color = color.map_or(NO_COLOR, |color| color as c_int);
        let split = self.nccl.0.functions.comm_split;
        // SAFETY: alive; the address is never freed; the configuration is copied during the call.
        let status = unsafe { split(self.raw, color, key as c_int, address.0.as_ptr(), &raw mut config) };
        self.check("ncclCommSplit", status)?;
        Ok(address)
    }

    /// What [`Handle::split`] made, once this handle is settled; an error if this rank only took part.
    pub(super) fn part(&self, address: CommAddress) -> Result<Self, Failure> {
        address.get(&self.nccl, "ncclCommSplit")
    }

    /// Begins to leave: done when all ranks have, and the handle is settled. Until then it must not be freed.
    pub(super) fn finalize(&mut self) -> Result<(), Failure> {
        // SAFETY: alive, and not used elsewhere.
        let status = unsafe { (self.nccl.0.functions.comm_finalize)(self.raw) };
        self.check("ncclCommFinalize", status).map(drop)
    }

    /// Frees a communicator that was finalized and has settled, which needs no other rank. As for
    /// [`Handle::abort`], the library returns when that is done, also where its other calls go on in the background, and
    /// it forbids to ask about the communicator afterwards: there is nothing left to wait for.
    pub(super) fn destroy(self) -> Result<(), Failure> {
        // SAFETY: alive, and not used afterwards: this value was the only one with its address.
        let status = unsafe { (self.nccl.0.functions.comm_destroy)(self.raw) };
        // SAFETY: not asked about any more.
        unsafe { self.nccl.check("ncclCommDestroy", status, std::ptr::null_mut()) }.map(drop)
    }

    /// Lets what runs on the device end, and frees the communicator. Does not wait for other ranks.
    pub(super) fn abort(self) -> Result<(), Failure> {
        // SAFETY: as for `destroy`.
        let status = unsafe { (self.nccl.0.functions.comm_abort)(self.raw) };
        // SAFETY: not asked about any more.
        unsafe { self.nccl.check("ncclCommAbort", status, std::ptr::null_mut()) }.map(drop)
    }

    fn check(&self, call: &'static str, status: Status) -> Result<bool, Failure> {
        // SAFETY: alive as long as `self`.
        unsafe { self.nccl.check(call, status, self.raw) }
    }
}

/// The type as NCCL numbers it.
pub(super) const fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F64 => DataType::FLOAT64,
        DType::F32 => DataType::FLOAT32,
        DType::Bf16 => DataType::BFLOAT16,
        DType::I32 => DataType::INT32,
        DType::U8 => DataType::UINT8,
    }
}

/// `ncclComm_t`
pub(super) type RawComm = *mut c_void;

/// `cudaStream_t`, which is the driver's `CUstream`.
pub(super) type RawStream = *mut c_void;

/// Size of [`UniqueId`].
pub(super) const UNIQUE_ID_BYTES: usize = 128;

/// `ncclUniqueId`: where the ranks of a new communicator meet.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) [u8; UNIQUE_ID_BYTES]);

/// `ncclResult_t`. A number, not an enum: a later library may have more.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub(super) c_int);

impl Status {
    pub(super) const SUCCESS: Self = Self(0);
    /// Another process failed, or the network to it.
    pub(super) const REMOTE_ERROR: Self = Self(6);
    /// A call that does not block goes on in the background.
    pub(super) const IN_PROGRESS: Self = Self(7);
}

/// `ncclDataType_t`
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DataType(pub(super) c_int);

impl DataType {
    pub(super) const UINT8: Self = Self(1);
    pub(super) const INT32: Self = Self(2);
    pub(super) const FLOAT32: Self = Self(7);
    pub(super) const FLOAT64: Self = Self(8);
    pub(super) const BFLOAT16: Self = Self(9);
}

/// `ncclRedOp_t`
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RedOp(pub(super) c_int);

impl RedOp {
    pub(super) const SUM: Self = Self(0);
    pub(super) const MAX: Self = Self(2);
}

/// `NCCL_SPLIT_NOCOLOR`: takes part in a split without getting a communicator.
pub(super) const NO_COLOR: c_int = -1;

/// Most thread blocks of a send or a receive. One that waits for its peer holds them meanwhile, up to 16 of them by NCCL's
/// own choice (2.28, NVSwitch), beside the stage that computes.
const MESSAGE_CTAS: c_int = 4;

/// `ncclConfig_t` of NCCL 2.18.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 0: calls return at once, and the state of the communicator says when they are done.
    pub(super) blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    const MAGIC: c_uint = 0xcafe_beef;
    const UNDEFINED: c_int = c_int::MIN;

    /// Calls return at once, and messages take few blocks; all else as the environment and NCCL choose.
    const fn of(pattern: CommPattern) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: Self::MAGIC,
            version: LEAST.major * 10_000 + LEAST.minor * 100,
            blocking: 0,
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: match pattern {
                CommPattern::Collectives => Self::UNDEFINED,
                CommPattern::Messages => MESSAGE_CTAS,
            },
            net_name: std::ptr::null(),
            split_share: Self::UNDEFINED,
        }
    }
}

table! {
    /// What is called.
    pub(super) struct Functions {
        /// A new meeting point.
        get_unique_id: fn(*mut UniqueId) -> Status = "ncclGetUniqueId";
        /// Makes a communicator together with the other ranks.
        comm_init: fn(*mut RawComm, c_int, UniqueId, c_int, *mut Config) -> Status = "ncclCommInitRankConfig";
        /// State of a communicator: in progress, or the error that it met.
        comm_get_async_error: fn(RawComm, *mut Status) -> Status = "ncclCommGetAsyncError";
        /// Makes communicators of parts of one.
        comm_split: fn(RawComm, c_int, c_int, *mut RawComm, *mut Config) -> Status = "ncclCommSplit";
        /// Lets operations on the device end, and frees the communicator.
        comm_abort: fn(RawComm) -> Status = "ncclCommAbort";
        /// Waits for the other ranks to be done as well.
        comm_finalize: fn(RawComm) -> Status = "ncclCommFinalize";
        /// Frees a communicator that is finalized.
        comm_destroy: fn(RawComm) -> Status = "ncclCommDestroy";
        /// In place if both addresses are the same.
        all_reduce: fn(*const c_void, *mut c_void, usize, DataType, RedOp, RawComm, RawStream) -> Status
            = "ncclAllReduce";
        /// In place if the target is this rank's slice of the source. The count is that of a slice.
        reduce_scatter: fn(*const c_void, *mut c_void, usize, DataType, RedOp, RawComm, RawStream) -> Status
            = "ncclReduceScatter";
        /// In place if the source is this rank's slice of the target. The count is that of a slice.
        all_gather: fn(*const c_void, *mut c_void, usize, DataType, RawComm, RawStream) -> Status
            = "ncclAllGather";
        /// In place if both addresses are the same.
        broadcast: fn(*const c_void, *mut c_void, usize, DataType, c_int, RawComm, RawStream) -> Status
            = "ncclBroadcast";
        /// To one rank.
        send: fn(*const c_void, usize, DataType, c_int, RawComm, RawStream) -> Status = "ncclSend";
        /// From one rank.
        recv: fn(*mut c_void, usize, DataType, c_int, RawComm, RawStream) -> Status = "ncclRecv";
        /// Begins a group of messages of this thread, which NCCL issues together.
        group_start: fn() -> Status = "ncclGroupStart";
        /// Issues them.
        group_end: fn() -> Status = "ncclGroupEnd";
        /// What a status means.
        get_error_string: fn(Status) -> *const c_char = "ncclGetErrorString";
        /// What went wrong last; the communicator may be null.
        get_last_error: fn(RawComm) -> *const c_char = "ncclGetLastError";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The real library, which needs no GPU. Without one on the search path of the process the tests say so and pass, unless
    /// `DDP_REQUIRE_NCCL` is set.
    fn nccl() -> Option<Nccl> {
        match Nccl::load() {
            Ok(nccl) => Some(nccl),
            Err(error @ LibraryError::NotFound { .. }) => {
                assert!(std::env::var_os("DDP_REQUIRE_NCCL").is_none(), "{error}");
                eprintln!("SKIPPED, NCCL was not tested: {error}");
                None
            }
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn its_version_is_new_enough_and_all_functions_are_there() {
        if let Some(nccl) = nccl() {
            eprintln!("{nccl:?}");
            assert!(nccl.version() >= LEAST);
        }
    }

    #[test]
    fn it_opens_a_meeting_point_without_a_gpu() {
        if let Some(nccl) = nccl() {
            let (first, second) = (nccl.unique_id().unwrap(), nccl.unique_id().unwrap());
            assert_ne!(first.0, second.0);
        }
    }

    /// Offsets of `ncclConfig_t` in the header of 2.18 on 64-bit machines.
    #[test]
    fn the_configuration_has_the_layout_of_the_header() {
        let offsets = [
            std::mem::offset_of!(Config, size),
            std::mem::offset_of!(Config, magic),
            std::mem::offset_of!(Config, version),
            std::mem::offset_of!(Config, blocking),
            std::mem::offset_of!(Config, cga_cluster_size),
            std::mem::offset_of!(Config, min_ctas),
            std::mem::offset_of!(Config, max_ctas),
            std::mem::offset_of!(Config, net_name),
            std::mem::offset_of!(Config, split_share),
        ];
        assert_eq!(offsets, [0, 8, 12, 16, 20, 24, 28, 32, 40]);
        assert_eq!((size_of::<Config>(), size_of::<UniqueId>()), (48, 128));
        let config = Config::of(CommPattern::Messages);
        assert_eq!([config.min_ctas, config.max_ctas], [Config::UNDEFINED, 4]);
        assert_eq!((config.size, config.version), (48, 21_800));
    }
}
