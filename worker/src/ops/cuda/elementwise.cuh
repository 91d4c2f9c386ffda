// Kernels that treat each element alone: `UNROLL` packs of `VEC` elements a thread, all loaded before the first is
// used, then what is left of `n`, element by element.

#include "element.cuh"

constexpr u32 THREADS = 256;

// `Body` has a `State<N>` of N elements, `load(state, at)` and `finish(state, at)`.
template <int UNROLL, class Body> __device__ __forceinline__ void each_pack(const Body &body, u64 n) {
    const u64 packs = n / VEC;
    const u64 first = (u64)blockIdx.x * (THREADS * UNROLL) + threadIdx.x;
    typename Body::template State<VEC> states[UNROLL];
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        const u64 pack = first + k * THREADS;
        if (pack < packs) {
            body.load(states[k], pack * VEC);
        }
    }
    #pragma unroll
    for (int k = 0; k < UNROLL; k++) {
        const u64 pack = first + k * THREADS;
        if (pack < packs) {
            body.finish(states[k], pack * VEC);
        }
    }
    const u64 rest = packs * VEC + threadIdx.x;
    if (VEC > 1 && blockIdx.x == 0 && rest < n) {
        typename Body::template State<1> state;
        body.load(state, rest);
        body.finish(state, rest);
    }
}
