// Causal attention by tiles in shared memory, in f32 without tensor cores: for f32, for widths of heads that the flash
// kernels do not take, and as their reference.
//
// Given by the compiler's command line: `ACT`, `HEAD` channels of a head, `TILE` queries and keys of a tile (32 or 64),
// `DROPOUT` where probabilities are dropped, `HEADS_PER_KV` where heads of queries share keys and values: how many, and `OUT`
// where results have another type.
// A block is a square of threads; each computes 4 rows of a tile, every `SIDE`th column. Rows of the other operand are
// walked in order, so every sum has one order.
//
// FLOP a (query, key) pair: forward 4·HEAD, backward 14·HEAD.

#ifndef OUT
#define OUT ACT
#endif

#include "element.cuh"
#include "dropout.cuh"
#include "heads.cuh"

constexpr u32 SIDE = TILE / 4;
constexpr u32 THREADS = SIDE * SIDE;
constexpr u32 WIDTH = (HEAD + 15) / 16 * 16;
constexpr u32 PER_THREAD = WIDTH / SIDE;
// Odd, so that rows start in different banks.
constexpr u32 STRIDE = WIDTH + 1;
constexpr u32 SQUARE_STRIDE = TILE + 1;
constexpr u32 ROWS_OF_TILE = TILE * STRIDE;
// Of a score that does not count.
constexpr f32 LEAST = -3.402823466e38f;

// Shared memory of a block, as large as the launch says: two tiles and a square forward, four tiles and a square backward.
#ifdef __CUDA_ARCH__
#define SHARED_WORDS(name) extern __shared__ f32 name[]
#else
#define SHARED_WORDS(name) f32 *const name = reinterpret_cast<f32 *>(dynamic_shared)
#endif

typedef f32 Square[4][4];
typedef f32 Sums[4][PER_THREAD];

__device__ __forceinline__ u32 row_of(u32 i) { return threadIdx.x / SIDE * 4 + i; }
__device__ __forceinline__ u32 column_of(u32 j) { return threadIdx.x % SIDE + SIDE * j; }

// Rows `first..` of a matrix in memory, zeros from row `end` and channel `HEAD` on.
__device__ __forceinline__ void load_rows(f32 *tile, const ACT *from, u32 stride, u32 first, u32 end) {
    for (u32 at = threadIdx.x; at < TILE * WIDTH; at += THREADS) {
        const u32 row = at / WIDTH, channel = at % WIDTH;
        f32 x[1] = {0.0f};
        if (first + row < end && channel < HEAD) {
            load(x, from + (u64)(first + row) * stride + channel);
        }
        tile[row * STRIDE + channel] = x[0];
    }
}

// Stored, or added to what is there.
__device__ __forceinline__ void
store_rows(OUT *to, const Sums &sums, f32 factor, bool adds, u32 stride, u32 first, u32 end) {
    for (u32 i = 0; i < 4; i++) {
        for (u32 j = 0; j < PER_THREAD; j++) {
            if (first + row_of(i) < end && column_of(j) < HEAD) {
                OUT *const at = to + (u64)(first + row_of(i)) * stride + column_of(j);
                f32 x[1] = {sums[i][j] * factor}, sum[1];
                if (adds) {
                    load(sum, at);
                    x[0] += sum[0];
                }
                store(at, x);
            }
        }
    }
}

// square = left · rightᵀ
__device__ __forceinline__ void products(Square &square, const f32 *left, const f32 *right) {
    for (u32 i = 0; i < 4; i++) {
        for (u32 j = 0; j < 4; j++) {
            square[i][j] = 0.0f;
        }
    }
    for (u32 channel = 0; channel < HEAD; channel++) {
        f32 a[4], b[4];
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            a[i] = left[row_of(i) * STRIDE + channel];
            b[i] = right[column_of(i) * STRIDE + channel];
        }
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                square[i][j] = fmaf(a[i], b[j], square[i][j]);
            }
        }
    }
}

