//! The driver: started once, one device chosen, its answers as errors with names.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::{self, CUresult as Code};

use super::calls::{self, DriverError, written};
use super::event::answer;
use super::facts::facts_of;
use super::streams::Streams;
use super::{Arch, GpuFacts};
use crate::device::DeviceError;
use crate::libraries::{LibraryError, SearchPath};

/// Longest wait for what is in flight before memory of something that is dropped is given back. Whoever wants it back waits
/// for the device before; of what is dropped with work in flight the memory can as well go with the process.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// A stream as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RawStream(pub(super) sys::CUstream);

// SAFETY: streams may be used by any thread that has made the context its current one.
unsafe impl Send for RawStream {}
// SAFETY: as above; the driver serialises.
unsafe impl Sync for RawStream {}

/// A device's primary context, which libraries of the same process share. Released with the last clone.
#[derive(Debug)]
pub struct Context {
    ordinal: usize,
    device: sys::CUdevice,
    raw: sys::CUcontext,
    facts: GpuFacts,
    streams: Streams,
    abandoned: AtomicBool,
    /// The last one that was dropped waited in vain.
    is_late: AtomicBool,
    /// The operation that a kernel's failure was first noticed at, if that was its own launch.
    failure: OnceLock<DeviceError>,
}

// SAFETY: a context may be used by several threads at once, each after making it its own current one.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens a device by its number among those that `CUDA_VISIBLE_DEVICES` shows.
    pub fn open(ordinal: usize) -> Result<Arc<Self>, DeviceError> {
        let count = count_devices()?;
        if ordinal >= count {
            return Err(DeviceError::Driver {
                doing: format!("cannot open GPU {ordinal}"),
                cause: format!("the driver shows {count}"),
                hint: "start at most one worker a GPU (`--nproc-per-node gpu`), and compare CUDA_VISIBLE_DEVICES"
                    .to_owned(),
            });
        }
        let opening = |cause| driver_error(format!("cannot open GPU {ordinal}"), cause);
        calls::load_contexts()?;
        let device = device_of(ordinal).map_err(opening)?;
        let facts = facts_of(device).map_err(opening)?;
        facts.expect_served(ordinal)?;
        Ok(Arc::new(Self {
            ordinal,
            device,
            facts,
            streams: Streams::default(),
            abandoned: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            failure: OnceLock::new(),
            // Last, so that nothing fails between retaining and owning.
            raw: written(ptr::null_mut(), |context| {
                // SAFETY: the device was just given by the driver; the function writes one pointer.
                unsafe { calls::context_retain(context, device) }
            })
            .map_err(opening)?,
        }))
    }

    /// Makes it the calling thread's current context, as most calls of the driver need.
    pub fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { calls::context_bind(self.raw) }
            .map_err(|cause| self.explain(driver_error(format!("cannot use GPU {}", self.ordinal), cause)))
    }

    /// A kernel was refused with this error. After a failure of the device every call is: the first has the best words.
    pub(super) fn refused(&self, code: DriverError, error: DeviceError) -> DeviceError {
        if is_of_a_kernel(code) {
            // The first stays.
            let _ = self.failure.set(error.clone());
        }
        error
    }

    /// What is known to be the cause of an error of the driver's, or the error itself.
    pub(super) fn explain(&self, error: DeviceError) -> DeviceError {
        self.failure.get().cloned().unwrap_or(error)
    }

    /// Those that are waited for before memory is freed.
    pub(super) const fn streams(&self) -> &Streams {
        &self.streams
    }

    /// From now on nobody waits for the device to come to rest, and its memory stays until the process ends: what is in
    /// flight may never end, and whoever frees memory would wait for it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Waits, no longer than `patience`, until nothing is in flight, so that memory may be given back. An error if that is
    /// not to be: the device has failed, does not come to an end, or was abandoned.
    pub(super) fn come_to_rest(&self, patience: Duration) -> Result<(), DeviceError> {
        self.bind()?;
        self.streams.come_to_rest(patience, |stream| {
            if self.abandoned.load(Ordering::Relaxed) {
                return Some(Err(DeviceError::Upstream("the device was abandoned".into())));
            }
            // SAFETY: the stream is alive: whoever destroys it takes it out of the streams before.
            answer(unsafe { calls::stream_query(stream.0) }, "of freed memory")
        })
    }

    /// For a `drop`: waits a few seconds at most, and of many that are dropped one after the other only for the first.
    /// False: the memory must stay until the process ends.
    pub(super) fn comes_to_rest(&self) -> bool {
        let was_late = self.is_late.load(Ordering::Relaxed);
        let patience = if was_late { Duration::ZERO } else { DROP_PATIENCE };
        let outcome = self.come_to_rest(patience);
        let is_late = matches!(outcome, Err(DeviceError::TimedOut { .. }));
        self.is_late.store(is_late, Ordering::Relaxed);
        if is_late && !was_late {
            tracing::warn!(
                "GPU {} has not come to rest in {} s: memory that is freed meanwhile stays until this process ends",
                self.ordinal,
                patience.as_secs()
            );
        }
        outcome.is_ok()
    }

    /// Number among the visible devices.
    #[must_use]
    pub const fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// The driver's number of the device.
    #[must_use]
    pub const fn raw_device(&self) -> sys::CUdevice {
        self.device
    }

    /// `NVIDIA H200`
    #[must_use]
    pub fn name(&self) -> &str {
        &self.facts.name
    }

    /// What its kernels are compiled for.
    #[must_use]
    pub const fn arch(&self) -> Arch {
        self.facts.arch()
    }

    /// Streaming multiprocessors.
    #[must_use]
    pub const fn multiprocessors(&self) -> u32 {
        self.facts.multiprocessors
    }

    /// Most bytes of shared memory that a block can have.
    #[must_use]
    pub const fn shared_per_block(&self) -> usize {
        self.facts.shared_per_block
    }

    /// All of its memory.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        self.facts.memory_bytes
    }

    /// Bytes that are free on the device now, other processes' use considered, and all that it has to give; none if the
    /// driver does not say.
    #[must_use]
    pub fn free_and_all_bytes(&self) -> Option<(usize, usize)> {
        self.bind().ok()?;
        let mut all = 0;
        // SAFETY: the function writes two numbers.
        let free = written(0, |free| unsafe { calls::memory_info(free, &raw mut all) });
        Some((free.ok()?, all))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: retained once in `open`, released once here. A refusal at exit changes nothing.
        let _ = unsafe { calls::context_release(self.device) };
    }
}

