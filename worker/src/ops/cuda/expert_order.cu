// Slots in the order of (expert, slot): a block an expert, which reads all slots. Integers only.
//
// Bytes: 4 a slot for each expert, from the cache; the time is that of the launches.

#include "element.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / WARP;

// counts[e]: the slots of expert `e`, at most `capacity`.
extern "C" __global__ void __launch_bounds__(THREADS)
sort_counts(const int *experts, int *counts, int *, int *, int *, u32 slots, u32, u32 capacity) {
    __shared__ u32 warps[WARPS];
    u32 count = 0;
    for (u32 slot = threadIdx.x; slot < slots; slot += THREADS) {
        count += (u32)experts[slot] == blockIdx.x ? 1u : 0u;
    }
    count = row_sum<THREADS>(count, warps);
    if (threadIdx.x == 0) {
        counts[blockIdx.x] = (int)min(count, capacity);
    }
}

// offsets [E + 1], order [room]: the slot of each row, rows: the row of each slot. The last block writes what lies behind
// the last row.
extern "C" __global__ void __launch_bounds__(THREADS)
sort_rows(const int *experts, const int *counts, int *offsets, int *order, int *rows, u32 slots, u32 room,
          u32 capacity) {
    __shared__ u32 warps[WARPS];
    const u32 expert = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 first = 0;
    for (u32 before = threadIdx.x; before < expert; before += THREADS) {
        first += (u32)counts[before];
    }
    first = row_sum<THREADS>(first, warps);
    if (threadIdx.x == 0) {
        offsets[expert] = (int)first;
    }
    if (expert + 1 == gridDim.x) {
        for (u32 row = first + threadIdx.x; row < room; row += THREADS) {
            order[row] = -1;
        }
        return;
    }
    u32 place = 0;
    for (u32 start = 0; start < slots; start += THREADS) {
        const u32 slot = start + threadIdx.x;
        const bool is_own = slot < slots && (u32)experts[slot] == expert;
        const u32 own = __ballot_sync(ALL_LANES, is_own);
        // Who still reads the sums of the last round must be done.
        __syncthreads();
        if (lane == 0) {
            warps[warp] = __popc(own);
        }
        __syncthreads();
        u32 at = place + __popc(own & ((1u << lane) - 1));
        for (u32 w = 0; w < WARPS; w++) {
            at += w < warp ? warps[w] : 0;
            place += warps[w];
        }
        if (is_own) {
            rows[slot] = at < capacity ? (int)(first + at) : -1;
            if (at < capacity) {
                order[first + at] = (int)slot;
            }
        }
    }
}
