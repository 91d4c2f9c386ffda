//! Kernels: functions in the modules that a device has loaded.
#![allow(unsafe_code, reason = "modules and functions of the CUDA driver")]

use std::collections::HashMap;
use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use cudarc::driver::sys;

use super::calls::{self, written};
use super::driver::CudaContext;
use super::driver::{driver_error, driver_error_with};
use super::nvrtc::{Arch, CompileUnit, CubinCache, Define, KernelSource, Nvrtc};
use crate::device::DeviceError;

/// Shared memory that a block may have without asking for more: what its kernel declares, and what the launch says.
const SHARED_WITHOUT_ASKING: usize = 48 << 10;

/// A function in a module that the device has loaded. Clones are the same one.
#[derive(Clone, Debug)]
pub struct Kernel(Arc<Function>);

#[derive(Debug)]
struct Function {
    raw: sys::CUfunction,
    name: &'static str,
    /// Bytes of shared memory that it declares.
    declared_shared: usize,
    /// Dynamic shared memory that it may be launched with.
    shared_limit: AtomicUsize,
    /// Unloads the code with the last function.
    _module: Arc<Module>,
}

// SAFETY: functions may be launched by any thread that has made the context its current one.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Kernel {
    /// As the driver knows it.
    #[must_use]
    pub fn raw(&self) -> sys::CUfunction {
        self.0.raw
    }

    /// Its name in the source.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.0.name
    }

    /// Bytes of shared memory that a block has beside what the launch says.
    pub(super) fn declared_shared(&self) -> usize {
        self.0.declared_shared
    }

    /// Lets it be launched with this much dynamic shared memory.
    pub(super) fn allow_shared(&self, bytes: usize) -> Result<(), DeviceError> {
        if bytes <= self.0.shared_limit.load(Ordering::Relaxed) {
            return Ok(());
        }
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the module is loaded for as long as the function lives.
        unsafe { calls::function_set(self.0.raw, attribute, bytes as i32) }.map_err(|error| {
            let doing = format!(
                "kernel `{}` cannot have {bytes} bytes of shared memory",
                self.0.name
            );
            driver_error(doing, error)
        })?;
        self.0.shared_limit.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }
}

#[derive(Debug)]
struct Module {
    raw: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: as for `Function`.
unsafe impl Send for Module {}
// SAFETY: as for `Function`.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.comes_to_rest() {
            // SAFETY: loaded once, unloaded once; the functions that hold it are gone.
            let _ = unsafe { calls::module_unload(self.raw) };
        }
    }
}

/// The modules of one device, compiled when they are first asked for.
#[derive(Debug)]
pub(super) struct Modules {
    context: Arc<CudaContext>,
    compiler: OnceLock<Result<(Nvrtc, Arch), DeviceError>>,
    cache: CubinCache,
    loaded: Mutex<Loaded>,
}

#[derive(Debug, Default)]
struct Loaded {
    modules: HashMap<(usize, Vec<Define>), Arc<Module>>,
    functions: HashMap<FunctionKey, Kernel>,
}

/// Sources are statics: their address tells them apart.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FunctionKey {
    source: usize,
    name: &'static str,
    defines: Vec<Define>,
}

impl Modules {
    pub(super) fn new(context: Arc<CudaContext>, cache: CubinCache) -> Self {
        Self {
            context,
            compiler: OnceLock::new(),
            cache,
            loaded: Mutex::default(),
        }
    }

    /// A kernel by source, name and definitions.
    pub(super) fn kernel(
        &self,
        source: &'static KernelSource,
        name: &'static str,
        defines: &[Define],
    ) -> Result<Kernel, DeviceError> {
        let key = FunctionKey {
            source: std::ptr::from_ref(source) as usize,
            name,
            defines: defines.to_vec(),
        };
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = loaded.functions.get(&key) {
            return Ok(kernel.clone());
        }
        let unit = CompileUnit::new(source, defines);
        let of_unit = (key.source, key.defines.clone());
        let module = if let Some(module) = loaded.modules.get(&of_unit) {
            module.clone()
        } else {
            let module = self.load(&unit)?;
            loaded.modules.insert(of_unit, module.clone());
            module
        };
        let symbol = CString::new(name).expect("names of kernels have no zero byte");
        let found = written(ptr::null_mut(), |function| {
            // SAFETY: the module is loaded; the name ends in a zero; the function writes one pointer.
            unsafe { calls::module_function(function, module.raw, symbol.as_ptr()) }
        });
        let raw = found.map_err(|error| driver_error(format!("`{unit}` has no kernel `{name}`"), error))?;
        let declared = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function was just given by the driver; one integer is written.
        let declared = written(0, |bytes| unsafe { calls::function_get(bytes, declared, raw) })
            .map_err(|error| driver_error(format!("shared memory of kernel `{name}`"), error))?;
        let declared_shared = declared.max(0) as usize;
        let shared_limit = SHARED_WITHOUT_ASKING.saturating_sub(declared_shared);
        let kernel = Kernel(Arc::new(Function {
            raw,
            name,
            declared_shared,
            shared_limit: AtomicUsize::new(shared_limit),
            _module: module,
        }));
        loaded.functions.insert(key, kernel.clone());
        Ok(kernel)
    }

    fn load(&self, unit: &CompileUnit) -> Result<Arc<Module>, DeviceError> {
        let (nvrtc, arch) = self.compiler()?;
        let cubin = self.cache.compile(nvrtc, unit, *arch)?;
        self.context.bind()?;
        let loaded = written(ptr::null_mut(), |module| {
            // SAFETY: the image is a whole CUBIN, as NVRTC made it or as the cache checked it; one pointer is written.
            unsafe { calls::module_load(module, cubin.0.as_ptr().cast()) }
        });
        let raw = loaded.map_err(|error| {
            let version = nvrtc.version();
            let doing = format!("cannot load `{unit}`, compiled for {arch} by NVRTC {version}");
            match nvrtc.library().newer_than_driver() {
                Some(newer) => driver_error_with(doing, error, format!("{newer}: {}", newer.hint())),
                None => driver_error(doing, error),
            }
        })?;
        Ok(Arc::new(Module {
            raw,
            context: self.context.clone(),
        }))
    }

    /// Opened with the first kernel.
    fn compiler(&self) -> Result<&(Nvrtc, Arch), DeviceError> {
        let open = || {
            let nvrtc = Nvrtc::open()?;
            let arch = nvrtc.arch_for(self.context.arch())?;
            Ok((nvrtc, arch))
        };
        self.compiler.get_or_init(open).as_ref().map_err(Clone::clone)
    }
}
