// Root mean square normalisation over rows of CHANNELS elements; ROW_THREADS threads, a warp or a block, hold a row in
// registers.
//
// Bytes a row of C elements of s bytes: forward 2·C·s; backward 3·C·s, or 4·C·s where it adds to dinp. The gain stays in
// the cache; the partial sums of its gradient are small by the choice of blocks.

#include "row.cuh"

// 1/√(mean of the squares + ε) of a row.
__device__ __forceinline__ f32 scale_of(const Row &row, f32 epsilon, f32 *warps) {
    f32 squares = 0.0f;
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            f32 x[VEC];
            row.packs[k].get(x);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                squares += x[i] * x[i];
            }
        }
    }
    return 1.0f / sqrtf(row_sum<ROW_THREADS>(squares, warps) * SHARE + epsilon);
}

// out = inp·scale·weight, by rows
extern "C" __global__ void __launch_bounds__(BLOCK)
rmsnorm_forward(const ACT *inp, const ACT *weight, ACT *out, u32 rows, f32 epsilon) {
    __shared__ f32 warps[BLOCK / WARP];
    const u32 row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= rows) {
        return;
    }
    Row x;
    x.load(inp + (u64)row * CHANNELS);
    const f32 scale = scale_of(x, epsilon, warps);
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            const u32 channel = Row::channel(k);
            f32 value[VEC], w[VEC];
            x.packs[k].get(value);
            load(w, weight + channel);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                value[i] = value[i] * scale * w[i];
            }
            store(out + (u64)row * CHANNELS + channel, value);
        }
    }
}

// With n = inp·scale and g = dout·weight: dinp = scale·(g − n·mean(g·n)), or added to what is there. Block p takes rows
// p·block_rows … and writes its sums of dout·n to partials[p], [C].
extern "C" __global__ void __launch_bounds__(BLOCK)
rmsnorm_backward(const ACT *dout, const ACT *inp, const ACT *weight, ACT *dinp, f32 *partials, u32 rows,
                 u32 block_rows, f32 epsilon, u32 accumulate) {
    __shared__ f32 warps[BLOCK / WARP];
    __shared__ f32 gathered[GATHERED<1>];
    const u32 end = min((blockIdx.x + 1) * block_rows, rows);
    Sums<1> sums; // gradient of the gain
    for (u32 row = blockIdx.x * block_rows + threadIdx.x / ROW_THREADS; row < end; row += ROWS) {
        Row x, d, before;
        x.load(inp + (u64)row * CHANNELS);
        d.load(dout + (u64)row * CHANNELS);
        if (accumulate) {
            before.load(dinp + (u64)row * CHANNELS);
        }
        const f32 scale = scale_of(x, epsilon, warps);
        f32 along = 0.0f; // of g and n
        #pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (Row::has(k)) {
                f32 value[VEC], dvalue[VEC], w[VEC];
                x.packs[k].get(value);
                d.packs[k].get(dvalue);
                load(w, weight + Row::channel(k));
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    const f32 n = value[i] * scale;
                    along += dvalue[i] * w[i] * n;
                    sums.of[0][k][i] += dvalue[i] * n;
                }
            }
        }
        const f32 gn_mean = row_sum<ROW_THREADS>(along, warps) * SHARE;
        #pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (Row::has(k)) {
                f32 value[VEC], dvalue[VEC], w[VEC], sum[VEC] = {};
                x.packs[k].get(value);
                d.packs[k].get(dvalue);
                load(w, weight + Row::channel(k));
                if (accumulate) {
                    before.packs[k].get(sum);
                }
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    sum[i] += (dvalue[i] * w[i] - value[i] * scale * gn_mean) * scale;
                }
                store(dinp + (u64)row * CHANNELS + Row::channel(k), sum);
            }
        }
    }
    store_sums(partials + (u64)blockIdx.x * CHANNELS, sums, gathered);
}
