// Constants. `fill` writes n elements; `scale` reads and writes n elements.

#include "elementwise.cuh"

constexpr u32 BYTES = 16;

// The bytes of `pattern`, again and again; 16 at once where `out` starts at a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS) fill(unsigned char *out, u64 pattern, u64 bytes) {
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * BYTES;
    if (VEC > 1 && at + BYTES <= bytes) {
        const u32 low = (u32)pattern, high = (u32)(pattern >> 32);
        *reinterpret_cast<uint4 *>(out + at) = make_uint4(low, high, low, high);
        return;
    }
    for (u64 byte = at; byte < bytes && byte < at + BYTES; byte++) {
        out[byte] = (unsigned char)(pattern >> 8 * (byte % 8));
    }
}

struct Multiply {
    ACT *x;
    f32 factor;

    template <int N> struct State {
        Pack<ACT, N> x;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const { state.x.load(x + at); }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 values[N];
        state.x.get(values);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            values[i] *= factor;
        }
        store(x + at, values);
    }
};

// x[i] *= factor
extern "C" __global__ void __launch_bounds__(THREADS) scale(ACT *x, f32 factor, u64 n) {
    each_pack<2>(Multiply{x, factor}, n);
}
