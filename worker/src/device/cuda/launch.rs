//! What an operation is given to put itself on a stream.
#![allow(unsafe_code, reason = "kernels are launched through the CUDA driver")]

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys;

use super::calls;
use super::driver::{CudaContext, driver_error};
use super::kernel::{Kernel, Modules};
use super::memory::{DevicePtr, address_of};
use super::nvrtc::{Arch, CubinCache, Define, KernelSource};
use super::stream::{CudaStream, StreamState};
use crate::device::{Buffer, DType, DeviceError};

/// Most arguments of one kernel.
const MAX_ARGS: usize = 32;

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
    #[must_use]
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self {
            blocks: [blocks, 1, 1],
            threads: [threads, 1, 1],
            shared_bytes: 0,
        }
    }

    /// As many blocks as it takes for one thread an element.
    #[must_use]
    pub const fn covering(elements: usize, threads: u32) -> Self {
        Self::linear(elements.div_ceil(threads as usize) as u32, threads)
    }

    /// With dynamic shared memory.
    #[must_use]
    pub const fn with_shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }
}

/// Arguments of a kernel, in order. The kernel's own declaration decides their types: `u32` for `unsigned`, `u64`
/// for `unsigned long long` or `size_t`.
#[derive(Clone, Debug, Default)]
pub struct Args {
    values: [u64; MAX_ARGS],
    count: usize,
    /// The last argument, if it is a structure.
    table: Vec<u64>,
}

impl Args {
    /// None yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A pointer.
    #[must_use]
    pub fn ptr(self, value: DevicePtr) -> Self {
        self.push(value.raw())
    }

    /// `unsigned`
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.push(u64::from(value))
    }

    /// `int`
    #[must_use]
    pub fn i32(self, value: i32) -> Self {
        self.push(u64::from(value as u32))
    }

    /// `unsigned long long`
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.push(value)
    }

    /// `float`
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.push(u64::from(value.to_bits()))
    }

    /// `double`
    #[must_use]
    pub fn f64(self, value: f64) -> Self {
        self.push(value.to_bits())
    }

    /// A structure of `unsigned long long`s, by value: the last argument.
    #[must_use]
    pub fn table(self, values: &[u64]) -> Self {
        assert!(self.count < MAX_ARGS, "a kernel has at most {MAX_ARGS} arguments");
        Self {
            table: values.to_vec(),
            ..self
        }
    }

    /// The driver reads as many bytes at each value's address as the kernel's parameter has; the lowest come
    /// first on every machine that CUDA runs on.
    fn push(mut self, value: u64) -> Self {
        assert!(self.table.is_empty(), "a structure is the last argument");
        assert!(self.count < MAX_ARGS, "a kernel has at most {MAX_ARGS} arguments");
        self.values[self.count] = value;
        self.count += 1;
        self
    }
}

/// How a device is opened.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which one, among those that `CUDA_VISIBLE_DEVICES` shows.
    pub ordinal: usize,
    /// Matrix products of f32 may round their inputs to tf32.
    pub tf32: bool,
    /// On Hopper, in bf16, a GELU belongs to the matrix product beside it where cuBLASLt does both in one pass.
    pub fused_gelu: bool,
    /// Where compiled kernels are kept.
    pub cache: CubinCache,
}

/// The kernels of a device, its options, and what operations keep there.
#[derive(Debug)]
pub(super) struct DeviceKernels {
    context: Arc<CudaContext>,
    options: CudaOptions,
    modules: Modules,
    attached: Mutex<HashMap<TypeId, Arc<dyn Any + Send + Sync>>>,
}

impl DeviceKernels {
    pub(super) fn new(context: Arc<CudaContext>, options: CudaOptions) -> Self {
        Self {
            modules: Modules::new(context.clone(), options.cache.clone()),
            attached: Mutex::default(),
            context,
            options,
        }
    }

    pub(super) const fn options(&self) -> &CudaOptions {
        &self.options
    }
}

/// One operation's view of its device and stream.
pub struct LaunchContext<'a> {
    op: &'static str,
    device: &'a DeviceKernels,
    stream: &'a CudaStream,
    state: &'a mut StreamState,
}

impl<'a> LaunchContext<'a> {
    pub(super) const fn new(
        op: &'static str,
        device: &'a DeviceKernels,
        stream: &'a CudaStream,
        state: &'a mut StreamState,
    ) -> Self {
        Self {
            op,
            device,
            stream,
            state,
        }
    }

