//! The imitation finds what it is there to find: each kernel here is wrong in one way.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ddp_worker::cuda::{CompileUnit, Grid, KernelSource};
use ddp_worker::device::{ArenaSpec, Buffer, DType, Device};
use ddp_worker::ops::cuda::{Arg, Call, Plan};

use super::device::Imitation;

static SOURCE: KernelSource = KernelSource {
    file: "faults.cu",
    text: r#"
#include "tensor_core.cuh"
extern "C" __global__ void good(float *x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[63 - threadIdx.x];
}
extern "C" __global__ void no_barrier(float *x) {
    __shared__ float all[64];
    all[threadIdx.x] = x[threadIdx.x];
    x[threadIdx.x] = all[63 - threadIdx.x];
}
extern "C" __global__ void barrier_for_some(float *x) {
    if (threadIdx.x < 40) {
        __syncthreads();
    }
    x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 1);
    if (threadIdx.x < 40) {
        __syncthreads();
    }
}
extern "C" __global__ void shuffle_for_some(float *x) {
    if (threadIdx.x % 2 == 0) {
        x[threadIdx.x] = __shfl_xor_sync(0xffffffffu, x[threadIdx.x], 2);
    }
}
extern "C" __global__ void past_the_end(float *x) { x[threadIdx.x + 1] = 0.0f; }
extern "C" __global__ void far_past_the_end(float *x) { x[0] = x[threadIdx.x + 64]; }
extern "C" __global__ void not_aligned(float *x) {
    *reinterpret_cast<uint4 *>(x + threadIdx.x) = make_uint4(0, 0, 0, 0);
}
extern "C" __global__ void past_the_shared_memory(float *x) {
    float *all = reinterpret_cast<float *>(dynamic_shared);
    all[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = all[threadIdx.x + 1];
}
// Turns the numbers around, with an asynchronous copy to shared memory, which is waited for or not.
__device__ void turn(float *x, bool waits) {
    float *all = reinterpret_cast<float *>(dynamic_shared);
    copy_pair(shared_address(all + threadIdx.x / 2 * 2), x + threadIdx.x / 2 * 2, true);
    if (waits) {
        copies_done();
    }
    __syncthreads();
    x[threadIdx.x] = all[63 - threadIdx.x];
}
extern "C" __global__ void waits_for_copies(float *x) { turn(x, true); }
extern "C" __global__ void does_not_wait_for_copies(float *x) { turn(x, false); }
extern "C" __global__ void only_reads(const float *x) { const_cast<float *>(x)[threadIdx.x] = 2.0f; }
"#,
    headers: &[
        (
            "tensor_core.cuh",
            include_str!("../../../src/ops/cuda/tensor_core.cuh"),
        ),
        ("element.cuh", include_str!("../../../src/ops/cuda/element.cuh")),
    ],
};

/// What a kernel makes of 64 numbers, with as many in shared memory, and 64 threads; or what is said of it.
fn run(kernel: &'static str, arg: impl FnOnce(Buffer) -> Arg) -> Result<Vec<f32>, String> {
    let device = Imitation::new(3);
    let spec = ArenaSpec::private("numbers", DType::F32, 64);
    let buffer = device.alloc(&spec).unwrap().whole();
    for (i, x) in buffer.host_mut::<f32>().unwrap().iter_mut().enumerate() {
        *x = i as f32;
    }
    let call = Call {
        unit: CompileUnit {
            source: &SOURCE,
            defines: Vec::new(),
        },
        kernel,
        grid: Grid::linear(1, 64).with_shared(64 * size_of::<f32>()),
        args: vec![arg(buffer.clone())],
    };
    let plan = Plan {
        scratch_bytes: 0,
        calls: vec![call],
    };
    match catch_unwind(AssertUnwindSafe(|| device.carry_out(kernel, &plan))) {
        Ok(outcome) => outcome.map_err(|error| error.to_string())?,
        Err(panic) => return Err(panic.downcast_ref::<String>().expect("a message").clone()),
    }
    Ok(buffer.host::<f32>().unwrap().to_vec())
}

#[test]
fn each_fault_is_named_and_a_kernel_without_one_passes() {
    let outside = "outside the buffers or the shared memory";
    let stuck = "wait for each other for ever";
    for (kernel, arg, expected) in [
        ("no_barrier", Arg::Write as fn(Buffer) -> Arg, "gives other bits"),
        ("barrier_for_some", Arg::Write, stuck),
        ("shuffle_for_some", Arg::Write, stuck),
        ("past_the_end", Arg::Write, "signal"),
        ("far_past_the_end", Arg::Write, "signal"),
        ("not_aligned", Arg::Write, "signal"),
        ("past_the_shared_memory", Arg::Write, outside),
        ("only_reads", Arg::Read, "is only read, and was written"),
    ] {
        let found = run(kernel, arg);
        let is_named = found.as_ref().is_err_and(|found| found.contains(expected));
        assert!(is_named, "`{kernel}`: {found:?}");
    }
    let turned: Vec<f32> = (0..64_u8).rev().map(f32::from).collect();
    assert_eq!(run("good", Arg::Write), Ok(turned.clone()));
    assert_eq!(run("waits_for_copies", Arg::Write), Ok(turned));
    // A copy that is not waited for does not arrive.
    let found = run("does_not_wait_for_copies", Arg::Write).unwrap();
    assert!(found.iter().all(|x| x.is_nan()), "{found:?}");
}
