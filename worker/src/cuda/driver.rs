//! The driver: started once, its results as errors with names; facts of the devices; one of them opened as a
//! [`CudaContext`], with the streams that are alive in it and the account of its memory.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUdevice, CUdevice_attribute as Attribute, CUresult as Code};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::calls::{self, DriverError, written};
use super::nvrtc::Arch;
use crate::libraries::LibraryError;
use crate::memory::DeviceError;

/// Longest wait for what is in flight before memory of something that is dropped is given back. Whoever wants it back waits
/// for the device before; of what is dropped with work in flight the memory can as well go with the process.
const DROP_PATIENCE: Duration = Duration::from_secs(10);

/// How long a waiting host asks again at once, before it begins to rest between questions.
const SPIN: Duration = Duration::from_micros(200);

/// Rest between two questions of a waiting host.
const REST: Duration = Duration::from_micros(50);

/// Rest between two allocations that wait for memory.
const MEMORY_POLL: Duration = Duration::from_millis(100);

/// A stream as the driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(pub(crate) sys::CUstream);

// SAFETY: streams may be used by any thread that has made the context its current one.
unsafe impl Send for RawStream {}
// SAFETY: as above; the driver serialises.
unsafe impl Sync for RawStream {}

/// A device's primary context, which libraries of the same process share. Released with the last clone.
#[derive(Debug)]
pub struct CudaContext {
    ordinal: usize,
    device: sys::CUdevice,
    raw: sys::CUcontext,
    facts: GpuFacts,
    streams: Streams,
    account: Account,
    /// Deadline of waits for memory that other processes hold.
    memory_deadline: Instant,
    abandoned: AtomicBool,
    /// The last one that was dropped waited in vain.
    is_late: AtomicBool,
    /// The operation that a kernel's failure was first noticed at, if that was its own launch.
    failure: OnceLock<DeviceError>,
}

// SAFETY: a context may be used by several threads at once, each after making it its own current one.
unsafe impl Send for CudaContext {}
// SAFETY: as above.
unsafe impl Sync for CudaContext {}

