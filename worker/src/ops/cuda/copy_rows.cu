// Rows from one order into another.
//
// Bytes: reads and writes the elements once, and reads what they are added to.

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
