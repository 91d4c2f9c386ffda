// Where the kernels of attention in training find their rows. Queries, keys and values are views of one buffer or of
// several. The queries of a sample may be fewer than its keys: row `i` of them sees the keys up to row `past + i`.
//
// Given by the compiler's command line: `HEAD` channels of a head, `HEADS_PER_KV` where heads of queries share keys and
// values: how many.

#ifndef HEADS_PER_KV
#define HEADS_PER_KV 1
#endif

// Rows of a buffer, `stride` elements apart, without a gap between samples; of each the heads from element `offset` on.
struct View {
    u32 offset, stride;

    // First element of a head of a sample. Each sample has `rows` rows.
    __device__ __forceinline__ u64 at(u32 sample, u32 rows, u32 head) const {
        return (u64)sample * rows * stride + offset + head * HEAD;
    }
};

// Of all kernels: views of queries, keys and values, how many rows a sample has of queries and of keys, the positions
// of their first ones, and the heads of queries.
#define SIZES View q_view, View k_view, View v_view, u32 queries, u32 keys, u32 first_query, u32 first_key, u32 heads
// Keys before that of the first query.
#define PAST (first_query - first_key)
