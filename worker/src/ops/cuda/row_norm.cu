// Normalisation over rows of CHANNELS elements; ROW_THREADS threads, a warp or a block, hold a row in registers. With
// CENTERED it is layer normalisation, which subtracts the mean and adds a bias, without it that by the root mean square.
//
// Bytes a row of C elements of s bytes: forward 2·C·s; backward 3·C·s, or 4·C·s where it adds to dinp. The gain and
// bias stay in the cache; the partial sums of their gradients are small by the choice of blocks.

#include "row.cuh"

// Sums over rows for the gradients of the parameters: of the gain, and of the bias if there is one.
constexpr int SUMS = CENTERED ? 2 : 1;

// x − mean, or x where the mean is not subtracted.
__device__ __forceinline__ f32 offset(f32 x, f32 mean) { return CENTERED ? x - mean : x; }

// Mean, and 1/√(variance + ε), of a row; without CENTERED 0, and 1/√(mean of the squares + ε).
__device__ __forceinline__ void statistics(const Row &row, f32 epsilon, f32 *warps, f32 &mean, f32 &scale) {
    mean = 0.0f;
    if (CENTERED) {
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
    }
    f32 squares = 0.0f;
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            f32 x[VEC];
            row.packs[k].get(x);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                squares += offset(x[i], mean) * offset(x[i], mean);
            }
        }
    }
    scale = 1.0f / sqrtf(row_sum<ROW_THREADS>(squares, warps) * SHARE + epsilon);
}

// out = (inp − mean)·scale·weight + bias, by rows; without CENTERED inp·scale·weight
extern "C" __global__ void __launch_bounds__(BLOCK)
norm_forward(const ACT *inp, const ACT *weight, const ACT *bias, ACT *out, u32 rows, f32 epsilon) {
    __shared__ f32 warps[BLOCK / WARP];
    const u32 row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= rows) {
        return;
    }
    Row x;
    x.load(inp + (u64)row * CHANNELS);
    f32 mean, scale;
    statistics(x, epsilon, warps, mean, scale);
    #pragma unroll
    for (int k = 0; k < PACKS; k++) {
        if (Row::has(k)) {
            const u32 channel = Row::channel(k);
            f32 value[VEC], w[VEC], b[VEC];
            x.packs[k].get(value);
            load(w, weight + channel);
            if (CENTERED) {
                load(b, bias + channel);
            }
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                const f32 scaled = offset(value[i], mean) * scale * w[i];
                value[i] = CENTERED ? scaled + b[i] : scaled;
            }
            store(out + (u64)row * CHANNELS + channel, value);
        }
    }
}

// With n = (inp − mean)·scale and g = dout·weight: dinp = scale·(g − mean(g) − n·mean(g·n)), or added to what is there;
// without the two means where CENTERED is not. Block p takes rows p·block_rows … and writes its sums of dout·n, and of
// dout if there is a bias, to partials[p], [SUMS, C].
extern "C" __global__ void __launch_bounds__(BLOCK)
norm_backward(const ACT *dout, const ACT *inp, const ACT *weight, ACT *dinp, f32 *partials, u32 rows, u32 block_rows,
              f32 epsilon, u32 accumulate) {
    __shared__ f32 warps[SUMS * BLOCK / WARP];
    __shared__ f32 gathered[GATHERED<SUMS>];
    const u32 end = min((blockIdx.x + 1) * block_rows, rows);
    Sums<SUMS> sums;
    for (u32 row = blockIdx.x * block_rows + threadIdx.x / ROW_THREADS; row < end; row += ROWS) {
        Row x, d, before;
        x.load(inp + (u64)row * CHANNELS);
        d.load(dout + (u64)row * CHANNELS);
        if (accumulate) {
            before.load(dinp + (u64)row * CHANNELS);
        }
        f32 mean, scale;
        statistics(x, epsilon, warps, mean, scale);
        // Of g·n, and of g if the mean is subtracted.
        f32 means[SUMS] = {};
        #pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (Row::has(k)) {
                f32 value[VEC], dvalue[VEC], w[VEC];
                x.packs[k].get(value);
                d.packs[k].get(dvalue);
                load(w, weight + Row::channel(k));
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    const f32 n = offset(value[i], mean) * scale;
                    means[0] += dvalue[i] * w[i] * n;
                    sums.of[0][k][i] += dvalue[i] * n;
                    if (CENTERED) {
                        means[SUMS - 1] += dvalue[i] * w[i];
                        sums.of[SUMS - 1][k][i] += dvalue[i];
                    }
                }
            }
        }
        row_sums<ROW_THREADS>(means, warps);
        const f32 gn_mean = means[0] * SHARE, g_mean = means[SUMS - 1] * SHARE;
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
                    const f32 n = offset(value[i], mean) * scale;
                    sum[i] += (offset(dvalue[i] * w[i], g_mean) - n * gn_mean) * scale;
                }
                store(dinp + (u64)row * CHANNELS + Row::channel(k), sum);
            }
        }
    }
    store_sums(partials + (u64)blockIdx.x * SUMS * CHANNELS, sums, gathered);
}
