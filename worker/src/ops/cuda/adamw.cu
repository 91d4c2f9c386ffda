// The AdamW update of f32 master weights and moments, by gradients of type GRAD, with a bf16 copy of the result if
// COPY is 1. One launch for elements that decay and elements that do not: a table, an argument by value, says which.
//
// Bytes an element: 12 + gradient read, 12 + 2 (copy) written: 28 in both precisions.

#include "elementwise.cuh"

struct Factors {
    f32 scale;
    f32 beta1, share1, correction1;
    f32 beta2, share2, correction2;
    f32 eps, lr, weight_decay;
};

// Starts and ends of what does not decay, in order: `count` of BOUNDS, each a multiple of VEC or the end of all.
struct Spared {
    u64 count;
    u64 bounds[BOUNDS];

    // By the number of bounds at or before an element: even where it decays.
    __device__ __forceinline__ bool decays(u64 at) const {
        u32 low = 0, high = (u32)count;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (bounds[middle] <= at) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low % 2 == 0;
    }
};

struct Update {
    f32 *param;
    const GRAD *grad;
    f32 *m;
    f32 *v;
    bf16 *copy;
    Factors f;
    const Spared &spared;

    template <int N> struct State {
        Pack<f32, N> p, m, v;
        Pack<GRAD, N> g;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        state.g.load(grad + at);
        state.m.load(m + at);
        state.v.load(v + at);
        state.p.load(param + at);
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 p[N], g[N], first[N], second[N];
        state.p.get(p);
        state.g.get(g);
        state.m.get(first);
        state.v.get(second);
        const f32 weight_decay = spared.decays(at) ? f.weight_decay : 0.0f;
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const f32 gradient = g[i] * f.scale;
            first[i] = f.beta1 * first[i] + f.share1 * gradient;
            second[i] = f.beta2 * second[i] + f.share2 * gradient * gradient;
            const f32 update = first[i] * f.correction1 / (sqrtf(second[i] * f.correction2) + f.eps);
            p[i] -= f.lr * (update + weight_decay * p[i]);
        }
        store(param + at, p);
        store(m + at, first);
        store(v + at, second);
#if COPY
        store(copy + at, p);
#endif
    }
};

// A factor that is not finite, the sign of a step to be skipped, leaves everything as it was.
extern "C" __global__ void __launch_bounds__(THREADS)
adamw(f32 *param, const GRAD *grad, f32 *m, f32 *v, bf16 *copy, const f32 *scale, f32 beta1, f32 share1,
      f32 correction1, f32 beta2, f32 share2, f32 correction2, f32 eps, f32 lr, f32 weight_decay, u64 n, const __grid_constant__ Spared spared) {
    const f32 factor = *scale;
    if (!(fabsf(factor) <= 3.402823466e38f)) {
        return;
    }
    const Factors factors{factor, beta1, share1, correction1, beta2, share2, correction2, eps, lr, weight_decay};
    each_pack<1>(Update{param, grad, m, v, copy, factors, spared}, n);
}
