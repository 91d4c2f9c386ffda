//! The imitation finds what it is there to find: each kernel here is wrong in one way.

use std::panic::{AssertUnwindSafe, catch_unwind};

use ddp_worker::device::cuda::{Grid, KernelSource};
use ddp_worker::device::{ArenaSpec, Buffer, DType, Device};
use ddp_worker::ops::cuda::{Arg, Call, Plan};

use crate::device::Imitation;

static SOURCE: KernelSource = KernelSource::with_headers(
    "faults.cu",
    r#"
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
extern "C" __global__ void only_reads(const float *x) { const_cast<float *>(x)[threadIdx.x] = 2.0f; }
"#,
    &[],
);

/// What is said of a kernel that is given 64 numbers, as many in shared memory, and 64 threads; none if nothing is.
fn complaint(kernel: &'static str, arg: impl FnOnce(Buffer) -> Arg) -> Option<String> {
    let device = Imitation::new(3);
    let spec = ArenaSpec::private("numbers", DType::F32, 64);
    let buffer = device.alloc(&spec).unwrap().whole();
    for (i, x) in buffer.host_mut::<f32>().unwrap().iter_mut().enumerate() {
        *x = i as f32;
    }
    let call = Call {
        source: &SOURCE,
        kernel,
        defines: Vec::new(),
        grid: Grid::linear(1, 64).with_shared(64 * size_of::<f32>()),
        args: vec![arg(buffer)],
    };
    let plan = Plan {
        scratch_bytes: 0,
        calls: vec![call],
    };
    match catch_unwind(AssertUnwindSafe(|| device.carry_out(kernel, &plan))) {
        Ok(outcome) => outcome.err().map(|error| error.to_string()),
        Err(panic) => Some(panic.downcast_ref::<String>().expect("a message").clone()),
    }
}

#[track_caller]
fn assert_complaint(kernel: &'static str, arg: impl FnOnce(Buffer) -> Arg, expected: &str) {
    let found = complaint(kernel, arg);
    assert!(
        found.as_deref().is_some_and(|found| found.contains(expected)),
        "`{kernel}`: {found:?}"
    );
}

#[test]
fn a_kernel_without_fault_passes() {
    assert_eq!(complaint("good", Arg::Write), None);
}

#[test]
fn a_missing_barrier_shows_in_another_order_of_threads() {
    assert_complaint("no_barrier", Arg::Write, "gives other bits");
}

#[test]
fn a_barrier_or_a_shuffle_that_some_do_not_reach_is_named() {
    assert_complaint("barrier_for_some", Arg::Write, "wait for each other for ever");
    assert_complaint("shuffle_for_some", Arg::Write, "wait for each other for ever");
}

#[test]
fn accesses_outside_and_unaligned_are_caught() {
    assert_complaint("past_the_end", Arg::Write, "signal");
    assert_complaint("far_past_the_end", Arg::Write, "signal");
    assert_complaint("not_aligned", Arg::Write, "signal");
    assert_complaint(
        "past_the_shared_memory",
        Arg::Write,
        "outside the buffers or the shared memory",
    );
}

#[test]
fn what_is_only_read_must_stay() {
    assert_complaint("only_reads", Arg::Read, "is only read, and was written");
}

#[test]
#[should_panic(expected = "size of argument 0 of `good`")]
fn an_argument_of_another_size_is_refused() {
    let device = Imitation::new(1);
    let call = Call {
        source: &SOURCE,
        kernel: "good",
        defines: Vec::new(),
        grid: Grid::linear(1, 64),
        args: vec![Arg::U32(1)],
    };
    let plan = Plan {
        scratch_bytes: 0,
        calls: vec![call],
    };
    let _ = device.carry_out("good", &plan);
}
