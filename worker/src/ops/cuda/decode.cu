// Attention of new positions over a cache of keys and values, in f32 arithmetic.
//
// Given by the compiler's command line: `ACT`, `HEAD` channels of a head, `HEADS` query heads that a block serves with
// the keys and values that it reads, `VEC`.
// Bytes: of the cache what is seen, once a query and (heads that share it) / HEADS. FLOP: 4·HEAD a (query, key) pair.

#include "element.cuh"

constexpr u32 KEYS = 128; // of a block, one a thread
constexpr u32 COPYING = 256;
constexpr u32 PART = HEAD + 2; // sums of values, the greatest score, the sum of exponentials
// Of a score that does not count.
constexpr f32 LEAST = -3.402823466e38f;

// To keys and values [B, capacity, KV, HEAD], from place `first_position` on, those of qkv [B, T, (H + 2·KV)·HEAD]; of
// each n = B·T·KV·HEAD elements.
extern "C" __global__ void __launch_bounds__(COPYING)
cache_append(const ACT *qkv, ACT *keys, ACT *values, u32 positions, u32 heads, u32 kv_heads, u32 capacity,
             u32 first_position, u64 n) {
    const u64 at = ((u64)blockIdx.x * COPYING + threadIdx.x) * VEC;
    if (at >= n) {
        return;
    }
    const u32 width = kv_heads * HEAD;
    const u64 row = at / width;
    const u32 channel = (u32)(at - row * width);
    const u64 sample = row / positions, position = row % positions;
    const ACT *from = qkv + row * (heads * HEAD + 2 * width) + heads * HEAD + channel;
    const u64 to = (sample * capacity + first_position + position) * width + channel;
    Pack<ACT, VEC> key, value;
    key.load(from);
    value.load(from + width);
    key.store(keys + to);
    value.store(values + to);
}

// parts [B·T·H, splits, PART]: of the block's KEYS keys the numbers that `attention_join` puts together. Blocks count
// splits first, then groups of HEADS query heads, then rows.
extern "C" __global__ void __launch_bounds__(KEYS)
attention_decode(const ACT *qkv, const ACT *keys, const ACT *values, f32 *parts, u32 positions, u32 heads, u32 kv_heads,
                 u32 capacity, u32 first_position, u32 splits, f32 scale) {
    __shared__ f32 queries[HEADS * HEAD];
    __shared__ f32 weights[HEADS][KEYS];
    __shared__ f32 warps[KEYS / WARP];
    const u32 split = blockIdx.x % splits, groups = heads / HEADS;
    const u32 head = blockIdx.x / splits % groups * HEADS;
    const u32 row = blockIdx.x / splits / groups;
    const u32 sample = row / positions, width = kv_heads * HEAD;
    // What the query sees: all keys before it and its own.
    const u32 end = first_position + row % positions + 1, first = split * KEYS;
    const u32 seen = first < end ? min(KEYS, end - first) : 0;
    const u64 cached = ((u64)sample * capacity + first) * width + head / (heads / kv_heads) * HEAD;
    keys += cached, values += cached;
    qkv += (u64)row * (heads * HEAD + 2 * width) + head * HEAD;
    parts += ((u64)row * heads + head) * splits * PART + split * PART;
    for (u32 at = threadIdx.x; at < HEADS * HEAD; at += KEYS) {
        f32 x[1];
        load(x, qkv + at);
        queries[at] = x[0];
    }
    __syncthreads();

    f32 scores[HEADS] = {};
    if (threadIdx.x < seen) {
        for (u32 channel = 0; channel < HEAD; channel += VEC) {
            f32 x[VEC];
            load(x, keys + (u64)threadIdx.x * width + channel);
            #pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                #pragma unroll
                for (u32 i = 0; i < VEC; i++) {
                    scores[h] = fmaf(x[i], queries[h * HEAD + channel + i], scores[h]);
                }
            }
        }
    }
    #pragma unroll
    for (u32 h = 0; h < HEADS; h++) {
        const bool counts = threadIdx.x < seen;
        const f32 score = counts ? scores[h] * scale : LEAST;
        const f32 top = row_max<KEYS>(score, warps);
        const f32 weight = counts ? expf(score - top) : 0.0f;
        const f32 sum = row_sum<KEYS>(weight, warps);
        weights[h][threadIdx.x] = weight;
        if (threadIdx.x == 0) {
            parts[(u64)h * splits * PART + HEAD] = top;
            parts[(u64)h * splits * PART + HEAD + 1] = sum;
        }
    }
    __syncthreads();

    for (u32 channel = threadIdx.x; channel < HEAD; channel += KEYS) {
        f32 sums[HEADS] = {};
        #pragma unroll 8
        for (u32 key = 0; key < seen; key++) {
            f32 x[1];
            load(x, values + (u64)key * width + channel);
            #pragma unroll
            for (u32 h = 0; h < HEADS; h++) {
                sums[h] = fmaf(weights[h][key], x[0], sums[h]);
            }
        }
        #pragma unroll
        for (u32 h = 0; h < HEADS; h++) {
            parts[(u64)h * splits * PART + channel] = sums[h];
        }
    }
}

// out [B, T, H·HEAD], a block a row and head: the parts of the keys, in their order.
extern "C" __global__ void __launch_bounds__(KEYS) attention_join(const f32 *parts, ACT *out, u32 splits) {
    parts += (u64)blockIdx.x * splits * PART;
    f32 top = LEAST, all = 0.0f;
    for (u32 split = 0; split < splits; split++) {
        top = fmaxf(top, parts[(u64)split * PART + HEAD]);
    }
    for (u32 split = 0; split < splits; split++) {
        const f32 *part = parts + (u64)split * PART;
        all = fmaf(part[HEAD + 1], expf(part[HEAD] - top), all);
    }
    for (u32 channel = threadIdx.x; channel < HEAD; channel += KEYS) {
        f32 sum[1] = {0.0f};
        for (u32 split = 0; split < splits; split++) {
            const f32 *part = parts + (u64)split * PART;
            sum[0] = fmaf(part[channel], expf(part[HEAD] - top), sum[0]);
        }
        sum[0] /= all;
        store(out + (u64)blockIdx.x * HEAD + channel, sum);
    }
}
