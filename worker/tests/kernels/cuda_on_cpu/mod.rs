//! The kernels for GPUs, run on the CPU: each `.cu` file is compiled as C++ with `cuda.hpp`, which makes fibers of
//! threads, and its results are compared with the CPU device's, at small and odd sizes, in f32 and bf16.
//!
//! A plan ([`ddp_worker::ops::cuda::Plan`]) is carried out as the operation made it, so that grids, arguments and
//! scratch memory are tested with it. Each operation runs in three orders of its threads; the bits must be the same.
//!
//! | module | what it is |
//! |---|---|
//! | `compiler` | from a source and its definitions to a function of this process, by the system's C++ compiler |
//! | `fenced` | memory that ends where nothing can be read or written |
//! | `device` | a [`ddp_worker::device::Device`] that carries out plans |
//! | `faults` | kernels that are wrong, and what is said of them |
//! | `op_cases` | operations with inputs and expected results, shared with the tests on a GPU |

mod compiler;
mod device;
mod faults;
mod fenced;
mod kernels;
mod model;
