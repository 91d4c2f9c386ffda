// Rows of tokens in the order of (token, row): a stable radix sort, 8 bits a pass, so that each token's rows lie
// together and are added in one order whatever the schedule. Integers only.
//
// Bytes: a few reads and writes of 4·B·T bytes a pass; the time is that of the launches.

#include "element.cuh"

constexpr u32 THREADS = 256;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 DIGITS = 256;
// Rows of a block: each warp takes a run of STEPS·32.
constexpr u32 STEPS = 4;
constexpr u32 SLAB = THREADS * STEPS;

// The digit of the row at a place of the last pass's order. What is none of the `held` tokens from `first` on sorts behind
// all that are.
__device__ __forceinline__ u32
digit_at(const int *tokens, const u32 *order, u32 place, u32 first, u32 held, u32 shift, u32 &row) {
    row = order ? order[place] : place;
    return (min((u32)tokens[row] - first, held) >> shift) % DIGITS;
}

// counts[digit, slab]: how many rows of the slab have the digit.
extern "C" __global__ void __launch_bounds__(THREADS)
digit_count(const int *tokens, const u32 *order, u32 *counts, u32 rows, u32 slabs, u32 first, u32 held, u32 shift) {
    __shared__ u32 found[DIGITS];
    found[threadIdx.x] = 0;
    __syncthreads();
    for (u32 i = 0; i < STEPS; i++) {
        const u32 place = blockIdx.x * SLAB + i * THREADS + threadIdx.x;
        if (place < rows) {
            u32 row;
            atomicAdd(&found[digit_at(tokens, order, place, first, held, shift, row)], 1u);
        }
    }
    __syncthreads();
    counts[threadIdx.x * slabs + blockIdx.x] = found[threadIdx.x];
}

constexpr u32 SCAN_THREADS = 1024;

// counts[i] becomes the sum of all before i. One block.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) digit_scan(u32 *counts, u32 count) {
    __shared__ u32 sums[SCAN_THREADS / WARP];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    u32 before = 0;
    for (u32 first = 0; first < count; first += SCAN_THREADS) {
        const u32 i = first + threadIdx.x;
        const u32 own = i < count ? counts[i] : 0;
        u32 sum = own;
        for (u32 distance = 1; distance < WARP; distance *= 2) {
            const u32 lower = __shfl_up_sync(ALL_LANES, sum, distance);
            sum += lane >= distance ? lower : 0;
        }
        // Who still reads the sums of the last round must be done.
        __syncthreads();
        if (lane == WARP - 1) {
            sums[warp] = sum;
        }
        __syncthreads();
        u32 round = 0;
        for (u32 w = 0; w < SCAN_THREADS / WARP; w++) {
            sum += w < warp ? sums[w] : 0;
            round += sums[w];
        }
        if (i < count) {
            counts[i] = before + sum - own;
        }
        before += round;
    }
}

// sorted: the rows of `order` (none: 0, 1, …), stably sorted by the digit.
extern "C" __global__ void __launch_bounds__(THREADS)
digit_scatter(const int *tokens, const u32 *order, const u32 *counts, u32 *sorted, u32 rows, u32 slabs, u32 first,
              u32 held, u32 shift) {
    __shared__ u32 found[WARPS][DIGITS];
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for (u32 w = 0; w < WARPS; w++) {
        found[w][threadIdx.x] = 0;
    }
    __syncthreads();
    u32 row[STEPS], digit[STEPS], rank[STEPS];
    for (u32 i = 0; i < STEPS; i++) {
        const u32 place = blockIdx.x * SLAB + (warp * STEPS + i) * WARP + lane;
        const bool there = place < rows;
        digit[i] = there ? digit_at(tokens, order, place, first, held, shift, row[i]) : DIGITS - 1;
        // The lanes with the same digit; those beyond the last row are nobody's.
        u32 peers = __ballot_sync(ALL_LANES, there);
        for (u32 bit = 1; bit < DIGITS; bit *= 2) {
            const u32 set = __ballot_sync(ALL_LANES, (digit[i] & bit) != 0);
            peers &= digit[i] & bit ? set : ~set;
        }
        const u32 lower = peers & ((1u << lane) - 1);
        rank[i] = there ? found[warp][digit[i]] + __popc(lower) : 0;
        __syncwarp();
        if (there && lower == 0) {
            found[warp][digit[i]] += __popc(peers);
        }
        __syncwarp();
    }
    __syncthreads();
    u32 before = counts[threadIdx.x * slabs + blockIdx.x];
    for (u32 w = 0; w < WARPS; w++) {
        const u32 count = found[w][threadIdx.x];
        found[w][threadIdx.x] = before;
        before += count;
    }
    __syncthreads();
    for (u32 i = 0; i < STEPS; i++) {
        if (blockIdx.x * SLAB + (warp * STEPS + i) * WARP + lane < rows) {
            sorted[found[warp][digit[i]] + rank[i]] = row[i];
        }
    }
}
