// GELU in the tanh form: ½x(1 + tanh u) = x·σ(2u), u = √(2/π)(x + 0.044715x³).
//
// Bytes an element of s bytes: forward 2s, backward 4s (two arrays read and written), or 3s without the output.

#include "elementwise.cuh"

constexpr f32 TWICE_ROOT = 1.5957691216057307f; // 2√(2/π)
constexpr f32 CUBIC = 0.044715f;

// σ(2u)
__device__ __forceinline__ f32 gate_of(f32 x) {
    const f32 w = x * (TWICE_ROOT + TWICE_ROOT * CUBIC * x * x);
    // Beyond this e⁻ʷ is no number any more; σ is 0 there.
    const f32 e = exponential<ACT>(fminf(-w, 87.0f));
    return Same<ACT>::bf16 ? __fdividef(1.0f, 1.0f + e) : 1.0f / (1.0f + e);
}

struct Forward {
    const ACT *inp;
    ACT *out;

    template <int N> struct State {
        Pack<ACT, N> x;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const { state.x.load(inp + at); }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 x[N];
        state.x.get(x);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] *= gate_of(x[i]);
        }
        store(out + at, x);
    }
};

// out[i] = gelu(inp[i])
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_forward(const ACT *inp, ACT *out, u64 n) {
    each_pack<2>(Forward{inp, out}, n);
}

struct Backward {
    ACT *inp_out;
    ACT *dout_dinp;
    bool makes_out;

    template <int N> struct State {
        Pack<ACT, N> x;
        Pack<ACT, N> d;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        state.x.load(inp_out + at);
        state.d.load(dout_dinp + at);
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 x[N], d[N];
        state.x.get(x);
        state.d.get(d);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const f32 gate = gate_of(x[i]);
            // d/dx x·σ(w) = σ + x·σ(1 − σ)·w′
            const f32 dw = TWICE_ROOT + 3.0f * TWICE_ROOT * CUBIC * x[i] * x[i];
            d[i] *= gate + x[i] * gate * (1.0f - gate) * dw;
            x[i] *= gate;
        }
        if (makes_out) {
            store(inp_out + at, x);
        }
        store(dout_dinp + at, d);
    }
};

// dout becomes dinp and, where that is wanted, inp becomes gelu(inp), both in place.
extern "C" __global__ void __launch_bounds__(THREADS)
gelu_backward(ACT *inp_out, ACT *dout_dinp, u32 makes_out, u64 n) {
    each_pack<1>(Backward{inp_out, dout_dinp, makes_out != 0}, n);
}
