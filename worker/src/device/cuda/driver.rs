//! The driver: started once, one device chosen, its answers as errors with names.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult as Code};

use super::Arch;
use super::event::{answer, wait_until};
use crate::device::DeviceError;
use crate::libraries::{Kind, LibraryError, SearchPath};

/// Longest wait for what is in flight before memory is given back. Collectives that never end are ended by their
/// communicator long before; this bounds a device that has stopped answering.
const PATIENCE: Duration = Duration::from_mins(30);

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
    name: String,
    capability: (u32, u32),
    multiprocessors: u32,
    shared_per_block: usize,
    memory_bytes: usize,
    /// All that are alive.
    streams: Mutex<Vec<RawStream>>,
    abandoned: AtomicBool,
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
        let device = result::device::get(ordinal as i32).map_err(opening)?;
        let attribute = |which| {
            // SAFETY: the device was just given by the driver.
            unsafe { result::device::get_attribute(device, which) }.map(|value| value.max(0) as u32)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR).map_err(opening)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR).map_err(opening)?;
        let shared = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
        Ok(Arc::new(Self {
            ordinal,
            device,
            name: result::device::get_name(device).map_err(opening)?,
            capability: (major, minor),
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
                .map_err(opening)?,
            shared_per_block: shared.map_err(opening)? as usize,
            // SAFETY: the device was just given by the driver.
            memory_bytes: unsafe { result::device::total_mem(device) }.map_err(opening)?,
            streams: Mutex::default(),
            abandoned: AtomicBool::new(false),
            failure: OnceLock::new(),
            // SAFETY: as above. Last, so that nothing fails between retaining and owning.
            raw: unsafe { result::primary_ctx::retain(device) }.map_err(opening)?,
        }))
    }

    /// Makes it the calling thread's current context, as most calls of the driver need.
    pub fn bind(&self) -> Result<(), DeviceError> {
        // SAFETY: the context is retained for as long as `self` lives.
        unsafe { result::ctx::set_current(self.raw) }
            .map_err(|cause| self.explain(driver_error(format!("cannot use GPU {}", self.ordinal), cause)))
    }

    /// A kernel was refused with this error. After a failure of the device every call is: the first has the best words.
    pub(super) fn refused(&self, code: DriverError, error: DeviceError) -> DeviceError {
        if is_of_a_kernel(code.0) {
            // The first stays.
            let _ = self.failure.set(error.clone());
        }
        error
    }

    /// What is known to be the cause of an error of the driver's, or the error itself.
    pub(super) fn explain(&self, error: DeviceError) -> DeviceError {
        self.failure.get().cloned().unwrap_or(error)
    }

    pub(super) fn add_stream(&self, stream: RawStream) {
        self.streams().push(stream);
    }

    pub(super) fn remove_stream(&self, stream: RawStream) {
        self.streams().retain(|other| *other != stream);
    }

    /// From now on nobody waits for the device to come to rest, and its memory stays until the process ends: what is in
    /// flight may never end, and whoever frees memory would wait for it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Waits until nothing is in flight, so that memory may be given back. False if that is not to be: the device has
    /// failed, has stopped answering, or was abandoned.
    pub(super) fn comes_to_rest(&self) -> bool {
        let streams = self.streams().clone();
        let deadline = Instant::now() + PATIENCE;
        self.bind().is_ok()
            && streams.into_iter().all(|stream| {
                let poll = || {
                    if self.abandoned.load(Ordering::Relaxed) {
                        return Some(Err(DeviceError::Upstream("the device was abandoned".into())));
                    }
                    // SAFETY: a stream that somebody destroys meanwhile is an error of the driver's.
                    answer(
                        unsafe { sys::cuStreamQuery(stream.0) }.result(),
                        "of freed memory",
                    )
                };
                wait_until(poll, deadline, || "memory to be freed".to_owned()).is_ok()
            })
    }

    fn streams(&self) -> MutexGuard<'_, Vec<RawStream>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
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
        &self.name
    }

    /// What its kernels are compiled for.
    #[must_use]
    pub const fn arch(&self) -> Arch {
        Arch::of_capability(self.capability.0, self.capability.1)
    }

    /// Streaming multiprocessors.
    #[must_use]
    pub const fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// Most bytes of shared memory that a block can have.
    #[must_use]
    pub const fn shared_per_block(&self) -> usize {
        self.shared_per_block
    }

    /// All of its memory.
    #[must_use]
    pub const fn memory_bytes(&self) -> usize {
        self.memory_bytes
    }

    /// Bytes that are free on the device now, other processes' use considered; none if the driver does not say.
    #[must_use]
    pub fn free_bytes(&self) -> Option<usize> {
        self.bind().ok()?;
        let (free, _) = result::mem_get_info().ok()?;
        Some(free)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: retained once in `open`, released once here. A refusal at exit changes nothing.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

/// Starts the driver, and counts the devices that `CUDA_VISIBLE_DEVICES` shows.
pub fn count_devices() -> Result<usize, DeviceError> {
    start()?;
    match result::device::get_count() {
        Ok(count) => Ok(count.max(0) as usize),
        Err(cause) => Err(driver_error("cannot count the GPUs".to_owned(), cause)),
    }
}

/// Loads the driver and initialises it, once a process.
fn start() -> Result<(), DeviceError> {
    static STARTED: OnceLock<Result<(), DeviceError>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            // SAFETY: loads the driver's library, whose initialisers may run in any thread. Asked first, because
            // the bindings panic where there is none.
            if !unsafe { sys::is_culib_present() } {
                return Err(DeviceError::Library(LibraryError::NotFound {
                    kind: Kind::Cuda,
                    searched: SearchPath::of_process().existing(),
                }));
            }
            result::init().map_err(|cause| driver_error("the CUDA driver does not start".to_owned(), cause))
        })
        .clone()
}