/// Starts the driver, and counts the devices that `CUDA_VISIBLE_DEVICES` shows.
pub fn count_devices() -> Result<usize, DeviceError> {
    start()?;
    // SAFETY: the function writes one integer.
    match written(0, |count| unsafe { calls::device_count(count) }) {
        Ok(count) => Ok(count.max(0) as usize),
        Err(cause) => Err(driver_error("cannot count the GPUs".to_owned(), cause)),
    }
}

/// A device by its number among the visible ones.
pub(super) fn device_of(ordinal: usize) -> Result<sys::CUdevice, DriverError> {
    // SAFETY: the function writes one integer.
    written(0, |device| unsafe { calls::device_get(device, ordinal as c_int) })
}

/// Loads the driver and initialises it, once a process.
fn start() -> Result<(), DeviceError> {
    static STARTED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            let library = calls::load()?;
            // SAFETY: may be called by any thread, at any time.
            unsafe { calls::init(0) }.map_err(|cause| {
                if cause.is(Code::CUDA_ERROR_STUB_LIBRARY) {
                    let path = library.path();
                    DeviceError::Library(LibraryError::Stub {
                        path: path.to_owned(),
                        driver: SearchPath::of_process().driver_beside(path),
                    })
                } else {
                    let file = library.path().display();
                    driver_error(format!("the CUDA driver `{file}` does not start"), cause)
                }
            })
        })
        .clone()
}

/// An answer of the driver, in its own words.
pub(super) fn driver_error(doing: String, error: DriverError) -> DeviceError {
    let known = HINTS.iter().find(|(code, _)| error.is(*code));
    let hint = match known {
        Some((_, hint)) => hint,
        None if is_of_a_kernel(error) => {
            &"a kernel failed: run again with CUDA_LAUNCH_BLOCKING=1, and the operation itself is named"
        }
        None => &"`ddp-train doctor` shows driver, GPUs and libraries",
    };
    driver_error_with(doing, error, (*hint).to_owned())
}

/// The same, where it is known what to do about it.
pub(super) fn driver_error_with(doing: String, error: DriverError, hint: String) -> DeviceError {
    DeviceError::Driver {
        doing,
        cause: error.words(),
        hint,
    }
}

/// What to do about some errors.
const HINTS: [(Code, &str); 5] = [
    (
        Code::CUDA_ERROR_NO_DEVICE,
        "compare `nvidia-smi` and CUDA_VISIBLE_DEVICES",
    ),
    (
        Code::CUDA_ERROR_DEVICE_UNAVAILABLE,
        "another process has the GPU for itself; see `nvidia-smi`",
    ),
    (Code::CUDA_ERROR_NO_BINARY_FOR_GPU, NEWER_NVRTC),
    (Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION, NEWER_NVRTC),
    (
        Code::CUDA_ERROR_ECC_UNCORRECTABLE,
        "the card's memory is damaged; see `nvidia-smi -q -d ECC`",
    ),
];

const NEWER_NVRTC: &str =
    "NVRTC is newer than the driver: install one of the driver's CUDA version (`ddp-train doctor`)";

/// True of what a kernel did: nothing can be asked of the device any more.
fn is_of_a_kernel(error: DriverError) -> bool {
    [
        Code::CUDA_ERROR_ILLEGAL_ADDRESS,
        Code::CUDA_ERROR_LAUNCH_TIMEOUT,
        Code::CUDA_ERROR_ASSERT,
        Code::CUDA_ERROR_HARDWARE_STACK_ERROR,
        Code::CUDA_ERROR_ILLEGAL_INSTRUCTION,
        Code::CUDA_ERROR_MISALIGNED_ADDRESS,
        Code::CUDA_ERROR_INVALID_ADDRESS_SPACE,
        Code::CUDA_ERROR_INVALID_PC,
        Code::CUDA_ERROR_LAUNCH_FAILED,
    ]
    .into_iter()
    .any(|code| error.is(code))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By their numbers in NVIDIA's documentation: those after which "the process must be terminated and relaunched".
    #[test]
    fn whatever_a_kernel_died_of_has_the_hint_for_kernels() {
        for code in [700, 702, 710, 714, 715, 716, 717, 718, 719] {
            let error = driver_error("stream `compute` failed".to_owned(), DriverError(code));
            assert!(error.to_string().contains("CUDA_LAUNCH_BLOCKING=1"), "{error}");
        }
        let refused = driver_error("no room".to_owned(), DriverError(2)).to_string();
        assert!(
            refused.ends_with("`ddp-train doctor` shows driver, GPUs and libraries"),
            "{refused}"
        );
    }
}
