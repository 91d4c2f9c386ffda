// What normalisations are written in: rows of CHANNELS elements, each in the registers of ROW_THREADS threads, a warp or
// a block.

#include "element.cuh"

constexpr u32 BLOCK = ROW_THREADS == WARP ? 256 : ROW_THREADS;
constexpr u32 ROWS = BLOCK / ROW_THREADS;
constexpr u32 ROW_PACKS = CHANNELS / VEC;
constexpr int PACKS = (ROW_PACKS + ROW_THREADS - 1) / ROW_THREADS;
constexpr f32 SHARE = 1.0f / (f32)CHANNELS;

// What a thread has of a row: packs `lane`, `lane + ROW_THREADS`, …
struct Row {
    Pack<ACT, VEC> packs[PACKS];

    static __device__ __forceinline__ u32 lane() { return threadIdx.x % ROW_THREADS; }
    static __device__ __forceinline__ bool has(int k) { return lane() + k * ROW_THREADS < ROW_PACKS; }
    static __device__ __forceinline__ u32 channel(int k) { return (lane() + k * ROW_THREADS) * VEC; }

    __device__ __forceinline__ void load(const ACT *row) {
        #pragma unroll
        for (int k = 0; k < PACKS; k++) {
            if (has(k)) {
                packs[k].load(row + channel(k));
            }
        }
    }
};

// What a thread has of N arrays of sums over rows.
template <int N> struct Sums {
    f32 of[N][PACKS][VEC] = {};
};

// Shared memory for the sums of a block.
template <int N> constexpr u32 GATHERED = ROWS == 1 ? 1 : N * CHANNELS;

// Writes a block's sums, [N, CHANNELS]. Its rows lie ROWS by ROWS with its warps: their sums are added in the order of
// the warps.
template <int N> __device__ __forceinline__ void store_sums(f32 *to, const Sums<N> &sums, f32 *gathered) {
    for (u32 turn = 0; turn < ROWS; turn++) {
        if (threadIdx.x / ROW_THREADS == turn) {
            #pragma unroll
            for (int k = 0; k < PACKS; k++) {
                #pragma unroll
                for (int i = 0; i < VEC; i++) {
                    if (Row::has(k)) {
                        const u32 channel = Row::channel(k) + i;
                        #pragma unroll
                        for (int n = 0; n < N; n++) {
                            if (ROWS == 1) {
                                to[n * CHANNELS + channel] = sums.of[n][k][i];
                            } else if (turn == 0) {
                                gathered[n * CHANNELS + channel] = sums.of[n][k][i];
                            } else {
                                gathered[n * CHANNELS + channel] += sums.of[n][k][i];
                            }
                        }
                    }
                }
            }
        }
        if (ROWS > 1) {
            __syncthreads();
        }
    }
    if (ROWS > 1) {
        for (u32 i = threadIdx.x; i < N * CHANNELS; i += BLOCK) {
            to[i] = gathered[i];
        }
    }
}