/// An answer of the driver, in its own words.
pub(super) fn driver_error(doing: String, error: DriverError) -> DeviceError {
    let hint = match error.0 {
        Code::CUDA_ERROR_NO_DEVICE => "compare `nvidia-smi` and CUDA_VISIBLE_DEVICES",
        Code::CUDA_ERROR_DEVICE_UNAVAILABLE => "another process has the GPU for itself; see `nvidia-smi`",
        Code::CUDA_ERROR_NO_BINARY_FOR_GPU | Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            "NVRTC is newer than the driver: install one of the driver's CUDA version (`ddp-train doctor`)"
        }
        code if is_of_a_kernel(code) => {
            "a kernel failed: run again with CUDA_LAUNCH_BLOCKING=1, and the operation itself is named"
        }
        Code::CUDA_ERROR_ECC_UNCORRECTABLE => "the card's memory is damaged; see `nvidia-smi -q -d ECC`",
        _ => "`ddp-train doctor` shows driver, GPUs and libraries",
    };
    DeviceError::Driver {
        doing,
        cause: words(error),
        hint: hint.to_owned(),
    }
}

/// True of what a kernel did: nothing can be asked of the device any more.
const fn is_of_a_kernel(code: Code) -> bool {
    matches!(
        code,
        Code::CUDA_ERROR_ILLEGAL_ADDRESS
            | Code::CUDA_ERROR_MISALIGNED_ADDRESS
            | Code::CUDA_ERROR_LAUNCH_FAILED
            | Code::CUDA_ERROR_ASSERT
    )
}

/// `CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected`
pub(super) fn words(error: DriverError) -> String {
    let text =
        |answer: Result<&CStr, DriverError>| answer.ok().map(|text| text.to_string_lossy().into_owned());
    let name = text(error.error_name()).unwrap_or_else(|| format!("{:?}", error.0));
    match text(error.error_string()) {
        Some(meaning) => format!("{name}: {meaning}"),
        None => name,
    }
}
