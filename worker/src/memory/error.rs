//! What can go wrong on a device.

use std::ops::Range;

use ddp_proto::words;

use super::DType;
use crate::libraries::LibraryError;

/// What a device has done, or why it has not.
pub type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// An error of a device. On asynchronous devices it surfaces at synchronisation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Memory ran out.
    #[error("cannot allocate {} for `{what}`: {cause}\n  hint: {hint}", words::bytes(*bytes as u64))]
    OutOfMemory {
        /// Name of the arena.
        what: String,
        /// Size asked for.
        bytes: usize,
        /// The system's words.
        cause: String,
        /// What to change.
        hint: String,
        /// With what this rank holds already it is more than the device has, whoever else uses it, or than a limit of
        /// this process lets it have.
        never_fits: bool,
    },
    /// Two operations used overlapping memory at once, at least one of them for writing: a missing event.
    #[error("`{arena}` elements {range:?} are in use for {held} while they are wanted for {wanted}")]
    Race {
        /// Name of the arena.
        arena: String,
        /// Elements wanted.
        range: Range<usize>,
        /// What they are in use for.
        held: &'static str,
        /// What they are wanted for.
        wanted: &'static str,
    },
    /// An operation was given a buffer of another type.
    #[error("`{arena}` holds {found}, expected {expected}")]
    WrongDType {
        /// Name of the arena.
        arena: String,
        /// Type of the arena.
        found: DType,
        /// Type that the operation takes.
        expected: DType,
    },
    /// The memory is not reachable from the host.
    #[error("`{0}` is not host memory")]
    NotHost(String),
    /// The memory is another device's.
    #[error("`{arena}` is not in the memory of {device}")]
    NotDevice {
        /// Name of the arena.
        arena: String,
        /// Where it should be.
        device: String,
    },
    /// The device cannot run this operation.
    #[error("operation `{op}` has no {device} kernel")]
    NoKernel {
        /// Name of the operation.
        op: &'static str,
        /// Kind of device.
        device: &'static str,
    },
    /// A device's driver refused, or reported what went wrong earlier.
    #[error("{doing}: {cause}\n  hint: {hint}")]
    Driver {
        /// What was tried.
        doing: String,
        /// The driver's words.
        cause: String,
        /// What to do about it.
        hint: String,
    },
    /// The device is of an architecture that kernels are not written for.
    #[error(
        "{device} is {arch}, but the kernels need {oldest} or later\n  hint: choose other GPUs with CUDA_VISIBLE_DEVICES, \
         or train on the CPU (`parallel.backend: cpu`)"
    )]
    TooOld {
        /// Which one.
        device: String,
        /// Its architecture.
        arch: String,
        /// The oldest that will do.
        oldest: String,
    },
    /// `DDP_ISA` names an instruction set that this machine does not have.
    #[error("DDP_ISA is `{named}`, but this machine has {sets}\n  hint: unset DDP_ISA, or name one of these")]
    NoInstructionSet {
        /// The value of the variable.
        named: String,
        /// Those of the machine.
        sets: String,
    },
    /// A library that the device needs is missing or unfit.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// The compiler refused a kernel's text.
    #[error("`{unit}` does not compile for {arch} with NVRTC {version}:\n{log}")]
    Compile {
        /// File and definitions.
        unit: String,
        /// What it was compiled for.
        arch: String,
        /// Version of the compiler.
        version: String,
        /// The compiler's words.
        log: String,
    },
    /// An operation was given buffers whose sizes do not fit each other.
    #[error("operation `{op}`: {what}")]
    Shape {
        /// Name of the operation.
        op: &'static str,
        /// Which buffer has which size, and what it should be.
        what: String,
    },
    /// An event was not reached in time.
    #[error("waited {waited_ms} ms for {what}")]
    TimedOut {
        /// What was waited for.
        what: String,
        /// For how long.
        waited_ms: u64,
    },
    /// Something that the device waited for failed: a collective, another stream.
    #[error("{0}")]
    Upstream(String),
}

impl DeviceError {
    /// True if the machine has no driver: nothing is broken.
    pub const fn is_absence(&self) -> bool {
        matches!(self, Self::Library(error) if error.is_absence())
    }
}
