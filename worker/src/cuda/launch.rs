//! Kernels: functions in the modules that a device has loaded, and what an operation is given to put itself on a stream.
#![allow(
    unsafe_code,
    reason = "modules are loaded and kernels launched through the CUDA driver"
)]

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::{self, CUfunction_attribute as Attribute};
use parking_lot::RwLock;

use super::calls::{self, written};
use super::driver::{CudaContext, driver_error, driver_error_with};
use super::matmul::{Product, Products, WORKSPACE_BYTES};
use super::memory::{DevicePtr, address_of};
use super::nvrtc::{Arch, CompileUnit, Define, KernelCache, Nvrtc};
use super::stream::{CudaStream, StreamState};
use crate::memory::{Buffer, DType, DeviceError};

/// Shared memory that a block may have without asking for more: what its kernel declares, and what the launch adds.
const SHARED_WITHOUT_ASKING: usize = 48 << 10;

/// Blocks, threads and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks in x, y, z.
    pub blocks: [u32; 3],
    /// Threads of a block in x, y, z.
    pub threads: [u32; 3],
    /// Bytes of dynamic shared memory of a block.
    pub shared_bytes: usize,
}

impl Grid {
    /// One dimension.
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self::of([blocks, 1, 1], threads)
    }

    /// Blocks in three dimensions, threads in one.
    pub const fn of(blocks: [u32; 3], threads: u32) -> Self {
        Self {
            blocks,
            threads: [threads, 1, 1],
            shared_bytes: 0,
        }
    }

    /// Enough blocks for one thread per element.
    pub const fn covering(elements: usize, threads: u32) -> Self {
        Self::linear(elements.div_ceil(threads as usize) as u32, threads)
    }

    /// With dynamic shared memory.
    #[must_use]
    pub const fn with_shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }
}

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which one, among those that `CUDA_VISIBLE_DEVICES` shows.
    pub ordinal: usize,
    /// Matrix products of f32 may round their inputs to tf32.
    pub tf32: bool,
    /// Where compiled kernels are kept.
    pub cache: KernelCache,
    /// How long to wait from now on for memory that others hold: a driver returns that of killed processes late.
    pub memory_patience: Duration,
}

/// A loaded kernel.
#[derive(Debug)]
struct Kernel {
    function: sys::CUfunction,
    /// Bytes of shared memory that it declares.
    declared_shared: usize,
    /// Dynamic shared memory that it may be launched with.
    shared_limit: AtomicUsize,
    /// Keeps the function loaded.
    module: Arc<Module>,
}

// SAFETY: functions may be used by any thread that has made the context its current one.
unsafe impl Send for Kernel {}
// SAFETY: as above; the driver serialises.
unsafe impl Sync for Kernel {}

#[derive(Debug)]
struct Module {
    raw: sys::CUmodule,
    context: Arc<CudaContext>,
}

// SAFETY: as of kernels.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.comes_to_rest() {
            // SAFETY: loaded once, unloaded once; whoever launches its functions has the device, which has the module.
            let _ = unsafe { calls::module_unload(self.raw) };
        }
    }
}

impl Kernel {
    fn of(module: Arc<Module>, unit: &CompileUnit, name: &str) -> Result<Self, DeviceError> {
        let symbol = CString::new(name).expect("names of kernels have no zero byte");
        let found = written(ptr::null_mut(), |function| {
            // SAFETY: the module is loaded; the name ends in a zero; the function writes one pointer.
            unsafe { calls::module_function(function, module.raw, symbol.as_ptr()) }
        });
        let function =
            found.map_err(|error| driver_error(format!("`{unit}` has no kernel `{name}`"), error))?;
        let declared = Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: the function was just given by the driver; one integer is written.
        let declared = written(0, |bytes| unsafe {
            calls::function_get(bytes, declared, function)
        })
        .map_err(|error| driver_error(format!("shared memory of kernel `{name}`"), error))?;
        let declared_shared = declared.max(0) as usize;
        Ok(Self {
            function,
            declared_shared,
            shared_limit: SHARED_WITHOUT_ASKING.saturating_sub(declared_shared).into(),
            module,
        })
    }
}

