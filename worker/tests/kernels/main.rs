//! Operations: on the CPU, as kernels for GPUs run on the CPU, and as NVRTC compiles them.

mod cuda_compile;
mod cuda_on_cpu;
#[path = "../local_model/mod.rs"]
mod local_model;
mod op_cases;
mod ops;