    /// Name of the operation, for errors.
    #[must_use]
    pub const fn op(&self) -> &'static str {
        self.op
    }

    /// Address of a buffer that must hold elements of this type.
    pub fn ptr(&self, buffer: &Buffer, dtype: DType) -> Result<DevicePtr, DeviceError> {
        if buffer.dtype() != dtype {
            return Err(DeviceError::WrongDType {
                arena: buffer.arena().name().to_owned(),
                found: buffer.dtype(),
                expected: dtype,
            });
        }
        self.address(buffer)
    }

    /// Address of a buffer of any type.
    pub fn address(&self, buffer: &Buffer) -> Result<DevicePtr, DeviceError> {
        address_of(buffer, &self.device.context)
    }

    /// A kernel, compiled when it is first asked for. Definitions are part of its identity.
    pub fn kernel(
        &self,
        source: &'static KernelSource,
        name: &'static str,
        defines: &[Define],
    ) -> Result<Kernel, DeviceError> {
        self.device.modules.kernel(source, name, defines)
    }

    /// Launches a kernel. Nothing is launched on an empty grid.
    pub fn run(&mut self, kernel: &Kernel, grid: Grid, args: &Args) -> Result<(), DeviceError> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.expect_shared(kernel, grid)?;
        kernel.allow_shared(grid.shared_bytes)?;
        let mut pointers = [std::ptr::null_mut::<c_void>(); MAX_ARGS];
        for (pointer, value) in pointers.iter_mut().zip(&args.values[..args.count]) {
            *pointer = std::ptr::from_ref(value).cast_mut().cast();
        }
        if !args.table.is_empty() {
            pointers[args.count] = args.table.as_ptr().cast_mut().cast();
        }
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (grid.blocks, grid.threads);
        // SAFETY: the kernel's module is loaded; each pointer leads to 8 readable bytes, or to the table, which the
        // driver copies during the call. That the arguments fit the kernel's parameters, and that its accesses stay
        // within the buffers, is what the operation that calls this checked.
        let launched = unsafe {
            calls::function_launch(
                kernel.raw(),
                grid_x,
                grid_y,
                grid_z,
                block_x,
                block_y,
                block_z,
                grid.shared_bytes as u32,
                self.stream.raw(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        launched.map_err(|error| {
            let doing = format!(
                "operation `{}`: kernel `{}` was not launched on stream `{}` ({grid:?})",
                self.op,
                kernel.name(),
                self.stream.name()
            );
            self.device.context.refused(error, driver_error(doing, error))
        })
    }

    /// An error in words if no block of this card has as much shared memory. Only attention takes much.
    fn expect_shared(&self, kernel: &Kernel, grid: Grid) -> Result<(), DeviceError> {
        let wanted = grid.shared_bytes + kernel.declared_shared();
        let most = self.shared_per_block();
        if wanted <= most {
            return Ok(());
        }
        let context = &self.device.context;
        Err(DeviceError::Driver {
            doing: format!(
                "operation `{}`: kernel `{}` is not for GPU {} ({})",
                self.op,
                kernel.name(),
                context.ordinal(),
                context.name()
            ),
            cause: format!("a block takes {wanted} bytes of shared memory, of {most}"),
            hint: "choose narrower heads (a larger `model.n_head`), or another card".to_owned(),
        })
    }

    /// Scratch memory of at least so many bytes, aligned to 256. It is this operation's alone until the operation
    /// has run, and one for all its kernels: ask once, for the sum.
    pub fn scratch(&mut self, bytes: usize) -> Result<DevicePtr, DeviceError> {
        self.stream.scratch(self.state, bytes)
    }

    /// Most bytes of shared memory that a block can have.
    #[must_use]
    pub fn shared_per_block(&self) -> usize {
        self.device.context.shared_per_block()
    }

    /// True if matrix products of f32 may round their inputs to tf32.
    #[must_use]
    pub fn tf32(&self) -> bool {
        self.device.options.tf32
    }

    /// True if a GELU may belong to the matrix product beside it.
    #[must_use]
    pub fn fused_gelu(&self) -> bool {
        self.device.options.fused_gelu
    }

    /// True on Hopper, whose own instructions the kernels can use then.
    #[must_use]
    pub fn is_hopper(&self) -> bool {
        self.device.context.arch() == Arch::SM_90A
    }

    /// The stream, for libraries that enqueue by themselves.
    #[must_use]
    pub const fn raw_stream(&self) -> sys::CUstream {
        self.stream.raw()
    }

    /// Something that is made once a device and shared by its operations: a library's handle, what was measured.
    pub fn attached<T: Any + Send + Sync>(
        &self,
        make: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<Arc<T>, DeviceError> {
        let mut attached = self
            .device
            .attached
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let found = attached.get(&TypeId::of::<T>()).cloned();
        let value = if let Some(value) = found {
            value
        } else {
            let made: Arc<dyn Any + Send + Sync> = Arc::new(make()?);
            attached.insert(TypeId::of::<T>(), made.clone());
            made
        };
        Ok(value
            .downcast()
            .unwrap_or_else(|_| unreachable!("kept by its type")))
    }
}
