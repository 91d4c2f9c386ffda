// Layer normalisation over rows of CHANNELS elements; ROW_THREADS threads, a warp or a block, hold a row in
// registers.
//
// Bytes a row of C elements of s bytes: forward 2·C·s; backward 3·C·s, or 4·C·s where it adds to dinp. The gain and
// bias stay in the cache; the partial sums of their gradients are small by the choice of blocks.

#include "row.cuh"

constexpr f32 EPSILON = 1e-5f;

// Mean, and 1/√(variance + ε), of a row.
__device__ __forceinline__ void statistics(const Row &row, f32 *warps, f32 &mean, f32 &scale) {
    f32 sum = 0.0f;
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            f32 x[VEC];
            row.packs[k].get(x);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                sum += x[i];
            }
        }
    }
    mean = row_sum<ROW_THREADS>(sum, warps) * SHARE;
    f32 squares = 0.0f;
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            f32 x[VEC];
            row.packs[k].get(x);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                squares += (x[i] - mean) * (x[i] - mean);
            }
        }
    }
    scale = 1.0f / sqrtf(row_sum<ROW_THREADS>(squares, warps) * SHARE + EPSILON);
}

// out = (inp − mean)·scale·weight + bias, by rows
extern "C" __global__ void __launch_bounds__(BLOCK)
layernorm_forward(const ACT *inp, const ACT *weight, const ACT *bias, ACT *out, u32 rows) {
    __shared__ f32 warps[BLOCK / WARP];
    const u32 row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= rows) {
        return;
    }
    Row x;
    x.load(inp + (u64)row * CHANNELS);
    f32 mean, scale;
    statistics(x, warps, mean, scale);
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            const u32 channel = Row::channel(k);
            f32 value[VEC], w[VEC], b[VEC];
            x.packs[k].get(value);
            load(w, weight + channel);
            load(b, bias + channel);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                value[i] = (value[i] - mean) * scale * w[i] + b[i];
            }
            store(out + (u64)row * CHANNELS + channel, value);
        }
    }
}

// With n = (inp − mean)·scale and g = dout·weight: dinp = scale·(g − mean(g) − n·mean(g·n)), or added to what is there.
// Block p takes rows p·block_rows … and writes its sums of dout·n and of dout to partials[p], [2, C].
extern "C" __global__ void __launch_bounds__(BLOCK)
layernorm_backward(const ACT *dout, const ACT *inp, const ACT *weight, ACT *dinp, f32 *partials, u32 rows,
                   u32 block_rows, u32 accumulate) {
    __shared__ f32 warps[2 * BLOCK / WARP];
    __shared__ f32 gathered[GATHERED<2>];
    const u32 end = min((blockIdx.x + 1) * block_rows, rows);
    Sums<2> sums; // gradients of the gain and of the bias
    for (u32 row = blockIdx.x * block_rows + threadIdx.x / ROW_THREADS; row < end; row += ROWS) {
        Row x, d, before;
        x.load(inp + (u64)row * CHANNELS);
        d.load(dout + (u64)row * CHANNELS);
        if (accumulate) {
            before.load(dinp + (u64)row * CHANNELS);
        }
        f32 mean, scale;
        statistics(x, warps, mean, scale);
        // Of g and of g·n.
        f32 means[2] = {};
        #pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (Row::has(k)) {
                f32 value[VEC], dvalue[VEC], w[VEC];
                x.packs[k].get(value);
                d.packs[k].get(dvalue);
                load(w, weight + Row::channel(k));
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    const f32 n = (value[i] - mean) * scale;
                    means[0] += dvalue[i] * w[i];
                    means[1] += dvalue[i] * w[i] * n;
                    sums.of[0][k][i] += dvalue[i] * n;
                    sums.of[1][k][i] += dvalue[i];
                }
            }
        }
        row_sums<ROW_THREADS>(means, warps);
        const f32 g_mean = means[0] * SHARE, gn_mean = means[1] * SHARE;
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
                    const f32 n = (value[i] - mean) * scale;
                    sum[i] += (dvalue[i] * w[i] - g_mean - n * gn_mean) * scale;
                }
                store(dinp + (u64)row * CHANNELS + Row::channel(k), sum);
            }
        }
    }
    store_sums(partials + (u64)blockIdx.x * 2 * CHANNELS, sums, gathered);
}
