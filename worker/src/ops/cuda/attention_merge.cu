// Attention over two disjoint stretches of keys, joined (Liu et al. 2023).
//
// Given by the compiler's command line: `ACT`.
// Bytes: 3s an element of the output.

#include "element.cuh"

constexpr u32 THREADS = 256;

// A warp has a query of a head. part and out [B, T, H·size], part_lse and lse [B, H, T], of which there are `n`
extern "C" __global__ void __launch_bounds__(THREADS)
attention_merge(const ACT *part, const f32 *part_lse, ACT *out, f32 *lse, u32 positions, u32 heads, u32 size, u32 n) {
    const u32 at = (blockIdx.x * THREADS + threadIdx.x) / WARP, lane = threadIdx.x % WARP;
    if (at >= n) {
        return;
    }
    const f32 own = lse[at], other = part_lse[at], top = fmaxf(own, other);
    const f32 own_weight = expf(own - top), other_weight = expf(other - top), sum = own_weight + other_weight;
    const u32 sample = at / positions / heads, head = at / positions % heads;
    const u64 first = (((u64)sample * positions + at % positions) * heads + head) * size;
    for (u32 channel = lane; channel < size; channel += WARP) {
        f32 x[1], y[1];
        load(x, out + first + channel);
        load(y, part + first + channel);
        x[0] = x[0] * (own_weight / sum) + y[0] * (other_weight / sum);
        store(out + first + channel, x);
    }
    // After all lanes have read it.
    __syncwarp();
    if (lane == 0) {
        lse[at] = top + logf(sum);
    }
}
