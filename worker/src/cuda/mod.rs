//! NVIDIA GPUs, through the driver API; kernels are compiled on the machine. [`crate::device::CudaDevice`] stands on it.
//!
//! Nothing is linked: the driver, NVRTC and cuBLASLt are loaded at run time ([`crate::libraries`]). Host code is in
//! order of what it knows:
//!
//! | file | what it is | what it must not know |
//! |---|---|---|
//! | `calls` | the driver's functions, from the file that discovery chose | what they are called for |
//! | `driver` | [`CudaContext`]: the driver started, one device chosen, its streams, who holds its memory; [`visible_gpus`]; results as errors | memory |
//! | `memory` | [`DeviceMemory`] and page-locked memory of the host | streams |
//! | `stream` | one stream: its first error, its last operations, its scratch memory, its copies; CUDA's events as [`crate::memory::Event`] | which operations exist |
//! | `nvrtc` | from the text of a kernel to a CUBIN, on disk and in memory; needs no GPU | streams |
//! | `matmul` | [`Product`]: matrix products by cuBLASLt, its algorithms by shape | layers |
//! | `launch` | modules in the device, functions in them; [`LaunchContext`]: what an operation is given to put itself on a stream | which operation it is |
//!
//! Streams are CUDA streams that do not synchronise with the default one. Enqueueing launches and returns; the host
//! waits only in `synchronize`, `download`, for events of the host, and where it uploads faster than the device copies;
//! work of the host is called by its stream. Memory is zeroed when it is allocated.

pub(crate) mod calls;
pub(crate) mod driver;
pub(crate) mod launch;
mod matmul;
pub(crate) mod memory;
mod nvrtc;
pub(crate) mod stream;

pub use driver::{CudaContext, GpuFacts, count_devices, has_device_nodes, visible_gpus};
pub use launch::{CudaOptions, Grid, LaunchContext};
pub use matmul::{Operand, Product};
pub use memory::{DeviceMemory, DevicePtr};
pub use nvrtc::{Arch, CompileUnit, Cubin, Define, KernelCache, KernelSource, Nvrtc};
