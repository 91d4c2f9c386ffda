// Causal attention, forward, on tensor cores (Dao et al. 2022; Dao 2023).
//
// A block owns `BLOCK_ROWS` queries of one head, a warp `WARP_ROWS` of them. It walks the keys from the diagonal back
// to the first in steps of `STEP`, keeping the running maximum and sum of each query's softmax; the next step's keys and
// values are on their way meanwhile. Scores exist in registers only. Keys before that of the first query fill whole
// steps, so that every row meets a key that it sees in its first step.
//
// FLOP: 4·HEAD a (query, key) pair, T·(T + 1)/2 pairs a head of T positions. Bytes: q, k, v and out once, and lse; keys
// and values again for each block of queries, from the L2 cache.

#include "flash.cuh"

constexpr int COLUMNS = STEP / 8;

struct Queries {
    u32 left[ROW_TILES][HEAD / 16][4];
    f32 out[ROW_TILES][CHUNKS][4];
    f32 top[ROW_TILES][2]; // of scores, not yet scaled
    f32 sum[ROW_TILES][2]; // of this thread's columns
};

// scores = queries · keysᵀ
__device__ __forceinline__ void score(f32 (&scores)[ROW_TILES][COLUMNS][4], const Queries &queries, u32 keys) {
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[m][n][i] = 0.0f;
            }
        }
    }
    #pragma unroll
    for (int k = 0; k < HEAD / 16; k++) {
        #pragma unroll
        for (int n = 0; n < STEP / 16; n++) {
            u32 right[4];
            load_right(right, keys, 16 * n, k);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                multiply_add(scores[m][2 * n], queries.left[m][k], right[0], right[1]);
                multiply_add(scores[m][2 * n + 1], queries.left[m][k], right[2], right[3]);
            }
        }
    }
}

// From scores to e^(score − top), with what was summed so far rescaled to the new top.
__device__ __forceinline__ void exponentiate(f32 (&scores)[ROW_TILES][COLUMNS][4], Queries &queries, f32 scale_log2) {
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            f32 top = queries.top[m][half];
            #pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                top = fmaxf(top, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            }
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 1));
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, 2));
            const f32 factor = exp2_fast((queries.top[m][half] - top) * scale_log2);
            queries.top[m][half] = top;
            const f32 shift = -top * scale_log2;
            f32 sum = queries.sum[m][half] * factor;
            #pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                #pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    scores[m][n][i] = exp2_fast(fmaf(scores[m][n][i], scale_log2, shift));
                    sum += scores[m][n][i];
                }
            }
            queries.sum[m][half] = sum;
            #pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                queries.out[m][n][2 * half] *= factor;
                queries.out[m][n][2 * half + 1] *= factor;
            }
        }
    }
}

// out += e^(scores) · values
__device__ __forceinline__ void weigh(Queries &queries, const f32 (&scores)[ROW_TILES][COLUMNS][4], u32 values) {
    #pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        u32 left[ROW_TILES][4];
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const f32 *pair = &scores[m][2 * k + i / 2][2 * (i % 2)];
                left[m][i] = narrow(pair[0], pair[1]);
            }
        }
        #pragma unroll
        for (int n = 0; n < HEAD / 16; n++) {
            u32 right[4];
            load_right_transposed(right, values, 16 * k, n);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                multiply_add(queries.out[m][2 * n], left[m], right[0], right[1]);
                multiply_add(queries.out[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// Keys after a query count nothing. `query` is the last key that row 0 of the warp sees, `key` that of column 0.
__device__ __forceinline__ void mask(f32 (&scores)[ROW_TILES][COLUMNS][4], u32 query, u32 key) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 row = query + 16 * m + i / 2 * 8 + lane / 4;
                const u32 column = key + 8 * n + lane % 4 * 2 + i % 2;
                scores[m][n][i] = column > row ? -__uint_as_float(0x7f800000u) : scores[m][n][i];
            }
        }
    }
}

// out [B, T, H·HEAD], lse [B, H, T], T rows of queries; `pairs` = B·H, `group` heads go together, `scale` = 1/√HEAD.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
flash_forward(const bf16 *q, const bf16 *k, const bf16 *v, OUT *out, f32 *lse, SIZES, u32 pairs, u32 group,
              f32 scale MASK_PARAMETERS) {
    SHARED_BYTES(shared);
    const u32 tile = shared_address(shared);
    const u32 steps_at = tile + BLOCK_ROWS * ROW_BYTES;
    const u32 tiles = (queries + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const Work work = work_of(pairs, tiles, group);
    const u32 first = (tiles - 1 - work.order) * BLOCK_ROWS;
    const u32 sample = work.pair / heads, head = work.pair % heads;
    q += q_view.at(sample, queries, head);
    k += k_view.at(sample, keys, head / HEADS_PER_KV);
    v += v_view.at(sample, keys, head / HEADS_PER_KV);

    const u32 last_key = min(PAST + min(first + BLOCK_ROWS, queries), keys) - 1;
    int step = (int)(last_key / STEP);
    load_tile<BLOCK_ROWS>(tile, q, q_view.stride, first, queries);
    load_tile<STEP>(steps_at, k, k_view.stride, step * STEP, keys);
    load_tile<STEP>(steps_at + STEP_BYTES, v, v_view.stride, step * STEP, keys);
    copies_done();
    __syncthreads();

    const u32 lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
    const u32 query = first + warp_row, seen = PAST + query;
    Queries own;
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int c = 0; c < HEAD / 16; c++) {
            load_left(own.left[m][c], tile, warp_row + 16 * m, c);
        }
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            own.top[m][half] = -__uint_as_float(0x7f800000u);
            own.sum[m][half] = 0.0f;
        }
        #pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                own.out[m][n][i] = 0.0f;
            }
        }
    }
    const f32 scale_log2 = scale * LOG2_E;
    for (u32 stage = 0; step >= 0; step--, stage ^= 1) {
        const u32 here = steps_at + stage * 2 * STEP_BYTES;
        const u32 next = steps_at + (stage ^ 1) * 2 * STEP_BYTES;
        if (step > 0) {
            load_tile<STEP>(next, k, k_view.stride, (step - 1) * STEP, keys);
            load_tile<STEP>(next + STEP_BYTES, v, v_view.stride, (step - 1) * STEP, keys);
        }
        // A warp passes over steps whose keys all come after its queries.
        if (step * STEP <= seen) {
            f32 scores[ROW_TILES][COLUMNS][4];
            score(scores, own, here);
            if ((step + 1) * STEP > seen + 1) {
                mask(scores, seen, step * STEP);
            }
            exponentiate(scores, own, scale_log2);
            drop(scores, MASK, sample, head, first_query + query, first_key + step * STEP);
            weigh(own, scores, here + STEP_BYTES);
        }
        copies_done();
        __syncthreads();
    }
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            f32 sum = own.sum[m][half];
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            const u32 row = query + 16 * m + 8 * half + lane / 4;
            if (lane % 4 == 0 && row < queries) {
                lse[(u64)work.pair * queries + row] = own.top[m][half] * scale + __logf(sum);
            }
            const f32 share = 1.0f / sum;
            #pragma unroll
            for (int n = 0; n < CHUNKS; n++) {
                own.out[m][n][2 * half] *= share;
                own.out[m][n][2 * half + 1] *= share;
            }
        }
    }
    OUT *to = out + ((u64)sample * queries * heads + head) * HEAD;
    store_rows(own.out, tile, to, false, heads * HEAD, first, queries);
}