/// The address of a source, which is a static, with its definitions, and the kernel's name.
type KernelKey = (usize, Vec<Define>, &'static str);

/// The kernels of one device, compiled when they are first asked for, its matrix products, and its options.
#[derive(Debug)]
pub(crate) struct DeviceKernels {
    context: Arc<CudaContext>,
    options: CudaOptions,
    compiler: OnceLock<Result<(Nvrtc, Arch), DeviceError>>,
    loaded: RwLock<HashMap<KernelKey, Arc<Kernel>>>,
    products: OnceLock<Result<Products, DeviceError>>,
}

impl DeviceKernels {
    pub(crate) fn new(context: Arc<CudaContext>, options: CudaOptions) -> Self {
        Self {
            compiler: OnceLock::new(),
            loaded: RwLock::default(),
            products: OnceLock::new(),
            context,
            options,
        }
    }

    pub(crate) const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// The function of a kernel, which may be launched with its grid's shared memory from now on.
    fn function(
        &self,
        op: &str,
        unit: &CompileUnit,
        name: &'static str,
        shared: usize,
    ) -> Result<sys::CUfunction, DeviceError> {
        let key = (ptr::from_ref(unit.source) as usize, unit.defines.clone(), name);
        let known = self.loaded.read().get(&key).cloned();
        let kernel = match known {
            Some(kernel) => kernel,
            None => self.load(key, unit)?,
        };
        let wanted = shared + kernel.declared_shared;
        let most = self.context.facts().shared_per_block;
        if wanted > most {
            // Only attention needs much.
            return Err(DeviceError::Driver {
                doing: format!("operation `{op}`: kernel `{name}` is not for {}", self.context),
                cause: format!(
                    "a block needs {wanted} bytes of shared memory, but at most {most} are available"
                ),
                hint: "use narrower heads (a larger `model.n_head`), or a different GPU".to_owned(),
            });
        }
        if shared > kernel.shared_limit.load(Ordering::Relaxed) {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the module is loaded for as long as the device lives.
            unsafe { calls::function_set(kernel.function, attribute, shared as i32) }.map_err(|error| {
                let doing = format!("kernel `{name}` cannot have {shared} bytes of shared memory");
                driver_error(doing, error)
            })?;
            kernel.shared_limit.store(shared, Ordering::Relaxed);
        }
        Ok(kernel.function)
    }

    /// Its module may be there, for another kernel of the same unit.
    fn load(&self, key: KernelKey, unit: &CompileUnit) -> Result<Arc<Kernel>, DeviceError> {
        let mut loaded = self.loaded.write();
        let sibling = loaded
            .iter()
            .find(|((source, defines, _), _)| (*source, defines) == (key.0, &key.1));
        let module = match sibling {
            Some((_, kernel)) => kernel.module.clone(),
            None => Arc::new(self.load_module(unit)?),
        };
        let kernel = Arc::new(Kernel::of(module, unit, key.2)?);
        Ok(loaded.entry(key).or_insert(kernel).clone())
    }

    fn load_module(&self, unit: &CompileUnit) -> Result<Module, DeviceError> {
        let open = || {
            let nvrtc = Nvrtc::open()?;
            let arch = nvrtc.arch_for(self.context.facts().arch())?;
            Ok((nvrtc, arch))
        };
        let (nvrtc, arch) = self.compiler.get_or_init(open).as_ref().map_err(Clone::clone)?;
        let cubin = self.options.cache.compile(nvrtc, unit, *arch)?;
        self.context.bind()?;
        let loaded = written(ptr::null_mut(), |module| {
            // SAFETY: the image is a whole CUBIN, as NVRTC made it or as the cache checked it; one pointer is written.
            unsafe { calls::module_load(module, cubin.0.as_ptr().cast()) }
        });
        let raw = loaded.map_err(|error| {
            let version = nvrtc.version();
            let doing = format!("cannot load `{unit}`, compiled for {arch} by NVRTC {version}");
            match nvrtc.library().newer_than_driver() {
                Some(newer) => driver_error_with(doing, error, newer.to_string().replace("\n  hint: ", ": ")),
                None => driver_error(doing, error),
            }
        })?;
        let context = self.context.clone();
        Ok(Module { raw, context })
    }

    pub(crate) fn products(&self) -> Result<&Products, DeviceError> {
        let open = || Products::open(self.options.tf32);
        self.products.get_or_init(open).as_ref().map_err(Clone::clone)
    }
}

/// One operation's view of its device and stream.
pub struct LaunchContext<'a> {
    pub(crate) op: &'static str,
    pub(crate) device: &'a DeviceKernels,
    pub(crate) stream: &'a CudaStream,
    pub(crate) state: &'a mut StreamState,
    /// The operation is prepared, not carried out, and this memory, of so many bytes, stands for all of its buffers.
    pub(crate) spare: Option<(DevicePtr, usize)>,
}

