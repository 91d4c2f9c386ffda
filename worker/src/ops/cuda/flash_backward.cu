// Causal attention, backward, on tensor cores, in two kernels that write each gradient once: no atomic additions, the
// same bits each time.
//
// `flash_dq` owns queries and walks their keys; it also leaves Σ dout·out and the scaled lse of each query for the
// second. `flash_dkv` owns keys and walks the queries that see them, head by head where heads share the keys. Both
// compute the probabilities again from lse.
//
// FLOP a (query, key) pair: 6·HEAD and 8·HEAD; five products are needed, two are computed twice. `PART` columns of
// scores are in registers at a time; of the two left operands, `RESIDENT` are in registers for good.

#include "flash.cuh"

constexpr int COLUMNS = PART / 8;

typedef f32 Scores[ROW_TILES][COLUMNS][4];
typedef f32 Sums[ROW_TILES][CHUNKS][4];

// Rows of a left operand: in registers for good, or from shared memory each time.
template <bool HELD> struct Rows {
    u32 left[HELD ? ROW_TILES : 1][HELD ? HEAD / 16 : 1][4];
    u32 tile, row;

    __device__ __forceinline__ Rows(u32 tile, u32 row) : tile(tile), row(row) {
        if (HELD) {
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                #pragma unroll
                for (int k = 0; k < HEAD / 16; k++) {
                    load_left(left[HELD ? m : 0][HELD ? k : 0], tile, row + 16 * m, k);
                }
            }
        }
    }

    __device__ __forceinline__ void get(u32 (&to)[4], int m, int k) const {
        if (HELD) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                to[i] = left[HELD ? m : 0][HELD ? k : 0][i];
            }
        } else {
            load_left(to, tile, row + 16 * m, k);
        }
    }
};

template <class T> __device__ __forceinline__ void clear(T &sums) {
    for (auto &tile : sums) {
        for (auto &fragment : tile) {
            for (f32 &x : fragment) {
                x = 0.0f;
            }
        }
    }
}

