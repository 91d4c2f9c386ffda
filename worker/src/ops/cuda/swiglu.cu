// SwiGLU: silu(gate)·up = gate·σ(gate)·up; rows of [gate, up], two stretches of `channels` elements.
//
// Bytes an element of the output, of s bytes: forward 3s; backward 6s (three numbers read and written).

#include "elementwise.cuh"

__device__ __forceinline__ f32 sigmoid(f32 x) {
    // Beyond this e⁻ˣ is no number any more; σ is 0 there.
    const f32 e = exponential<ACT>(fminf(-x, 87.0f));
    return Same<ACT>::bf16 ? __fdividef(1.0f, 1.0f + e) : 1.0f / (1.0f + e);
}

// Where the gate of an output's element lies; `channels` further is what it lets through.
__device__ __forceinline__ u64 gate_at(u64 at, u32 channels) { return at + at / channels * channels; }

struct Forward {
    const ACT *inp;
    ACT *out;
    u32 channels;

    template <int N> struct State {
        Pack<ACT, N> gate, up;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        const u64 from = gate_at(at, channels);
        state.gate.load(inp + from);
        state.up.load(inp + from + channels);
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 gate[N], up[N];
        state.gate.get(gate);
        state.up.get(up);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            up[i] *= gate[i] * sigmoid(gate[i]);
        }
        store(out + at, up);
    }
};

// inp [R, 2F], out [R, F]; channels = F, n = R·F.
extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_forward(const ACT *inp, ACT *out, u32 channels, u64 n) {
    each_pack<1>(Forward{inp, out, channels}, n);
}

struct Backward {
    ACT *inp_dinp;
    ACT *dout_out;
    u32 channels;

    template <int N> struct State {
        Pack<ACT, N> gate, up, d;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        const u64 from = gate_at(at, channels);
        state.gate.load(inp_dinp + from);
        state.up.load(inp_dinp + from + channels);
        state.d.load(dout_out + at);
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 gate[N], up[N], d[N];
        state.gate.get(gate);
        state.up.get(up);
        state.d.get(d);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            const f32 share = sigmoid(gate[i]), silu = gate[i] * share;
            const f32 slope = share * (1.0f + gate[i] * (1.0f - share));
            const f32 out = silu * up[i];
            gate[i] = d[i] * up[i] * slope;
            up[i] = d[i] * silu;
            d[i] = out;
        }
        const u64 to = gate_at(at, channels);
        store(inp_dinp + to, gate);
        store(inp_dinp + to + channels, up);
        store(dout_out + at, d);
    }
};

// inp becomes dinp, dout becomes out, both in place.
extern "C" __global__ void __launch_bounds__(THREADS)
swiglu_backward(ACT *inp_dinp, ACT *dout_out, u32 channels, u64 n) {
    each_pack<1>(Backward{inp_dinp, dout_out, channels}, n);
}
