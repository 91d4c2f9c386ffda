//! The driver's functions, from the file that discovery chose.
//!
//! Types and numbers are cudarc's. Its own way to load is not used: that takes what the dynamic loader finds first
//! under a list of names, be it another file than the one that was chosen or a toolkit's stub, and panics where a function
//! is missing. Results are plain numbers here, because a driver newer than the bindings has errors that their enum lacks.
#![allow(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUfunction_attribute,
    CUhostFn, CUmodule, CUresult as Code, CUstream,
};

use crate::libraries::{Library, LibraryError, LibraryKind, table};

/// What a function answers that has not succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DriverError(pub(crate) c_uint);

impl DriverError {
    const NOT_STARTED: Self = Self(Code::CUDA_ERROR_NOT_INITIALIZED as c_uint);

    /// True if it is this one.
    pub(crate) fn is(self, code: Code) -> bool {
        self.0 == code as c_uint
    }

    /// `CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected`
    pub(crate) fn words(self) -> String {
        let text = |function: unsafe fn(c_uint, *mut *const c_char) -> Result<(), DriverError>| {
            // SAFETY: the function writes the address of a constant string, or null and an error.
            let text = written(ptr::null(), |text| unsafe { function(self.0, text) }).ok()?;
            // SAFETY: as above; a string of C's ends in a zero.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        let name = text(error_name);
        let name = name.unwrap_or_else(|| format!("error {} of the CUDA driver", self.0).into());
        match text(error_meaning) {
            Some(meaning) => format!("{name}: {meaning}"),
            None => name.into_owned(),
        }
    }
}

const fn answer(code: c_uint) -> Result<(), DriverError> {
    match code {
        0 => Ok(()),
        code => Err(DriverError(code)),
    }
}

/// A table, and each of its functions as one that gives a result.
macro_rules! calls {
    (
        $(#[$meta:meta])*
        $table:ident in $loaded:ident {
            $($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),* $(,)?) = $symbol:literal;)*
        }
    ) => {
        table! {
            $(#[$meta])*
            struct $table {
                $($(#[$doc])* $name: fn($($type),*) -> c_uint = $symbol;)*
            }
        }

        static $loaded: OnceLock<$table> = OnceLock::new();

        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// What is passed is alive, and where the function writes there is room: see the driver's documentation.
            pub(crate) unsafe fn $name($($arg: $type),*) -> Result<(), DriverError> {
                let functions = $loaded.get().ok_or(DriverError::NOT_STARTED)?;
                // SAFETY: the caller's promise.
                answer(unsafe { (functions.$name)($($arg),*) })
            }
        )*
    };
}

calls! {
    /// What needs no context. Signatures, here and below, as `cuda.h` of CUDA 12.0 to 13.2 has them.
    Devices in DEVICES {
        /// What an error is called: `CUDA_ERROR_NO_DEVICE`.
        error_name(code: c_uint, name: *mut *const c_char) = "cuGetErrorName";
        /// The same in a few words.
        error_meaning(code: c_uint, meaning: *mut *const c_char) = "cuGetErrorString";

        /// Starts the driver; the flags are 0.
        init(flags: c_uint) = "cuInit";
        /// How many devices are visible.
        device_count(count: *mut c_int) = "cuDeviceGetCount";
        /// A device by its number among the visible ones.
        device_get(device: *mut CUdevice, ordinal: c_int) = "cuDeviceGet";
        /// Its name, cut to so many bytes with the final zero.
        device_name(name: *mut c_char, bytes: c_int, device: CUdevice) = "cuDeviceGetName";
        /// Bytes of its memory.
        device_memory(bytes: *mut usize, device: CUdevice) = "cuDeviceTotalMem_v2";
        /// One property.
        device_attribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice) = "cuDeviceGetAttribute";
        /// Its PCI address, cut to so many bytes with the final zero.
        device_pci(address: *mut c_char, bytes: c_int, device: CUdevice) = "cuDeviceGetPCIBusId";
    }
}

calls! {
    /// What a context needs.
    Contexts in CONTEXTS {
        /// A device's primary context, which is to be released as often.
        context_retain(context: *mut CUcontext, device: CUdevice) = "cuDevicePrimaryCtxRetain";
        /// Gives it back.
        context_release(device: CUdevice) = "cuDevicePrimaryCtxRelease_v2";
        /// Makes it the calling thread's current one.
        context_bind(context: CUcontext) = "cuCtxSetCurrent";

        /// Bytes that are free on the device, and all of them.
        memory_info(free: *mut usize, total: *mut usize) = "cuMemGetInfo_v2";
        /// Memory of the device, not zeroed.
        memory_alloc(address: *mut CUdeviceptr, bytes: usize) = "cuMemAlloc_v2";
        /// Frees it; may wait for the device.
        memory_free(address: CUdeviceptr) = "cuMemFree_v2";
        /// Page-locked memory of the host, not zeroed.
        host_alloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) = "cuMemHostAlloc";
        /// Frees it; may wait for the device.
        host_free(address: *mut c_void) = "cuMemFreeHost";
        /// Fills bytes, ordered with the default stream.
        fill(target: CUdeviceptr, value: c_uchar, bytes: usize) = "cuMemsetD8_v2";
        /// Copies to the device, in stream order.
        copy_in(target: CUdeviceptr, source: *const c_void, bytes: usize, stream: CUstream) = "cuMemcpyHtoDAsync_v2";
        /// Copies to the host, in stream order.
        copy_out(target: *mut c_void, source: CUdeviceptr, bytes: usize, stream: CUstream) = "cuMemcpyDtoHAsync_v2";

        /// Least and greatest priority of the context's streams; the greatest is the smaller number.
        stream_priorities(least: *mut c_int, greatest: *mut c_int) = "cuCtxGetStreamPriorityRange";
        /// A stream.
        stream_create(stream: *mut CUstream, flags: c_uint, priority: c_int) = "cuStreamCreateWithPriority";
        /// Destroys it; work in flight goes on.
        stream_destroy(stream: CUstream) = "cuStreamDestroy_v2";
        /// Succeeds if it is empty.
        stream_query(stream: CUstream) = "cuStreamQuery";
        /// Waits until it is empty. Null is the default stream.
        stream_synchronize(stream: CUstream) = "cuStreamSynchronize";
        /// Lets its later work run after an event.
        stream_wait(stream: CUstream, event: CUevent, flags: c_uint) = "cuStreamWaitEvent";
        /// Has it call the host.
        stream_call(stream: CUstream, function: CUhostFn, argument: *mut c_void) = "cuLaunchHostFunc";

        /// An event.
        event_create(event: *mut CUevent, flags: c_uint) = "cuEventCreate";
        /// Destroys it.
        event_destroy(event: CUevent) = "cuEventDestroy_v2";
        /// Makes it mean "all that is in the stream now has run".
        event_record(event: CUevent, stream: CUstream) = "cuEventRecord";
        /// Succeeds if it is reached.
        event_query(event: CUevent) = "cuEventQuery";
        /// Milliseconds between two.
        event_elapsed(ms: *mut f32, from: CUevent, to: CUevent) = "cuEventElapsedTime";

        /// Loads a CUBIN.
        module_load(module: *mut CUmodule, image: *const c_void) = "cuModuleLoadData";
        /// Unloads it.
        module_unload(module: CUmodule) = "cuModuleUnload";
        /// A kernel by its name.
        module_function(function: *mut CUfunction, module: CUmodule, name: *const c_char) = "cuModuleGetFunction";
        /// One property of a kernel.
        function_get(value: *mut c_int, attribute: CUfunction_attribute, function: CUfunction) = "cuFuncGetAttribute";
        /// Sets one property of a kernel.
        function_set(function: CUfunction, attribute: CUfunction_attribute, value: c_int) = "cuFuncSetAttribute";
        /// Launches a kernel; one of the last two arguments is null.
        function_launch(
            function: CUfunction,
            grid_x: c_uint, grid_y: c_uint, grid_z: c_uint,
            block_x: c_uint, block_y: c_uint, block_z: c_uint,
            shared_bytes: c_uint, stream: CUstream,
            arguments: *mut *mut c_void, extra: *mut *mut c_void,
        ) = "cuLaunchKernel";
    }
}

/// What a function writes at the address that it is given, which holds `value` before.
pub(crate) fn written<T>(
    mut value: T,
    call: impl FnOnce(*mut T) -> Result<(), DriverError>,
) -> Result<T, DriverError> {
    call(&raw mut value)?;
    Ok(value)
}

/// Opens the driver's library, once a process. From then on what needs no context can be called.
pub(crate) fn load() -> Result<&'static Library, LibraryError> {
    static LIBRARY: OnceLock<Result<Library, LibraryError>> = OnceLock::new();
    let open = || {
        let library = Library::open(LibraryKind::Cuda)?;
        let devices = Devices::load(&library)?;
        DEVICES.get_or_init(|| devices);
        Ok(library)
    };
    LIBRARY.get_or_init(open).as_ref().map_err(Clone::clone)
}

/// From now on what a context needs can be called too.
pub(crate) fn load_contexts() -> Result<(), LibraryError> {
    let contexts = Contexts::load(load()?)?;
    CONTEXTS.get_or_init(|| contexts);
    Ok(())
}
