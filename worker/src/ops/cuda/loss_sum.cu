// The sum of losses, in f64.
//
// Bytes: 4 a loss; the time is that of the launch.

#include "element.cuh"

constexpr u32 THREADS = 1024;

// total = Σ losses, or added to what is there. One block; thread t adds losses t, t + 1024, …; then the threads' sums
// are added in a fixed tree.
extern "C" __global__ void __launch_bounds__(THREADS)
loss_sum(const f32 *losses, f64 *total, u32 count, u32 accumulate) {
    __shared__ f64 warps[THREADS / WARP];
    f64 sum = 0.0;
    #pragma unroll 4
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        sum += (f64)losses[i];
    }
    sum = row_sum<THREADS>(sum, warps);
    if (threadIdx.x == 0) {
        *total = accumulate ? *total + sum : sum;
    }
}
