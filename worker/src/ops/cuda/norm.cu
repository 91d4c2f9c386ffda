// The global norm of gradients of type GRAD, in the CPU's order of additions: the same partial sums bit by bit.
//
// Bytes: the gradients once. A warp sums a chunk; with 16,384 elements a chunk there are warps enough.

#include "element.cuh"

constexpr u32 THREADS = 256;
constexpr u64 CHUNK = 16384;
// Partial sums of a chunk: element i is added to lane i mod LANES, 8 lanes a thread.
constexpr u32 LANES = 256;
constexpr int HELD = LANES / WARP;

// partials[c] = Σ x[i]² over chunk c, in f64
extern "C" __global__ void __launch_bounds__(THREADS) squared_norm(const GRAD *x, f64 *partials, u64 n) {
    const u64 chunk = (u64)blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    const u64 first = chunk * CHUNK;
    if (first >= n) {
        return;
    }
    const u64 end = first + CHUNK < n ? first + CHUNK : n;
    const u32 lane = threadIdx.x % WARP;
    f64 lanes[HELD] = {};
    u64 at = first + lane * HELD;
#if VEC == 8
    #pragma unroll 8
    for (; at + HELD <= end; at += LANES) {
        f32 values[HELD];
        load(values, x + at);
        #pragma unroll
        for (int i = 0; i < HELD; i++) {
            lanes[i] += (f64)values[i] * (f64)values[i];
        }
    }
#endif
    for (; at < end; at += LANES) {
        for (int i = 0; i < HELD && at + i < end; i++) {
            f32 value[1];
            load(value, x + at + i);
            lanes[i] += (f64)value[0] * (f64)value[0];
        }
    }
    // Pairwise: lane i and lane i + LANES / 2, and so on; the lower of the two goes on.
    #pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        #pragma unroll
        for (int i = 0; i < HELD; i++) {
            lanes[i] += __shfl_down_sync(ALL_LANES, lanes[i], distance);
        }
    }
    #pragma unroll
    for (int half = HELD / 2; half > 0; half /= 2) {
        #pragma unroll
        for (int i = 0; i < half; i++) {
            lanes[i] += lanes[i + half];
        }
    }
    if (lane == 0) {
        partials[chunk] = lanes[0];
    }
}

constexpr u32 SCALE_THREADS = 1024;

// 1 / (1 - beta^updates), rounded once from f64. By squaring, as the CPU does it.
__device__ __forceinline__ f32 bias_correction(f32 beta, u32 updates) {
    f64 power = 1.0;
    for (f64 square = (f64)beta; updates != 0; square *= square) {
        if (updates % 2 == 1) {
            power *= square;
        }
        updates /= 2;
    }
    return (f32)(1.0 / (1.0 - power));
}

// norm = √Σ partials; scale = min(1, max_norm / norm), or NaN where the norm or a witness is not finite. With an order,
// chunk i has its sum at order[i], none if that is negative. One block; thread t adds chunks t, t + 1024, …; then the
// threads' sums are added in a fixed tree. Where updates are counted, this is one more unless the step is skipped, and the
// bias corrections of both moments follow the scale; there a scale that is NaN stays NaN.
extern "C" __global__ void __launch_bounds__(SCALE_THREADS)
clip_scale(const f64 *partials, u32 sums, const int *order, u32 chunks, const f64 *witnesses, u32 witness_count,
           f32 max_norm, u32 clips, f32 *norm, f32 *scale, int *updates, f32 beta1, f32 beta2) {
    __shared__ f64 warps[2 * SCALE_THREADS / WARP];
    // The sum, and how many witnesses are not finite.
    f64 total[2] = {};
    #pragma unroll 4
    for (u32 i = threadIdx.x; i < chunks; i += SCALE_THREADS) {
        const int at = order ? order[i] : (int)i;
        if (at >= 0) {
            total[0] += (u32)at < sums ? partials[at] : (f64)__uint_as_float(0x7fffffffu);
        }
    }
    for (u32 i = threadIdx.x; i < witness_count; i += SCALE_THREADS) {
        total[1] += fabs(witnesses[i]) <= 1.7976931348623157e308 ? 0.0 : 1.0;
    }
    row_sums<SCALE_THREADS>(total, warps);
    if (threadIdx.x == 0) {
        const f64 length = sqrt(total[0]);
        *norm = (f32)length;
        f32 factor = 1.0f;
        const bool held = updates && !(fabsf(*scale) <= 3.402823466e38f);
        const bool skips = held || total[1] > 0.0 || !((f32)length <= 3.402823466e38f);
        if (skips) {
            factor = __uint_as_float(0x7fffffffu);
        } else if (clips != 0 && length > (f64)max_norm) {
            factor = (f32)((f64)max_norm / length);
        }
        *scale = factor;
        if (updates && !skips) {
            const int count = *updates < 0x7fffffff ? *updates + 1 : *updates;
            *updates = count;
            scale[1] = bias_correction(beta1, (u32)count);
            scale[2] = bias_correction(beta2, (u32)count);
        }
    }
}
