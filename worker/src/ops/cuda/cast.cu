// Conversion between element types, rounded to nearest even; FROM and TO are f32 or bf16.
//
// Bytes: what is read and what is written, once each.

#include "elementwise.cuh"

struct Convert {
    const FROM *x;
    TO *out;

    template <int N> struct State {
        Pack<FROM, N> x;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const { state.x.load(x + at); }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 values[N];
        state.x.get(values);
        store(out + at, values);
    }
};

// out[i] = x[i]
extern "C" __global__ void __launch_bounds__(THREADS) cast(const FROM *x, TO *out, u64 n) {
    each_pack<2>(Convert{x, out}, n);
}
