// Sums over rows in two stages, both in a fixed order: the gradients of biases, and of LayerNorm's gain and bias. A
// single row is added, or copied, in one: a part of the gradients to what is there of them. And the way there: a bias, and
// a residual, added to rows.
//
// Bytes: column_partials reads R·C elements once and writes SLABS·C f32; add_partials reads these again, from the
// cache. single_row reads and writes C elements, and reads what it adds to. add_bias_residual reads and writes R·C
// elements, and reads the residual.

#include "elementwise.cuh"

constexpr u32 WARPS = THREADS / WARP;
constexpr u32 WIDTH = WARP * VEC;

// partials[slab, c] = Σ x[r, c] over the slab's rows. Block (i, slab) takes columns i·WIDTH …, a warp every eighth row.
extern "C" __global__ void __launch_bounds__(THREADS)
column_partials(const ACT *x, f32 *partials, u32 rows, u32 columns, u32 slab_rows) {
    __shared__ f32 gathered[WARPS][WIDTH];
    const u32 warp = threadIdx.x / WARP;
    const u32 within = threadIdx.x % WARP * VEC;
    const u32 column = blockIdx.x * WIDTH + within;
    const u32 end = min((blockIdx.y + 1) * slab_rows, rows);
    f32 sum[VEC] = {};
    if (column < columns) {
        #pragma unroll 4
        for (u32 row = blockIdx.y * slab_rows + warp; row < end; row += WARPS) {
            f32 value[VEC];
            load(value, x + (u64)row * columns + column);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                sum[i] += value[i];
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        gathered[warp][within + i] = sum[i];
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < WIDTH; i += THREADS) {
        const u32 target = blockIdx.x * WIDTH + i;
        if (target < columns) {
            f32 total = gathered[0][i];
            for (u32 w = 1; w < WARPS; w++) {
                total += gathered[w][i];
            }
            partials[(u64)blockIdx.y * columns + target] = total;
        }
    }
}

constexpr u32 STRIPES = 32;

// first[c] = Σ_p partials[p, c], and second[c] = Σ_p partials[p, C + c] where there is a second; or added to what is
// there. A block takes 32 columns; stripe s adds parts s, s + 32, …, then the stripes are added in order.
extern "C" __global__ void __launch_bounds__(WARP * STRIPES)
add_partials(const f32 *partials, GRAD *first, GRAD *second, u32 parts, u32 columns, u32 accumulate_first,
             u32 accumulate_second) {
    __shared__ f32 gathered[STRIPES][WARP];
    const u32 total = second ? 2 * columns : columns;
    const u32 lane = threadIdx.x % WARP, stripe = threadIdx.x / WARP;
    const u32 column = blockIdx.x * WARP + lane;
    f32 sum = 0.0f;
    if (column < total) {
        #pragma unroll 8
        for (u32 part = stripe; part < parts; part += STRIPES) {
            sum += partials[(u64)part * total + column];
        }
    }
    gathered[stripe][lane] = sum;
    __syncthreads();
    if (stripe == 0 && column < total) {
        for (u32 s = 1; s < STRIPES; s++) {
            sum += gathered[s][lane];
        }
        GRAD *out = column < columns ? first + column : second + (column - columns);
        if (column < columns ? accumulate_first : accumulate_second) {
            f32 before[1];
            load(before, out);
            sum += before[0];
        }
        const f32 value[1] = {sum};
        store(out, value);
    }
}

struct SingleRow {
    const ACT *x;
    GRAD *out;
    bool accumulate;

    template <int N> struct State {
        Pack<ACT, N> x;
        Pack<GRAD, N> before;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        state.x.load(x + at);
        if (accumulate) {
            state.before.load(out + at);
        }
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 values[N];
        state.x.get(values);
        if (accumulate) {
            f32 before[N];
            state.before.get(before);
            #pragma unroll
            for (int i = 0; i < N; i++) {
                values[i] += before[i];
            }
        }
        store(out + at, values);
    }
};

// out[c] = x[c], or added to what is there
extern "C" __global__ void __launch_bounds__(THREADS) single_row(const ACT *x, GRAD *out, u64 n, u32 accumulate) {
    each_pack<2>(SingleRow{x, out, accumulate != 0}, n);
}

struct AddBiasResidual {
    const ACT *inp, *bias, *residual;
    ACT *out;
    u32 columns;

    template <int N> struct State {
        Pack<ACT, N> x, bias, residual;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        state.x.load(inp + at);
        if (bias) {
            state.bias.load(bias + at % columns);
        }
        if (residual) {
            state.residual.load(residual + at);
        }
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 values[N];
        state.x.get(values);
        add(values, state.bias, bias != nullptr);
        add(values, state.residual, residual != nullptr);
        store(out + at, values);
    }

    template <int N> static __device__ __forceinline__ void add(f32 (&to)[N], const Pack<ACT, N> &pack, bool there) {
        if (there) {
            f32 terms[N];
            pack.get(terms);
            #pragma unroll
            for (int i = 0; i < N; i++) {
                to[i] += terms[i];
            }
        }
    }
};

// out[r, c] = (inp[r, c] + bias[c]) + residual[r, c]; bias and residual may be null, and inp may be out.
extern "C" __global__ void __launch_bounds__(THREADS)
add_bias_residual(const ACT *inp, const ACT *bias, const ACT *residual, ACT *out, u32 columns, u64 n) {
    each_pack<1>(AddBiasResidual{inp, bias, residual, out, columns}, n);
}
