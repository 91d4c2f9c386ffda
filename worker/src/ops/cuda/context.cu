// What attention over the positions of several ranks needs beside itself: rows of keys and values from one order into another,
// and attention over two disjoint stretches of keys joined (Liu et al. 2023).
//
// Given by the compiler's command line: `ACT`, and `VEC` for copies.
// Bytes: copy_rows reads and writes the elements once, and reads what they are added to; attention_merge 3s an element
// of the output.

#include "element.cuh"

constexpr u32 THREADS = 256;

// out[i, j] = x[i, j], or added to what is there: blocks of `rows` rows, of which block (i, j) is number
// first + i·step_i + j·step_j. A thread copies VEC of the `packs` packs.
extern "C" __global__ void __launch_bounds__(THREADS)
copy_rows(const ACT *x, ACT *out, u32 packs, u32 blocks, u32 rows, u32 channels, u32 accumulate, u64 x_stride,
          u64 x_offset, u64 x_first, u64 x_i, u64 x_j, u64 out_stride, u64 out_offset, u64 out_first, u64 out_i,
          u64 out_j) {
    const u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= packs) {
        return;
    }
    const u32 row_packs = channels / VEC;
    const u32 row = (u32)(index / row_packs), channel = (u32)(index % row_packs) * VEC;
    const u32 block = row / rows, i = block / blocks, j = block % blocks;
    // Steps may be negative: they wrap around.
    const u64 from = (x_first + i * x_i + j * x_j) * rows + row % rows;
    const u64 to = (out_first + i * out_i + j * out_j) * rows + row % rows;
    ACT *target = out + to * out_stride + out_offset + channel;
    f32 values[VEC];
    load(values, x + from * x_stride + x_offset + channel);
    if (accumulate) {
        f32 before[VEC];
        load(before, target);
        #pragma unroll
        for (int k = 0; k < VEC; k++) {
            values[k] += before[k];
        }
    }
    store(target, values);
}

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