// sums += square · right
__device__ __forceinline__ void add_products(Sums &sums, const f32 *square, const f32 *right) {
    for (u32 k = 0; k < TILE; k++) {
        f32 a[4];
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            a[i] = square[row_of(i) * SQUARE_STRIDE + k];
        }
        #pragma unroll
        for (u32 j = 0; j < PER_THREAD; j++) {
            const f32 b = right[k * STRIDE + column_of(j)];
            #pragma unroll
            for (u32 i = 0; i < 4; i++) {
                sums[i][j] = fmaf(a[i], b, sums[i][j]);
            }
        }
    }
}

__device__ __forceinline__ void keep(f32 *to, const Square &square) {
    #pragma unroll
    for (u32 i = 0; i < 4; i++) {
        #pragma unroll
        for (u32 j = 0; j < 4; j++) {
            to[row_of(i) * SQUARE_STRIDE + column_of(j)] = square[i][j];
        }
    }
}

__device__ __forceinline__ void clear(Sums &sums) {
    #pragma unroll
    for (u32 i = 0; i < 4; i++) {
        #pragma unroll
        for (u32 j = 0; j < PER_THREAD; j++) {
            sums[i][j] = 0.0f;
        }
    }
}

// Over the threads that share a row.
__device__ __forceinline__ f32 row_sum_of(f32 x) {
    #pragma unroll
    for (u32 distance = SIDE / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, distance);
    }
    return x;
}

__device__ __forceinline__ f32 row_max_of(f32 x) {
    #pragma unroll
    for (u32 distance = SIDE / 2; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    }
    return x;
}

// Which head of queries of which sample a block works on, and its first row there. Where it owns keys, the head is the
// first of those that share them.
struct Place {
    u32 sample, head, kv_head, first, channels;
    u64 out_at;  // of the first row, in [B, T, H·HEAD]
    u64 rows_at; // in [B, H, T]

    __device__ __forceinline__ Place(u32 queries, u32 owned, u32 heads, bool owns_keys) {
        const u32 tiles = (owned + TILE - 1) / TILE, pair = blockIdx.x / tiles;
        const u32 together = owns_keys ? HEADS_PER_KV : 1;
        first = blockIdx.x % tiles * TILE;
        sample = pair / (heads / together);
        head = pair % (heads / together) * together;
        kv_head = head / HEADS_PER_KV;
        channels = heads * HEAD;
        out_at = (u64)sample * queries * channels + head * HEAD;
        rows_at = (u64)pair * together * queries;
    }
};

// Tiles of keys that the queries of a tile see.
__device__ __forceinline__ u32 tiles_of_keys(u32 past, u32 first, u32 queries, u32 keys) {
    return (min(past + min(first + TILE, queries), keys) + TILE - 1) / TILE;
}

