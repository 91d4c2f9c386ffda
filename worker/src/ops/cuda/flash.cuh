// What the flash attention kernels are written in: bf16 tiles in shared memory, and fragments of them for tensor cores.
//
// Given by the compiler's command line: `HEAD` channels of a head (32, 64, 128), `WARPS` of a block, `ROW_TILES` of 16
// rows that a warp owns, `STEP` rows of the other operand that a block loads at once, `DROPOUT` where probabilities are
// dropped, `OUT` where results are not bf16 but f32, `HEADS_PER_KV` where heads of queries share keys and values: how many.
//
// A tile is `[rows, HEAD]`, in chunks of 16 bytes. Chunks of a row change places by the row's number, so that the eight
// rows that `ldmatrix` reads together lie in different banks.

#ifndef OUT
#define OUT bf16
#endif

#include "tensor_core.cuh"
#include "dropout.cuh"
#include "heads.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int WARP_ROWS = 16 * ROW_TILES;
constexpr int BLOCK_ROWS = WARPS * WARP_ROWS;
constexpr int CHUNKS = HEAD / 8;
constexpr u32 ROW_BYTES = 2 * HEAD;
constexpr u32 STEP_BYTES = STEP * ROW_BYTES;
constexpr f32 LOG2_E = 1.4426950408889634f;
constexpr f32 LN_2 = 0.6931471805599453f;

// Bytes from a tile's start to a chunk.
__device__ __forceinline__ u32 chunk_at(u32 row, u32 chunk) {
    const u32 turn = HEAD == 32 ? (row >> 1) & 3 : row & 7;
    return row * ROW_BYTES + ((chunk ^ turn) << 4);
}

// Rows `row..row + 16`, channels `16k..16k + 16` of a tile, as a left operand.
__device__ __forceinline__ void load_left(u32 (&to)[4], u32 tile, u32 row, u32 k) {
    const u32 lane = threadIdx.x % 32;
    load_matrices(to, tile + chunk_at(row + lane % 16, 2 * k + lane / 16));
}

// Rows `row..row + 16` as columns, channels `16k..16k + 16` as the summed index, of a right operand: the first eight
// columns in `to[0], to[1]`, the others in `to[2], to[3]`.
__device__ __forceinline__ void load_right(u32 (&to)[4], u32 tile, u32 row, u32 k) {
    const u32 lane = threadIdx.x % 32;
    load_matrices(to, tile + chunk_at(row + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
}

// Rows `row..row + 16` as the summed index, channels `16n..16n + 16` as columns, of a right operand.
__device__ __forceinline__ void load_right_transposed(u32 (&to)[4], u32 tile, u32 row, u32 n) {
    const u32 lane = threadIdx.x % 32;
    load_matrices_transposed(to, tile + chunk_at(row + lane % 16, 2 * n + lane / 16));
}

// Rows `first..first + ROWS` of a matrix in memory; zeros from row `end` on.
template <int ROWS> __device__ __forceinline__ void load_tile(u32 tile, const bf16 *from, u32 stride, u32 first, u32 end) {
    static_assert(ROWS * CHUNKS % THREADS == 0, "threads share the chunks of a tile evenly");
    #pragma unroll
    for (int k = 0; k < ROWS * CHUNKS / THREADS; k++) {
        const u32 row = (threadIdx.x + k * THREADS) / CHUNKS, chunk = threadIdx.x % CHUNKS;
        const bool valid = first + row < end;
        copy_chunk(tile + chunk_at(row, chunk), from + (u64)(valid ? first + row : 0) * stride + chunk * 8, valid);
    }
}

// The sums of a warp's rows, through its rows of a tile that nobody else reads, to rows `first + ..` of a matrix in
// memory, or added to what is there.
__device__ __forceinline__ void
store_rows(f32 (&sums)[ROW_TILES][CHUNKS][4], u32 tile, bf16 *to, bool adds, u32 stride, u32 first, u32 end) {
    const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 * WARP_ROWS;
    __syncwarp();
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            #pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 at = tile + chunk_at(row + 16 * m + 8 * half + lane / 4, n) + lane % 4 * 4;
                const u32 both = narrow(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
                store_word(at, both);
            }
        }
    }
    __syncwarp();
    #pragma unroll
    for (int k = 0; k < WARP_ROWS * CHUNKS / 32; k++) {
        const u32 r = row + (lane + 32 * k) / CHUNKS, chunk = lane % CHUNKS;
        Pack<bf16, 8> x{load_chunk(tile + chunk_at(r, chunk))};
        if (first + r < end) {
            bf16 *const at = to + (u64)(first + r) * stride + chunk * 8;
            if (adds) {
                f32 own[8], sum[8];
                x.get(own);
                load(sum, at);
                #pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[i] += own[i];
                }
                x.set(sum);
            }
            store_chunk(at, x.raw);
        }
    }
}

// The same in f32: two numbers beside each other of each thread. The tile is not used.
__device__ __forceinline__ void
store_rows(f32 (&sums)[ROW_TILES][CHUNKS][4], u32, f32 *to, bool adds, u32 stride, u32 first, u32 end) {
    const u32 lane = threadIdx.x % 32, row = first + threadIdx.x / 32 * WARP_ROWS + lane / 4;
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int n = 0; n < CHUNKS; n++) {
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                const u32 r = row + 16 * m + i / 2 * 8;
                if (r < end) {
                    f32 *const at = to + (u64)r * stride + 8 * n + lane % 4 * 2 + i % 2;
                    *at = adds ? *at + sums[m][n][i] : sums[m][n][i];
                }
            }
        }
    }
}

// Multiplies numbers of queries (rows) and keys (columns) by their factors. `query` is the position of row 0 of the
// warp, `key` that of column 0, a multiple of 16.
template <int COLUMNS, class M>
__device__ __forceinline__ void
drop(f32 (&numbers)[ROW_TILES][COLUMNS][4], const M &mask, u32 sample, u32 head, u32 query, u32 key) {
    const u32 lane = threadIdx.x % 32;
    #pragma unroll
    for (int m = 0; m < ROW_TILES; m++) {
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            #pragma unroll
            for (int n = 0; n < COLUMNS; n += 2) {
                f32 factors[4];
                const u32 row = query + 16 * m + 8 * half + lane / 4;
                of_group(factors, mask, sample, head, row, (key / 8 + n) * 2 + lane % 4);
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    numbers[m][n + i / 2][2 * half + i % 2] *= factors[i];
                }
            }
        }
    }
}

// One head of one sample, and a place in the order of its tiles.
struct Work {
    u32 pair;  // sample · heads + head, of queries or of keys
    u32 order; // 0 is the tile with the most work
};

// Blocks start in order of their index. The longest go first, so that the short ones fill what is left at the end; but
// only within a group of heads whose keys and values stay in the L2 cache.
__device__ __forceinline__ Work work_of(u32 pairs, u32 tiles, u32 group) {
    const u32 first = blockIdx.x / (group * tiles) * group;
    const u32 rest = blockIdx.x - first * tiles;
    const u32 width = first + group < pairs ? group : pairs - first;
    return Work{first + rest % width, rest / width};
}
