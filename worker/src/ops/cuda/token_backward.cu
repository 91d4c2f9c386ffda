// The gradient of the token embedding, from rows sorted by token (token_sort.cu): no atomic additions, one order.
//
// Bytes: B·T rows read, without those of tokens that another rank holds; the rows of the tokens that occur read (where
// they are added to) and written.

#include "element.cuh"

constexpr u32 THREADS = 256;
// Places of the sorted order that a block adds up.
constexpr u32 PLACES = 16;
constexpr u32 NONE = 0xffffffffu;

// Tokens in their sorted order, counted from the first one that is held; `held` where it is not held here.
struct Sorted {
    const int *tokens;
    const u32 *order;
    u32 rows, first, held;

    __device__ __forceinline__ u32 at(u32 place) const {
        return place < rows ? min((u32)tokens[order[place]] - first, held) : NONE;
    }
};

// Adds to the row of a token, or overwrites it.
__device__ __forceinline__ void deliver(GRAD *dwte, const f32 (&sum)[VEC], bool accumulate) {
    f32 total[VEC] = {};
    if (accumulate) {
        load(total, dwte);
    }
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        total[i] += sum[i];
    }
    store(dwte, total);
}

// A run of one token that lies within a block's places goes to dwte. A run that crosses blocks leaves its sums in
// partials[block, 0] where it came from an earlier block, in partials[block, 1] where it begins.
extern "C" __global__ void __launch_bounds__(THREADS)
token_sum(const int *tokens, const u32 *order, const ACT *dout, GRAD *dwte, f32 *partials, u32 rows, u32 channels,
          u32 first_token, u32 held, u32 accumulate) {
    const u32 channel = (blockIdx.y * THREADS + threadIdx.x) * VEC;
    if (channel >= channels) {
        return;
    }
    const Sorted sorted{tokens, order, rows, first_token, held};
    const u32 first = blockIdx.x * PLACES;
    const u32 end = min(first + PLACES, rows);
    u32 token = sorted.at(first);
    // No token that is held comes after it.
    if (token >= held) {
        return;
    }
    bool begins = first == 0 || sorted.at(first - 1) != token;
    f32 sum[VEC] = {};
    #pragma unroll 4
    for (u32 place = first; place < end; place++) {
        f32 d[VEC];
        load(d, dout + (u64)order[place] * channels + channel);
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum[i] += d[i];
        }
        const u32 next = sorted.at(place + 1);
        const bool ends = next != token;
        if (ends || place + 1 == end) {
            if (begins && ends) {
                if (token < held) {
                    deliver(dwte + (u64)token * channels + channel, sum, accumulate != 0);
                }
            } else {
                store(partials + ((u64)blockIdx.x * 2 + (begins ? 1 : 0)) * channels + channel, sum);
            }
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                sum[i] = 0.0f;
            }
            token = next;
            begins = true;
        }
    }
}

// The run that begins in a block's places and crosses into later blocks: its partial sums, in order.
extern "C" __global__ void __launch_bounds__(THREADS)
token_join(const int *tokens, const u32 *order, const f32 *partials, GRAD *dwte, u32 rows, u32 channels,
           u32 first_token, u32 held, u32 accumulate) {
    const u32 channel = (blockIdx.y * THREADS + threadIdx.x) * VEC;
    const u32 first = blockIdx.x * PLACES;
    const u32 end = first + PLACES;
    if (channel >= channels || end >= rows) {
        return;
    }
    const Sorted sorted{tokens, order, rows, first_token, held};
    const u32 token = sorted.at(end - 1);
    const bool goes_on = sorted.at(end) == token;
    const bool begins = sorted.at(first) != token || first == 0 || sorted.at(first - 1) != token;
    if (!goes_on || !begins || token >= held) {
        return;
    }
    f32 sum[VEC];
    load(sum, partials + ((u64)blockIdx.x * 2 + 1) * channels + channel);
    u32 block = blockIdx.x;
    do {
        block++;
        f32 more[VEC];
        load(more, partials + (u64)block * 2 * channels + channel);
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum[i] += more[i];
        }
    } while (sorted.at((block + 1) * PLACES - 1) == token && sorted.at((block + 1) * PLACES) == token);
    deliver(dwte + (u64)token * channels + channel, sum, accumulate != 0);
}