// out [B, T, H·HEAD], lse [B, H, T]; T rows of queries
extern "C" __global__ void __launch_bounds__(THREADS)
attention_forward(const ACT *q, const ACT *k, const ACT *v, OUT *out, f32 *lse, SIZES, f32 scale MASK_PARAMETERS) {
    SHARED_WORDS(shared);
    f32 *const own = shared, *const others = own + ROWS_OF_TILE, *const square = others + ROWS_OF_TILE;
    const Place place(queries, queries, heads, false);
    const u32 first = place.first;
    k += k_view.at(place.sample, keys, place.kv_head);
    v += v_view.at(place.sample, keys, place.kv_head);
    load_rows(own, q + q_view.at(place.sample, queries, place.head), q_view.stride, first, queries);
    Sums sums;
    clear(sums);
    f32 top[4], sum[4];
    for (u32 i = 0; i < 4; i++) {
        top[i] = LEAST;
        sum[i] = 0.0f;
    }
    // From the diagonal back. A row that sees no key of a tile forgets the tile with the first key that it sees.
    for (u32 tile = tiles_of_keys(PAST, first, queries, keys); tile-- > 0;) {
        __syncthreads();
        load_rows(others, k, k_view.stride, tile * TILE, keys);
        __syncthreads();
        Square scores;
        products(scores, own, others);
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            f32 greatest = top[i];
            const u32 last = min(PAST + first + row_of(i), keys - 1);
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const bool seen = tile * TILE + column_of(j) <= last;
                scores[i][j] = seen ? scores[i][j] * scale : LEAST;
                greatest = fmaxf(greatest, scores[i][j]);
            }
            greatest = row_max_of(greatest);
            const f32 factor = expf(top[i] - greatest);
            top[i] = greatest;
            sum[i] *= factor;
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                scores[i][j] = expf(scores[i][j] - greatest);
                sum[i] += scores[i][j];
                scores[i][j] *= of_key(MASK, place.sample, place.head, first_query + first + row_of(i),
                                       first_key + tile * TILE + column_of(j));
            }
            #pragma unroll
            for (u32 j = 0; j < PER_THREAD; j++) {
                sums[i][j] *= factor;
            }
        }
        keep(square, scores);
        __syncthreads();
        load_rows(others, v, v_view.stride, tile * TILE, keys);
        __syncthreads();
        add_products(sums, square, others);
    }
    for (u32 i = 0; i < 4; i++) {
        const f32 all = row_sum_of(sum[i]);
        const u32 row = first + row_of(i);
        if (threadIdx.x % SIDE == 0 && row < queries) {
            lse[place.rows_at + row] = top[i] + logf(all);
        }
        for (u32 j = 0; j < PER_THREAD; j++) {
            sums[i][j] /= all;
        }
    }
    store_rows(out + place.out_at, sums, 1.0f, false, place.channels, first, queries);
}

// dout [B, T, H·HEAD]; along [B, H, T]: Σ dout·out of each query and head.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_dq(const ACT *q, const ACT *k, const ACT *v, const ACT *out, const f32 *lse, const ACT *dout, OUT *dq_to,
             f32 *along, View dq_view, u32 adds, SIZES, f32 scale MASK_PARAMETERS) {
    SHARED_WORDS(shared);
    f32 *const own = shared, *const douts = own + ROWS_OF_TILE, *const others = douts + ROWS_OF_TILE;
    f32 *const values = others + ROWS_OF_TILE, *const square = values + ROWS_OF_TILE;
    const Place place(queries, queries, heads, false);
    const u32 first = place.first;
    k += k_view.at(place.sample, keys, place.kv_head);
    v += v_view.at(place.sample, keys, place.kv_head);
    const u64 rows_at = place.rows_at;
    load_rows(own, q + q_view.at(place.sample, queries, place.head), q_view.stride, first, queries);
    load_rows(douts, dout + place.out_at, place.channels, first, queries);
    load_rows(others, out + place.out_at, place.channels, first, queries);
    __syncthreads();
    f32 row_along[4], row_lse[4];
    for (u32 i = 0; i < 4; i++) {
        const u32 row = row_of(i);
        f32 x = 0.0f;
        for (u32 channel = threadIdx.x % SIDE; channel < HEAD; channel += SIDE) {
            x = fmaf(douts[row * STRIDE + channel], others[row * STRIDE + channel], x);
        }
        row_along[i] = row_sum_of(x);
        const bool there = first + row < queries;
        row_lse[i] = there ? lse[rows_at + first + row] : 0.0f;
        if (threadIdx.x % SIDE == 0 && there) {
            along[rows_at + first + row] = row_along[i];
        }
    }
    Sums dq;
    clear(dq);
    const u32 tiles = tiles_of_keys(PAST, first, queries, keys);
    for (u32 tile = 0; tile < tiles; tile++) {
        __syncthreads();
        load_rows(others, k, k_view.stride, tile * TILE, keys);
        load_rows(values, v, v_view.stride, tile * TILE, keys);
        __syncthreads();
        Square scores, dscores;
        products(scores, own, others);
        products(dscores, douts, values);
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 last = min(PAST + first + row_of(i), keys - 1);
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const bool seen = tile * TILE + column_of(j) <= last;
                const f32 p = seen ? expf(scores[i][j] * scale - row_lse[i]) : 0.0f;
                const f32 factor = of_key(MASK, place.sample, place.head, first_query + first + row_of(i),
                                          first_key + tile * TILE + column_of(j));
                dscores[i][j] = seen ? p * (dscores[i][j] * factor - row_along[i]) : 0.0f;
            }
        }
        keep(square, dscores);
        __syncthreads();
        add_products(dq, square, others);
    }
    store_rows(dq_to + dq_view.at(place.sample, queries, place.head), dq, scale, adds, dq_view.stride, first,
               queries);
}

