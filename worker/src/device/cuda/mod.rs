//! An NVIDIA GPU as a device, through the driver API; kernels are compiled on the machine.
//!
//! Nothing is linked: the driver, NVRTC and cuBLASLt are loaded at run time ([`crate::libraries`]). Host code is in
//! order of what it knows:
//!
//! | file | what it is | what it must not know |
//! |---|---|---|
//! | `calls` | the driver's functions, from the file that discovery chose | what they are called for |
//! | `facts` | [`GpuFacts`]: what the driver says of one device | |
//! | `driver` | [`Context`]: the driver started, one device chosen; results as errors | memory, streams |
//! | `streams` | the streams that are alive, and whether anything is in them | what is in them |
//! | `memory` | [`DeviceMemory`] and pinned host memory, accounts of who holds what | streams |
//! | `fetch` | numbers on their way to the host | streams |
//! | `host_side` | copies and work of the host in a stream, as [`super::HostSide`] | what the work is |
//! | `event` | CUDA's events as [`super::Event`] | operations |
//! | `stream` | one stream: its first error, its last operations, its scratch memory, its staging | which operations exist |
//! | `arch`, `nvrtc`, `cache` | from the text of a kernel to a CUBIN, on disk and in memory; needs no GPU | streams |
//! | `kernel` | [`Source`], [`Unit`], [`Kernel`]: modules in the device, functions in them | operations |
//! | `launch` | [`Launch`], [`CudaKernel`]: what an operation is given to put itself on a stream | which operation it is |
//! | `matmul`, `cublaslt` | [`Product`]: matrix products by cuBLASLt, its algorithms by shape | layers |
//! | `survey` | [`Survey`]: all devices, for people | |
//! | `device` | [`CudaDevice`]: all of it as a [`super::Device`] | |
//!
//! Streams are CUDA streams that do not synchronise with the default one. Enqueueing launches and returns; the host
//! waits only in `synchronize`, `download`, for events of the host, and where it uploads faster than the device copies; work of the host is called by its stream. Memory
//! is zeroed when it is allocated.

mod arch;
mod cache;
mod calls;
mod cublaslt;
mod device;
mod driver;
mod event;
mod facts;
mod fetch;
mod host_side;
mod kernel;
mod launch;
mod matmul;
mod memory;
mod nvrtc;
mod stream;
mod streams;
mod survey;

pub use arch::Arch;
pub use cache::CubinCache;
pub use device::{CudaDevice, CudaOptions};
pub use driver::{Context, count_devices};
pub use facts::GpuFacts;
pub use kernel::{Define, Kernel, Source, Unit};
pub use launch::{Args, CudaKernel, DevicePtr, Grid, Launch};
pub use matmul::{Epilogue, Operand, Product};
pub use memory::DeviceMemory;
pub use nvrtc::{CompileError, Cubin, Nvrtc};
pub use survey::{Reach, Survey};
