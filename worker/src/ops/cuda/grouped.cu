// A linear layer of each expert over its rows, and the gradient of its weights; in f32 arithmetic, without tensor cores. A
// block makes a tile of 64 × 64 and finds its expert by the offsets; a thread makes 4 × 4 elements, each summed in one
// order whatever the tile.
//
// Bytes: each operand once for every tile that needs it.

#include "element.cuh"

constexpr u32 THREADS = 256;
constexpr u32 TILE = 64;
constexpr u32 DEPTH = 16;
constexpr u32 SIDE = 4;
// Two blocks of a processor: for more, the compiler would put registers into memory.

// A part of an operand: DEPTH of the inner dimension by TILE.
typedef f32 Panel[DEPTH][TILE];

// A matrix in memory: element (i, d) of the outer and the inner dimension.
struct Operand {
    const ACT *start;
    u64 outer_stride, inner_stride;
    // Elements from `start` on; the rest is 0.
    u32 outer, inner;

    __device__ __forceinline__ void load_panel(Panel &panel, u32 first) const {
        for (u32 i = threadIdx.x; i < DEPTH * TILE; i += THREADS) {
            // Neighbours in memory for neighbouring threads.
            const u32 d = inner_stride == 1 ? i % DEPTH : i / TILE, o = inner_stride == 1 ? i / DEPTH : i % TILE;
            f32 value[1] = {};
            if (o < outer && first + d < inner) {
                load(value, start + o * outer_stride + (first + d) * inner_stride);
            }
            panel[d][o] = value[0];
        }
    }
};

// sum[i][j] += Σ_d left(4·y + i, d)·right(4·x + j, d)
__device__ __forceinline__ void
multiply(f32 (&sum)[SIDE][SIDE], const Operand &left, const Operand &right, Panel &a, Panel &b) {
    const u32 x = threadIdx.x % (TILE / SIDE), y = threadIdx.x / (TILE / SIDE);
    for (u32 first = 0; first < left.inner; first += DEPTH) {
        left.load_panel(a, first);
        right.load_panel(b, first);
        __syncthreads();
        for (u32 d = 0; d < DEPTH; d++) {
            #pragma unroll
            for (u32 i = 0; i < SIDE; i++) {
                #pragma unroll
                for (u32 j = 0; j < SIDE; j++) {
                    sum[i][j] += a[d][y * SIDE + i] * b[d][x * SIDE + j];
                }
            }
        }
        __syncthreads();
    }
}

// Writes a tile, or adds it to what is there.
template <class T>
__device__ __forceinline__ void
store_tile(T *out, const f32 (&sum)[SIDE][SIDE], u32 height, u32 width, u64 stride, bool accumulate) {
    const u32 x = threadIdx.x % (TILE / SIDE), y = threadIdx.x / (TILE / SIDE);
    for (u32 i = 0; i < SIDE; i++) {
        for (u32 j = 0; j < SIDE; j++) {
            const u32 row = y * SIDE + i, column = x * SIDE + j;
            if (row < height && column < width) {
                T *const at = out + row * stride + column;
                f32 value[1] = {};
                if (accumulate) {
                    load(value, at);
                }
                value[0] += sum[i][j];
                store(at, value);
            }
        }
    }
}

// inp [M, I], weight [G, I, O] or [G, O, I], offsets [G + 1], out [M, O]. Rows behind the last one become 0.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
grouped_linear(const ACT *inp, const ACT *weight, const int *offsets, ACT *out, u32 rows, u32 groups, u32 inputs,
               u32 outputs, u32 is_out_in) {
    __shared__ Panel a, b;
    u32 tile = blockIdx.x, group = 0, first = 0, end = 0;
    for (; group <= groups; group++) {
        first = (u32)offsets[group];
        end = group == groups ? rows : (u32)offsets[group + 1];
        const u32 tiles = (end - first + TILE - 1) / TILE;
        if (tile < tiles) {
            break;
        }
        tile -= tiles;
    }
    if (group > groups) {
        return;
    }
    first += tile * TILE;
    const u32 column = blockIdx.y * TILE;
    f32 sum[SIDE][SIDE] = {};
    if (group < groups) {
        const ACT *const own = weight + (u64)group * inputs * outputs;
        const Operand left = {inp + (u64)first * inputs, inputs, 1, end - first, inputs};
        const Operand right = is_out_in ? Operand{own + (u64)column * inputs, inputs, 1, outputs - column, inputs}
                                        : Operand{own + column, 1, outputs, outputs - column, inputs};
        multiply(sum, left, right, a, b);
    }
    store_tile(out + (u64)first * outputs + column, sum, end - first, outputs - column, outputs, false);
}

// lhs [M, H], rhs [M, W], out [G, H, W]: Σ lhsᵀ·rhs over the rows of group `blockIdx.z`, in their order.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
grouped_dweight(const ACT *lhs, const ACT *rhs, const int *offsets, GRAD *out, u32 height, u32 width, u32 accumulate) {
    __shared__ Panel a, b;
    const u32 group = blockIdx.z, row = blockIdx.x * TILE, column = blockIdx.y * TILE;
    const u32 first = (u32)offsets[group], count = (u32)offsets[group + 1] - first;
    const Operand left = {lhs + (u64)first * height + row, 1, height, height - row, count};
    const Operand right = {rhs + (u64)first * width + column, 1, width, width - column, count};
    f32 sum[SIDE][SIDE] = {};
    multiply(sum, left, right, a, b);
    GRAD *const own = out + ((u64)group * height + row) * width + column;
    store_tile(own, sum, height - row, width - column, width, accumulate != 0);
}
