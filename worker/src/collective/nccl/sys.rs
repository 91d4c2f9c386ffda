//! What of NCCL is called: types and functions of its public header, in their C layout.
//!
//! NCCL 2.18 is the least: it can split a communicator, and does not block while one is made. Later versions take
//! its configuration as it is: the structure says its own size and version.
#![allow(unsafe_code, reason = "signatures of a C library")]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fmt;

use crate::libraries::table;

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

/// `ncclRedOp_t`: a built-in reduction, or one that was created.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RedOp(pub(super) c_int);

impl RedOp {
    pub(super) const SUM: Self = Self(0);
    pub(super) const MAX: Self = Self(2);
    pub(super) const AVG: Self = Self(4);
}

/// `ncclScalarHostImmediate`: the factor is read before the call returns.
pub(super) const SCALAR_ON_HOST: c_int = 1;

/// `NCCL_SPLIT_NOCOLOR`: takes part in a split without getting a communicator.
pub(super) const NO_COLOR: c_int = -1;

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

    /// Calls return at once; all else as the environment and NCCL choose.
    pub(super) const fn non_blocking() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: Self::MAGIC,
            version: Version::LEAST.0 as c_uint,
            blocking: 0,
            cga_cluster_size: Self::UNDEFINED,
            min_ctas: Self::UNDEFINED,
            max_ctas: Self::UNDEFINED,
            net_name: std::ptr::null(),
            split_share: Self::UNDEFINED,
        }
    }
}

/// `NCCL_VERSION_CODE`
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub(super) c_int);

impl Version {
    /// The least that is accepted.
    pub const LEAST: Self = Self(21_800);

    /// True from this version on.
    #[must_use]
    pub const fn is_at_least(self, major: u32, minor: u32) -> bool {
        self.0 as u32 >= major * 10_000 + minor * 100
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // 2.9 and later.
        write!(f, "{}.{}.{}", self.0 / 10_000, self.0 / 100 % 100, self.0 % 100)
    }
}

table! {
    /// What is called.
    pub(super) struct Functions {
        /// Version of the library.
        get_version: fn(*mut c_int) -> Status = "ncclGetVersion";
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
        /// A sum of elements that are multiplied by a factor first.
        create_pre_mul_sum: fn(*mut RedOp, *mut c_void, DataType, c_int, RawComm) -> Status
            = "ncclRedOpCreatePreMulSum";
        /// Frees one.
        destroy_red_op: fn(RedOp, RawComm) -> Status = "ncclRedOpDestroy";
        /// What a status means.
        get_error_string: fn(Status) -> *const c_char = "ncclGetErrorString";
        /// What went wrong last; the communicator may be null.
        get_last_error: fn(RawComm) -> *const c_char = "ncclGetLastError";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_their_makers_write_them() {
        assert_eq!(Version(23_007).to_string(), "2.30.7");
        assert_eq!(Version::LEAST.to_string(), "2.18.0");
        assert!(Version(21_705) < Version::LEAST);
        assert!(Version(23_007).is_at_least(2, 30) && !Version(22_909).is_at_least(2, 30));
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
        let config = Config::non_blocking();
        assert_eq!((config.size, config.version), (48, 21_800));
    }
}