impl CudaContext {
    /// Opens a device by its number among those that `CUDA_VISIBLE_DEVICES` shows.
    pub fn open(ordinal: usize, memory_patience: Duration) -> Result<Arc<Self>, DeviceError> {
        let memory_deadline = Instant::now() + memory_patience;
        let count = count_devices()?;
        if ordinal >= count {
            return Err(DeviceError::Driver {
                doing: format!("cannot open GPU {ordinal}"),
                cause: format!("the driver reports {count}"),
                hint: "start at most one worker per GPU (`--nproc-per-node gpu`), and check CUDA_VISIBLE_DEVICES"
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
            account: Account::default(),
            memory_deadline,
            abandoned: AtomicBool::new(false),
            is_late: AtomicBool::new(false),
            failure: OnceLock::new(),
            // Last, so that nothing fails between retaining and owning.
            raw: await_memory(memory_deadline, || {
                written(ptr::null_mut(), |context| {
                    // SAFETY: the device was just given by the driver; the function writes one pointer.
                    unsafe { calls::context_retain(context, device) }
                })
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
    pub(crate) fn refused(&self, code: DriverError, error: DeviceError) -> DeviceError {
        if is_of_a_kernel(code) {
            // The first stays.
            let _ = self.failure.set(error.clone());
        }
        error
    }

    /// What is known to be the cause of an error of the driver's, or the error itself.
    pub(crate) fn explain(&self, error: DeviceError) -> DeviceError {
        self.failure.get().cloned().unwrap_or(error)
    }

    /// Those that are waited for before memory is freed.
    pub(crate) const fn streams(&self) -> &Streams {
        &self.streams
    }

    /// Allocates `bytes`. Does not wait for more than the whole device has.
    pub(crate) fn await_memory<T>(
        &self,
        bytes: usize,
        allocate: impl FnMut() -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let fits = self.account.bytes() + bytes <= self.facts.memory_bytes;
        await_memory(
            if fits {
                self.memory_deadline
            } else {
                Instant::now()
            },
            allocate,
        )
    }

    /// How much of its memory this process holds.
    pub(crate) const fn account(&self) -> &Account {
        &self.account
    }

    /// From now on no call waits for the device to come to rest, and its memory stays until the process ends or the device
    /// recovers: what is in flight may never end, and freeing memory waits for it.
    pub fn abandon(&self) {
        self.abandoned.store(true, Ordering::Relaxed);
    }

    /// Waits, no longer than `patience`, until nothing is in flight, so that memory may be given back. An error if that is
    /// not to be: the device has failed, does not come to an end, or was abandoned.
    pub(crate) fn come_to_rest(&self, patience: Duration) -> Result<(), DeviceError> {
        self.await_rest(patience, || self.abandoned.load(Ordering::Relaxed))
    }

    /// Takes what was abandoned into use again, once nothing is in flight: what might never have ended was aborted. An
    /// error if it does not end within `patience`, or the device has failed.
    pub(crate) fn recover(&self, patience: Duration) -> Result<(), DeviceError> {
        self.await_rest(patience, || false)?;
        self.abandoned.store(false, Ordering::Relaxed);
        Ok(())
    }

    fn await_rest(&self, patience: Duration, is_given_up: impl Fn() -> bool) -> Result<(), DeviceError> {
        self.bind()?;
        self.streams.come_to_rest(patience, |stream| {
            if is_given_up() {
                return Some(Err(DeviceError::Upstream("the device was abandoned".into())));
            }
            // SAFETY: the stream is alive: whoever destroys it takes it out of the streams before.
            answer(unsafe { calls::stream_query(stream.0) }, "unnamed")
        })
    }

    /// For a `drop`: waits a few seconds at most, and of many that are dropped one after the other only for the first.
    /// False: the memory must stay until the process ends.
    pub(crate) fn comes_to_rest(&self) -> bool {
        let was_late = self.is_late.load(Ordering::Relaxed);
        let patience = if was_late { Duration::ZERO } else { DROP_PATIENCE };
        let outcome = self.come_to_rest(patience);
        let is_late = matches!(outcome, Err(DeviceError::TimedOut { .. }));
        self.is_late.store(is_late, Ordering::Relaxed);
        if is_late && !was_late {
            tracing::warn!(
                "GPU {} is still busy after {} s: memory freed meanwhile stays allocated until this process exits",
                self.ordinal,
                patience.as_secs()
            );
        }
        outcome.is_ok()
    }

    /// Number among the visible devices.
    pub const fn ordinal(&self) -> usize {
        self.ordinal
    }

    /// Facts of the device.
    pub const fn facts(&self) -> &GpuFacts {
        &self.facts
    }

    /// Bytes that are free on the device now, other processes' use considered, and all that it has to give; none if the
    /// driver does not answer.
    pub fn free_and_all_bytes(&self) -> Option<(usize, usize)> {
        self.bind().ok()?;
        let mut all = 0;
        // SAFETY: the function writes two numbers.
        let free = written(0, |free| unsafe { calls::memory_info(free, &raw mut all) });
        Some((free.ok()?, all))
    }
}

/// `GPU 0 (NVIDIA H200)`
impl fmt::Display for CudaContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({})", self.ordinal, self.facts.name)
    }
}

impl Drop for CudaContext {
    fn drop(&mut self) {
        if self.abandoned.load(Ordering::Relaxed) {
            return;
        }
        // SAFETY: retained once in `open`, released once here. A refusal at exit changes nothing.
        let _ = unsafe { calls::context_release(self.device) };
    }
}

/// Repeats an allocation that finds too little free memory, until the deadline.
fn await_memory<T>(
    deadline: Instant,
    mut allocate: impl FnMut() -> Result<T, DriverError>,
) -> Result<T, DriverError> {
    let mut is_said = false;
    loop {
        let outcome = allocate();
        let is_full = |error: &DriverError| error.is(Code::CUDA_ERROR_OUT_OF_MEMORY);
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() || !outcome.as_ref().is_err_and(is_full) {
            return outcome;
        }
        if !std::mem::replace(&mut is_said, true) {
            let seconds = left.as_secs_f64();
            tracing::warn!(
                "waiting up to {seconds:.0} s for GPU memory that ended processes have not returned yet"
            );
        }
        std::thread::sleep(MEMORY_POLL);
    }
}

/// Starts the driver, and counts the devices that `CUDA_VISIBLE_DEVICES` shows. A driver that starts only where there are
/// devices finds none; any other that does not start is an error.
pub fn count_devices() -> Result<usize, DeviceError> {
    if !starts()? {
        return Ok(0);
    }
    // SAFETY: the function writes one integer.
    let count = written(0, |count| unsafe { calls::device_count(count) });
    let count = count.map_err(|cause| driver_error("cannot count the GPUs".to_owned(), cause))?;
    Ok(count.max(0) as usize)
}

/// A device by its number among the visible ones.
fn device_of(ordinal: usize) -> Result<sys::CUdevice, DriverError> {
    // SAFETY: the function writes one integer.
    written(0, |device| unsafe { calls::device_get(device, ordinal as c_int) })
}

/// Loads the driver and initialises it, once a process. False if it has no device.
fn starts() -> Result<bool, DeviceError> {
    static STARTS: OnceLock<Result<bool, DeviceError>> = OnceLock::new();
    STARTS
        .get_or_init(|| {
            let library = calls::load()?;
            // SAFETY: may be called by any thread, at any time.
            match unsafe { calls::init(0) } {
                Ok(()) => Ok(true),
                Err(cause) if cause.is(Code::CUDA_ERROR_STUB_LIBRARY) => {
                    let path = library.path().to_owned();
                    Err(DeviceError::Library(LibraryError::Stub { path }))
                }
                Err(cause) if cause.is(Code::CUDA_ERROR_NO_DEVICE) => Ok(false),
                // Without its kernel module, a library refuses in other words.
                Err(cause) if !cause.is(Code::CUDA_ERROR_SYSTEM_NOT_READY) && !has_device_nodes() => {
                    Ok(false)
                }
                Err(cause) => {
                    let file = library.path().display();
                    let doing = format!("cannot initialise the CUDA driver `{file}`");
                    Err(driver_error(doing, cause))
                }
            }
        })
        .clone()
}

/// True if there is the device file of a GPU, such as `/dev/nvidia0`. WSL shows its GPUs through `/dev/dxg`.
pub fn has_device_nodes() -> bool {
    let Ok(entries) = std::fs::read_dir("/dev") else {
        return false;
    };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let number = name.strip_prefix("nvidia");
        name == "dxg" || number.is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// The result of a query; none for "not yet".
pub(crate) fn answer(answer: Result<(), DriverError>, stream: &str) -> Option<Result<(), DeviceError>> {
    match answer {
        Ok(()) => Some(Ok(())),
        Err(error) if error.is(Code::CUDA_ERROR_NOT_READY) => None,
        Err(error) => Some(Err(driver_error(format!("stream `{stream}` failed"), error))),
    }
}

/// Asks until there is an answer. The driver's own way to wait has no deadline.
pub(crate) fn wait_until(
    mut poll: impl FnMut() -> Option<Result<(), DeviceError>>,
    deadline: Instant,
    what: impl Fn() -> String,
) -> Result<(), DeviceError> {
    let started = Instant::now();
    loop {
        if let Some(answer) = poll() {
            return answer;
        }
        let now = Instant::now();
        if now >= deadline {
            return Err(DeviceError::TimedOut {
                what: what(),
                waited_ms: (now - started).as_millis() as u64,
            });
        }
        if now - started < SPIN {
            std::hint::spin_loop();
        } else {
            std::thread::sleep(REST.min(deadline - now));
        }
    }
}

/// An answer of the driver, in its own words.
pub(crate) fn driver_error(doing: String, error: DriverError) -> DeviceError {
    let known = HINTS.iter().find(|(code, _)| error.0 == *code);
    let hint = match known {
        Some((_, hint)) => hint,
        None if is_of_a_kernel(error) => {
            "a kernel failed: run again with CUDA_LAUNCH_BLOCKING=1, which stops pipelines (set `parallel.pipeline.stages: 1`), to see which operation it was"
        }
        None => "`ddp-train doctor` shows driver, GPUs and libraries",
    };
    driver_error_with(doing, error, hint.to_owned())
}

/// The same, where it is known what to do about it.
pub(crate) fn driver_error_with(doing: String, error: DriverError, hint: String) -> DeviceError {
    DeviceError::Driver {
        doing,
        cause: error.words(),
        hint,
    }
}

/// What to do about some errors.
const HINTS: [(c_uint, &str); 9] = [
    (
        Code::CUDA_ERROR_DEVICE_UNAVAILABLE as c_uint,
        "another process uses the GPU exclusively; see `nvidia-smi`",
    ),
    (Code::CUDA_ERROR_NO_BINARY_FOR_GPU as c_uint, NEWER_NVRTC),
    (Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION as c_uint, NEWER_NVRTC),
    (Code::CUDA_ERROR_ECC_UNCORRECTABLE as c_uint, DAMAGED_MEMORY),
    (CONTAINED, DAMAGED_MEMORY),
    (
        Code::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED as c_uint,
        "two GPUs cannot reach each other: see `nvidia-smi topo -p2p r`",
    ),
    (
        Code::CUDA_ERROR_NVLINK_UNCORRECTABLE as c_uint,
        "an NVLink has failed: see `nvidia-smi nvlink -e`, and reset the GPU",
    ),
    (
        Code::CUDA_ERROR_SYSTEM_NOT_READY as c_uint,
        "the fabric manager of the GPUs does not run: `systemctl start nvidia-fabricmanager`, and see `nvidia-smi -q`",
    ),
    (
        Code::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH as c_uint,
        "the driver's library and its kernel module differ in version: reboot after a driver update",
    ),
];

/// `CUDA_ERROR_CONTAINED`, of later versions of the header: an error of memory has ended the GPU's processes.
const CONTAINED: c_uint = 226;

const DAMAGED_MEMORY: &str = "the GPU's memory is damaged; see `nvidia-smi -q -d ECC`";
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

/// All that are alive.
#[derive(Debug, Default)]
pub(crate) struct Streams(Mutex<Vec<RawStream>>);

impl Streams {
    pub(crate) fn add(&self, stream: RawStream) {
        self.0.lock().push(stream);
    }

    /// From now on it is asked nothing, so that it can be destroyed.
    pub(crate) fn remove(&self, stream: RawStream) {
        self.0.lock().retain(|other| *other != stream);
    }

    /// Waits, no longer than `patience`, until `is_empty` was true of each of these streams, or the stream is
    /// gone; an error of `is_empty` ends the wait. Nobody can destroy a stream while it is asked: what the driver does with the
    /// handle of one that was destroyed is not defined.
    pub(crate) fn come_to_rest(
        &self,
        patience: Duration,
        is_empty: impl Fn(RawStream) -> Option<Result<(), DeviceError>>,
    ) -> Result<(), DeviceError> {
        let mut left = self.0.lock().clone();
        let poll = || {
            let alive = self.0.lock();
            left.retain(|stream| alive.contains(stream));
            while let Some(&stream) = left.last() {
                if let Err(error) = is_empty(stream)? {
                    return Some(Err(error));
                }
                left.pop();
            }
            Some(Ok(()))
        };
        wait_until(poll, Instant::now() + patience, || {
            "the GPU to come to rest".to_owned()
        })
    }
}

/// Names of the largest holders in an error.
const LARGEST_NAMED: usize = 6;

/// How many bytes of a device this process holds, by name.
#[derive(Debug, Default)]
pub(crate) struct Account(Mutex<Balance>);

#[derive(Debug, Default)]
struct Balance {
    held: BTreeMap<String, usize>,
    bytes: usize,
    peak: usize,
}

impl Account {
    pub(crate) fn add(&self, name: &str, bytes: usize) {
        let mut balance = self.0.lock();
        *balance.held.entry(name.to_owned()).or_default() += bytes;
        balance.bytes += bytes;
        balance.peak = balance.peak.max(balance.bytes);
    }

    pub(crate) fn subtract(&self, name: &str, bytes: usize) {
        let mut balance = self.0.lock();
        balance.bytes = balance.bytes.saturating_sub(bytes);
        if let Some(held) = balance.held.get_mut(name) {
            *held = held.saturating_sub(bytes);
            if *held == 0 {
                balance.held.remove(name);
            }
        }
    }

    /// Bytes held now.
    pub(crate) fn bytes(&self) -> usize {
        self.0.lock().bytes
    }

    /// Most bytes held at one time.
    pub(crate) fn peak(&self) -> usize {
        self.0.lock().peak
    }

    /// `params 496 MiB, gradients 248 MiB, 3 others 1 MiB`: the largest first.
    pub(crate) fn words(&self) -> String {
        let balance = self.0.lock();
        let mut held: Vec<_> = balance.held.iter().map(|(name, bytes)| (*bytes, name)).collect();
        held.sort_unstable_by(|a, b| b.cmp(a));
        let (named, others) = held.split_at(held.len().min(LARGEST_NAMED));
        let mut parts: Vec<_> = named
            .iter()
            .map(|(bytes, name)| format!("{name} {}", mib(*bytes)))
            .collect();
        if !others.is_empty() {
            let bytes = others.iter().map(|(bytes, _)| bytes).sum();
            parts.push(format!("{} others {}", others.len(), mib(bytes)));
        }
        if parts.is_empty() {
            parts.push("nothing".to_owned());
        }
        parts.join(", ")
    }
}

pub(crate) fn mib(bytes: usize) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Bytes of a device's name with its final zero.
const NAME_BYTES: usize = 128;

/// Bytes of a PCI address with its final zero: `0000:65:00.0`.
const PCI_BYTES: usize = 16;

/// One GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    /// `NVIDIA H200`
    pub name: String,
    /// Major and minor number, which kernels are compiled for.
    pub compute_capability: (u32, u32),
    /// All of its memory.
    pub memory_bytes: usize,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Most bytes of shared memory of a block.
    pub shared_per_block: usize,
    /// Where it is plugged in; empty if that is unknown.
    pub pci: String,
}

impl GpuFacts {
    /// Those of a device by its number among the visible ones.
    pub fn of(ordinal: usize) -> Result<Self, DeviceError> {
        let facts = device_of(ordinal).and_then(facts_of);
        facts.map_err(|cause| driver_error(format!("cannot describe GPU {ordinal}"), cause))
    }

    /// What its kernels are compiled for.
    pub const fn arch(&self) -> Arch {
        let (major, minor) = self.compute_capability;
        Arch::of_capability(major, minor)
    }

    /// An error if it is older than what kernels are written for. `ordinal` is its number among the visible ones.
    pub fn expect_served(&self, ordinal: usize) -> Result<(), DeviceError> {
        let arch = self.arch();
        if arch >= Arch::OLDEST {
            return Ok(());
        }
        Err(DeviceError::TooOld {
            device: format!("GPU {ordinal} ({})", self.name),
            arch: arch.to_string(),
            oldest: Arch::OLDEST.to_string(),
        })
    }
}

/// Those of a device that the driver has given.
fn facts_of(device: CUdevice) -> Result<GpuFacts, DriverError> {
    let number = |which| {
        // SAFETY: the driver knows the device; the function writes one integer.
        let value = written(0, |value| unsafe {
            calls::device_attribute(value, which, device)
        });
        value.map(|value| value.max(0) as u32)
    };
    let name = text::<NAME_BYTES>(|to, bytes| {
        // SAFETY: the function writes at most so many bytes, the last of them a zero.
        unsafe { calls::device_name(to, bytes, device) }
    });
    let pci = text::<PCI_BYTES>(|to, bytes| {
        // SAFETY: as above.
        unsafe { calls::device_pci(to, bytes, device) }
    });
    let shared = number(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    Ok(GpuFacts {
        name: name?,
        compute_capability: (
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // SAFETY: the driver knows the device; the function writes one number.
        memory_bytes: written(0, |bytes| unsafe { calls::device_memory(bytes, device) })?,
        multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_per_block: shared? as usize,
        pci: pci.unwrap_or_default(),
    })
}

/// What a function writes into room for so many bytes.
fn text<const BYTES: usize>(
    write: impl FnOnce(*mut c_char, c_int) -> Result<(), DriverError>,
) -> Result<String, DriverError> {
    let mut bytes = [0_u8; BYTES];
    write(bytes.as_mut_ptr().cast(), BYTES as c_int)?;
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    Ok(text.to_string_lossy().into_owned())
}

/// All devices that `CUDA_VISIBLE_DEVICES` shows, in the order of their numbers.
pub fn visible_gpus() -> Result<Vec<GpuFacts>, DeviceError> {
    let facts = |ordinal| {
        let device =
            device_of(ordinal).map_err(|error| driver_error(format!("cannot see GPU {ordinal}"), error))?;
        facts_of(device).map_err(|error| driver_error("cannot describe a GPU".to_owned(), error))
    };
    (0..count_devices()?).map(facts).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};

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

    const LONG: Duration = Duration::from_mins(1);

    fn streams() -> (Streams, [RawStream; 2]) {
        let [first, second] = [1, 2].map(|handle| RawStream(std::ptr::without_provenance_mut(handle)));
        let streams = Streams::default();
        streams.add(first);
        streams.add(second);
        (streams, [first, second])
    }

    /// Whoever would destroy one waits for the lock, or is done before: then it is asked no more.
    #[test]
    fn a_stream_is_asked_only_while_nobody_can_destroy_it() {
        let (streams, [first, second]) = streams();
        let asked = RefCell::new(Vec::new());
        let rounds = RefCell::new(0);
        let outcome = streams.come_to_rest(LONG, |stream| {
            assert!(streams.0.try_lock().is_none(), "it can be destroyed meanwhile");
            asked.borrow_mut().push(stream);
            *rounds.borrow_mut() += 1;
            (*rounds.borrow() > 3).then_some(Ok(()))
        });
        assert_eq!(outcome, Ok(()));
        // Each until it is empty, and then the next.
        assert_eq!(*asked.borrow(), [second, second, second, second, first]);
    }

    #[test]
    fn a_stream_that_is_destroyed_is_waited_for_no_longer() {
        let (streams, [first, second]) = streams();
        let asked = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                asked.wait();
                streams.remove(second);
            });
            let met = RefCell::new(false);
            let outcome = streams.come_to_rest(LONG, |stream| {
                if stream == first {
                    return Some(Ok(()));
                }
                if !met.replace(true) {
                    asked.wait();
                }
                None
            });
            assert_eq!(outcome, Ok(()));
        });
    }

    #[test]
    fn a_stream_that_never_empties_is_waited_for_as_long_as_was_said() {
        let (streams, _) = streams();
        let outcome = streams.come_to_rest(Duration::ZERO, |_| None);
        let Err(DeviceError::TimedOut { what, .. }) = outcome else {
            panic!("{outcome:?}");
        };
        assert_eq!(what, "the GPU to come to rest");
        let failed = DeviceError::Upstream("failed".into());
        let outcome = streams.come_to_rest(LONG, |_| Some(Err(failed.clone())));
        assert_eq!(outcome, Err(failed));
    }

    #[test]
    fn a_wait_ends_with_the_answer_or_at_its_deadline() {
        let asked = Cell::new(0);
        let third = || {
            asked.set(asked.get() + 1);
            (asked.get() == 3).then_some(Ok(()))
        };
        assert_eq!(
            wait_until(third, Instant::now() + Duration::from_secs(10), String::new),
            Ok(())
        );
        assert_eq!(asked.get(), 3);
        let never = wait_until(|| None, Instant::now(), || "stream `compute`".to_owned());
        let error = DeviceError::TimedOut {
            what: "stream `compute`".to_owned(),
            waited_ms: 0,
        };
        assert_eq!(never, Err(error));
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