// Gradients of keys and values: sums over the heads that share them, in their order; `along` as `attention_dq`
// left it.
extern "C" __global__ void __launch_bounds__(THREADS)
attention_dkv(const ACT *q, const ACT *k, const ACT *v, const f32 *lse, const ACT *dout, OUT *dk_to, OUT *dv_to,
              const f32 *along, View dk_view, View dv_view, u32 adds, SIZES, f32 scale MASK_PARAMETERS) {
    SHARED_WORDS(shared);
    f32 *const own = shared, *const values = own + ROWS_OF_TILE, *const others = values + ROWS_OF_TILE;
    f32 *const douts = others + ROWS_OF_TILE, *const square = douts + ROWS_OF_TILE;
    const Place place(queries, keys, heads, true);
    const u32 first = place.first, tiles = (queries + TILE - 1) / TILE;
    q += q_view.at(place.sample, queries, place.head);
    load_rows(own, k + k_view.at(place.sample, keys, place.kv_head), k_view.stride, first, keys);
    load_rows(values, v + v_view.at(place.sample, keys, place.kv_head), v_view.stride, first, keys);
    Sums dk, dv;
    clear(dk);
    clear(dv);
    #pragma unroll 1
    for (u32 member = 0; member < HEADS_PER_KV; member++) {
        const ACT *d = dout + place.out_at + member * HEAD;
        const u64 rows_at = place.rows_at + (u64)member * queries;
        for (u32 tile = first > PAST ? (first - PAST) / TILE : 0; tile < tiles; tile++) {
            __syncthreads();
            load_rows(others, q + member * HEAD, q_view.stride, tile * TILE, queries);
            load_rows(douts, d, place.channels, tile * TILE, queries);
            __syncthreads();
            Square scores, dscores;
            products(scores, own, others);
            products(dscores, values, douts);
            #pragma unroll
            for (u32 j = 0; j < 4; j++) {
                const u32 query = tile * TILE + column_of(j);
                const f32 query_lse = query < queries ? lse[rows_at + query] : 0.0f;
                const f32 query_along = query < queries ? along[rows_at + query] : 0.0f;
                #pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const bool seen = query < queries && first + row_of(i) <= PAST + query;
                    const f32 factor = of_key(MASK, place.sample, place.head + member, first_query + query,
                                              first_key + first + row_of(i));
                    scores[i][j] = seen ? expf(scores[i][j] * scale - query_lse) : 0.0f;
                    dscores[i][j] = seen ? scores[i][j] * (dscores[i][j] * factor - query_along) : 0.0f;
                    scores[i][j] *= factor;
                }
            }
            keep(square, scores);
            __syncthreads();
            add_products(dv, square, douts);
            __syncthreads();
            keep(square, dscores);
            __syncthreads();
            add_products(dk, square, others);
        }
    }
    store_rows(dk_to + dk_view.at(place.sample, keys, place.kv_head), dk, scale, adds, dk_view.stride, first, keys);
    store_rows(dv_to + dv_view.at(place.sample, keys, place.kv_head), dv, 1.0f, adds, dv_view.stride, first, keys);
}