/// Addresses that differ by a multiple of it are equal to kernels.
const ALIGNMENT: usize = 256;

impl LaunchContext<'_> {
    /// Address of a buffer that must hold elements of this type.
    pub fn ptr(&self, buffer: &Buffer, dtype: DType) -> Result<DevicePtr, DeviceError> {
        buffer.expect_dtype(dtype)?;
        self.address(buffer)
    }

    /// Address of a buffer of any type.
    pub fn address(&self, buffer: &Buffer) -> Result<DevicePtr, DeviceError> {
        match self.spare {
            Some((spare, _)) => Ok(spare.offset(buffer.start() % ALIGNMENT)),
            None => address_of(buffer, &self.device.context),
        }
    }

    /// Launches a kernel, which is compiled when it is first asked for. Nothing is launched on an empty grid.
    ///
    /// `args` are the values of its parameters, in order; the kernel's own declaration decides their types. The driver
    /// reads as many bytes at each value's address as the parameter has; the lowest come first on every machine that
    /// CUDA runs on. `table` is the last parameter, if that is a structure of `unsigned long long`s by value; else it is
    /// empty.
    pub fn run(
        &mut self,
        unit: &CompileUnit,
        kernel: &'static str,
        grid: Grid,
        args: &[u64],
        table: &[u64],
    ) -> Result<(), DeviceError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let function = self.device.function(self.op, unit, kernel, grid.shared_bytes)?;
        if self.spare.is_some() {
            return Ok(());
        }
        let address = |value: &u64| ptr::from_ref(value).cast_mut().cast::<c_void>();
        let mut pointers: Vec<_> = args.iter().map(address).collect();
        if !table.is_empty() {
            pointers.push(table.as_ptr().cast_mut().cast());
        }
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (grid.blocks, grid.threads);
        // SAFETY: the kernel's module is loaded; each pointer leads to 8 readable bytes, or to the table, which the
        // driver copies during the call. That the arguments fit the kernel's parameters, and that its accesses stay
        // within the buffers, is what the operation that calls this checked.
        let launched = unsafe {
            calls::function_launch(
                function,
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                grid.shared_bytes as u32,
                self.stream.raw(),
                pointers.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        launched.map_err(|error| {
            let doing = format!(
                "operation `{}`: kernel `{kernel}` was not launched on stream `{}` ({grid:?})",
                self.op,
                self.stream.name()
            );
            self.device.context.refused(error, driver_error(doing, error))
        })
    }

    /// Puts a matrix product on the stream.
    pub fn multiply(&mut self, product: &Product) -> Result<(), DeviceError> {
        if product.rows == 0 || product.cols == 0 {
            return Ok(());
        }
        let products = self.device.products()?;
        let workspace = self.scratch(WORKSPACE_BYTES)?;
        let needed = product.extent() + ALIGNMENT;
        if self.spare.is_some_and(|(_, bytes)| bytes < needed) {
            return Ok(());
        }
        products.enqueue(product, workspace, self.stream.raw(), self.op)
    }

    /// Scratch memory of at least so many bytes, aligned to 256. It is this operation's alone until the operation
    /// has run, and one for all its kernels: ask once, for the sum.
    pub fn scratch(&mut self, bytes: usize) -> Result<DevicePtr, DeviceError> {
        self.stream.scratch(self.state, bytes)
    }
}