// scores = rows · (rows `first..first + PART` of `tile`)ᵀ
template <bool HELD>
__device__ __forceinline__ void score(Scores &scores, const Rows<HELD> &rows, u32 tile, u32 first) {
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
        u32 left[ROW_TILES][4];
        #pragma unroll
        for (int m = 0; m < ROW_TILES; m++) {
            rows.get(left[m], m, k);
        }
        #pragma unroll
        for (int n = 0; n < PART / 16; n++) {
            u32 right[4];
            load_right(right, tile, first + 16 * n, k);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                multiply_add(scores[m][2 * n], left[m], right[0], right[1]);
                multiply_add(scores[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// sums += scores · (rows `first..first + PART` of `tile`)
__device__ __forceinline__ void weigh(Sums &sums, const Scores &scores, u32 tile, u32 first) {
    #pragma unroll
    for (int k = 0; k < PART / 16; k++) {
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
            load_right_transposed(right, tile, first + 16 * k, n);
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                multiply_add(sums[m][2 * n], left[m], right[0], right[1]);
                multiply_add(sums[m][2 * n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

__device__ __forceinline__ void scale_all(Sums &sums, f32 factor) {
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                sums[m][n][i] *= factor;
            }
        }
    }
}

// What backward knows of a query: lse/ln 2, and Σ dout·out. Read as a pair.
struct Known {
    f32 lse_log2;
    f32 along;
};

// Of each row of the warp: Σ dout·out by the `CHUNKS` lanes that share a row, and lse.
__device__ __forceinline__ void
know_rows(Known *known, const bf16 *out, const bf16 *dout, const f32 *lse, u32 stride, u32 first, u32 end) {
    const u32 lane = threadIdx.x % 32, chunk = lane % CHUNKS;
    #pragma unroll
    for (int k = 0; k < WARP_ROWS * CHUNKS / 32; k++) {
        const u32 row = (lane + 32 * k) / CHUNKS;
        f32 along = 0.0f;
        if (first + row < end) {
            const u64 at = (u64)(first + row) * stride + chunk * 8;
            f32 o[8], d[8];
            load(o, out + at);
            load(d, dout + at);
            #pragma unroll
            for (int i = 0; i < 8; i++) {
                along = fmaf(o[i], d[i], along);
            }
        }
        #pragma unroll
        for (u32 distance = CHUNKS / 2; distance > 0; distance /= 2) {
            along += __shfl_xor_sync(ALL_LANES, along, distance);
        }
        if (chunk == 0) {
            known[row] = Known{first + row < end ? lse[first + row] * LOG2_E : 0.0f, along};
        }
    }
}

// Factors of keys (rows of a tile of 16, the first `key`) and two queries beside each other, in the order of a thread's
// numbers.
template <class M>
__device__ __forceinline__ void
of_pairs(f32 (&factors)[4], const M &mask, u32 sample, u32 head, u32 query, u32 key) {
    const u32 row = threadIdx.x % 32 / 4;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        f32 of_keys[4];
        of_group(of_keys, mask, sample, head, query + i, key / 4 + row / 2);
        factors[i] = chosen(of_keys, row % 2);
        factors[2 + i] = chosen(of_keys, 2 + row % 2);
    }
}

// out, dout [B, T, H·HEAD]; lse [B, H, T]; known [B·H, T], written; T rows of queries. `pairs` = B·H.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
flash_dq(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *out, const f32 *lse, const bf16 *dout, OUT *dq_to,
         Known *known, View dq_view, u32 adds, SIZES, u32 pairs, u32 group, f32 scale MASK_PARAMETERS) {
    SHARED_BYTES(shared);
    __shared__ Known own[BLOCK_ROWS];
    const u32 q_tile = shared_address(shared), dout_tile = q_tile + BLOCK_ROWS * ROW_BYTES;
    const u32 steps_at = dout_tile + BLOCK_ROWS * ROW_BYTES;
    const u32 tiles = (queries + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const Work work = work_of(pairs, tiles, group);
    const u32 first = (tiles - 1 - work.order) * BLOCK_ROWS;
    const u32 channels = heads * HEAD;
    const u32 sample = work.pair / heads, head = work.pair % heads;
    const u64 out_at = (u64)sample * queries * channels + head * HEAD;
    q += q_view.at(sample, queries, head);
    k += k_view.at(sample, keys, head / HEADS_PER_KV);
    v += v_view.at(sample, keys, head / HEADS_PER_KV);

    const u32 steps = (min(PAST + min(first + BLOCK_ROWS, queries), keys) + STEP - 1) / STEP;
    load_tile<BLOCK_ROWS>(q_tile, q, q_view.stride, first, queries);
    load_tile<BLOCK_ROWS>(dout_tile, dout + out_at, channels, first, queries);
    load_tile<STEP>(steps_at, k, k_view.stride, 0, keys);
    load_tile<STEP>(steps_at + STEP_BYTES, v, v_view.stride, 0, keys);

    const u32 lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
    const u32 query = first + warp_row, seen = PAST + query;
    know_rows(own + warp_row, out + out_at, dout + out_at, lse + (u64)work.pair * queries, channels, query, queries);
    __syncwarp();
    for (u32 row = lane; row < WARP_ROWS; row += 32) {
        if (query + row < queries) {
            known[(u64)work.pair * queries + query + row] = own[warp_row + row];
        }
    }
    Known mine[ROW_TILES][2];
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        mine[m][0] = own[warp_row + 16 * m + lane / 4];
        mine[m][1] = own[warp_row + 16 * m + 8 + lane / 4];
    }
    copies_done();
    __syncthreads();

    const Rows<(RESIDENT >= 1)> q_rows(q_tile, warp_row);
    const Rows<(RESIDENT >= 2)> dout_rows(dout_tile, warp_row);
    Sums dq;
    clear(dq);
    const f32 scale_log2 = scale * LOG2_E;
    for (u32 step = 0; step < steps; step++) {
        const u32 key_tile = steps_at + step % 2 * 2 * STEP_BYTES, value_tile = key_tile + STEP_BYTES;
        if (step + 1 < steps) {
            const u32 next = steps_at + (step + 1) % 2 * 2 * STEP_BYTES;
            load_tile<STEP>(next, k, k_view.stride, (step + 1) * STEP, keys);
            load_tile<STEP>(next + STEP_BYTES, v, v_view.stride, (step + 1) * STEP, keys);
        }
        for (u32 part = 0; part < STEP; part += PART) {
            const u32 key = step * STEP + part;
            if (key >= seen + WARP_ROWS) {
                break;
            }
            Scores p, ds;
            score(p, q_rows, key_tile, part);
            score(ds, dout_rows, value_tile, part);
            drop(ds, MASK, sample, head, first_query + query, first_key + key);
            const bool masked = key + PART > seen + 1;
            #pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                #pragma unroll
                for (int n = 0; n < COLUMNS; n++) {
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const Known &row = mine[m][i / 2];
                        f32 x = exp2_fast(fmaf(p[m][n][i], scale_log2, -row.lse_log2)) * (ds[m][n][i] - row.along);
                        if (masked) {
                            const u32 r = seen + 16 * m + i / 2 * 8 + lane / 4;
                            const u32 c = key + 8 * n + lane % 4 * 2 + i % 2;
                            x = c > r ? 0.0f : x;
                        }
                        ds[m][n][i] = x;
                    }
                }
            }
            weigh(dq, ds, key_tile, part);
        }
        copies_done();
        __syncthreads();
    }
    scale_all(dq, scale);
    store_rows(dq, q_tile, dq_to + dq_view.at(sample, queries, head), adds, dq_view.stride, first, queries);
}

// As above; `known` as `flash_dq` left it. Writes the gradients of keys and values, of which there are `pairs` = B·KV
// heads: sums over the heads of queries that share them, in their order.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
flash_dkv(const bf16 *q, const bf16 *k, const bf16 *v, const bf16 *dout, OUT *dk_to, OUT *dv_to, const Known *known,
          View dk_view, View dv_view, u32 adds, SIZES, u32 pairs, u32 group, f32 scale MASK_PARAMETERS) {
    SHARED_BYTES(shared);
    alignas(16) __shared__ Known of_step[2][STEP];
    const u32 k_tile = shared_address(shared), v_tile = k_tile + BLOCK_ROWS * ROW_BYTES;
    const u32 steps_at = v_tile + BLOCK_ROWS * ROW_BYTES;
    const u32 tiles = (keys + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const Work work = work_of(pairs, tiles, group);
    const u32 first = work.order * BLOCK_ROWS;
    const u32 channels = heads * HEAD;
    const u32 kv_heads = heads / HEADS_PER_KV;
    const u32 sample = work.pair / kv_heads, kv_head = work.pair % kv_heads, head = kv_head * HEADS_PER_KV;
    q += q_view.at(sample, queries, head);
    dout += (u64)sample * queries * channels + head * HEAD;
    known += (u64)work.pair * HEADS_PER_KV * queries;

    const u32 steps = (queries + STEP - 1) / STEP;
    // The steps of a head begin at the first whose queries see a key of the block; after its last follow those of the
    // next head. There are none where all queries come before.
    const u32 first_step = min(first > PAST ? (first - PAST) / STEP : 0, steps), steps_of_head = steps - first_step;
    const u32 end = first_step + HEADS_PER_KV * steps_of_head;
    const auto member_of = [&](u32 at) { return HEADS_PER_KV == 1 ? 0 : (at - first_step) / steps_of_head; };
    const auto load_step = [&](u32 at) {
        const u32 to = steps_at + at % 2 * 2 * STEP_BYTES;
        const u32 member = member_of(at), step = at - member * steps_of_head;
        load_tile<STEP>(to, q + member * HEAD, q_view.stride, step * STEP, queries);
        load_tile<STEP>(to + STEP_BYTES, dout + member * HEAD, channels, step * STEP, queries);
        const Known *known_of_head = known + (u64)member * queries;
        for (u32 row = threadIdx.x; row < STEP; row += THREADS) {
            const bool valid = step * STEP + row < queries;
            copy_pair(shared_address(&of_step[at % 2][row]), known_of_head + (valid ? step * STEP + row : 0), valid);
        }
    };
    load_tile<BLOCK_ROWS>(k_tile, k + k_view.at(sample, keys, kv_head), k_view.stride, first, keys);
    load_tile<BLOCK_ROWS>(v_tile, v + v_view.at(sample, keys, kv_head), v_view.stride, first, keys);
    if (first_step < end) {
        load_step(first_step);
    }
    copies_done();
    __syncthreads();

    const u32 lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * WARP_ROWS;
    const u32 key = first + warp_row;
    const Rows<(RESIDENT >= 1)> k_rows(k_tile, warp_row);
    const Rows<(RESIDENT >= 2)> v_rows(v_tile, warp_row);
    Sums dk, dv;
    clear(dk);
    clear(dv);
    const f32 scale_log2 = scale * LOG2_E;
    for (u32 at = first_step; at < end; at++) {
        const u32 query_tile = steps_at + at % 2 * 2 * STEP_BYTES, dout_tile = query_tile + STEP_BYTES;
        const u32 member = member_of(at), step = at - member * steps_of_head;
        if (at + 1 < end) {
            load_step(at + 1);
        }
        for (u32 part = 0; part < STEP; part += PART) {
            const u32 query = step * STEP + part, seen = PAST + query;
            if (seen + PART <= key) {
                continue;
            }
            Scores p, ds;
            score(p, k_rows, query_tile, part);
            score(ds, v_rows, dout_tile, part);
            const bool masked = seen < key + WARP_ROWS - 1;
            #pragma unroll
            for (int n = 0; n < COLUMNS; n++) {
                // Of two columns: lse, along, lse, along.
                const float4 both = *reinterpret_cast<const float4 *>(&of_step[at % 2][part + 8 * n + lane % 4 * 2]);
                #pragma unroll
                for (int m = 0; m < ROW_TILES; m++) {
                    f32 factors[4];
                    const u32 position = first_query + query + 8 * n + lane % 4 * 2;
                    of_pairs(factors, MASK, sample, head + member, position, first_key + key + 16 * m);
                    #pragma unroll
                    for (int i = 0; i < 4; i++) {
                        ds[m][n][i] = HAS_MASK ? ds[m][n][i] * factors[i] : ds[m][n][i];
                        f32 x = exp2_fast(fmaf(p[m][n][i], scale_log2, -(i % 2 ? both.z : both.x)));
                        if (masked) {
                            const u32 r = key + 16 * m + i / 2 * 8 + lane / 4;
                            const u32 c = seen + 8 * n + lane % 4 * 2 + i % 2;
                            x = r > c ? 0.0f : x;
                        }
                        p[m][n][i] = HAS_MASK ? x * factors[i] : x;
                        ds[m][n][i] = x * (ds[m][n][i] - (i % 2 ? both.w : both.y));
                    }
                }
            }
            weigh(dv, p, dout_tile, part);
            weigh(dk, ds, query_tile, part);
        }
        copies_done();
        __syncthreads();
    }
    scale_all(dk, scale);
    store_rows(dk, k_tile, dk_to + dk_view.at(sample, keys, kv_head), adds, dk_view.stride, first, keys);
    store_rows(dv, v_tile, dv_to + dv_view.at(sample, keys, kv_head), adds, dv_view.stride, first, keys);
}
