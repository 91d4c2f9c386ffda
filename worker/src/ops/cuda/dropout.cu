// Dropout: out = residual + mask · inp. Reads one or two arrays and writes one.

#include "elementwise.cuh"
#include "dropout.cuh"

struct Body {
    const ACT *inp, *residual;
    ACT *out;
    u32 positions, channels;
    Mask mask;

    template <int N> struct State {
        Pack<ACT, N> x, residual;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        state.x.load(inp + at);
        if (residual) {
            state.residual.load(residual + at);
        }
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        const u64 own_row = at / channels, row = mask.first + own_row;
        const u32 channel = (u32)(at - own_row * channels);
        const u32 sample = (u32)(row / positions), position = (u32)(row % positions);
        f32 x[N], add[N];
        u32 words[4];
        state.x.get(x);
        if (residual) {
            state.residual.get(add);
        }
        #pragma unroll
        for (int i = 0; i < N; i++) {
            if (i % 4 == 0) {
                mask.words(words, sample, 0, position, (channel + i) / 4);
            }
            x[i] *= mask.factor(N == 1 ? chosen(words, channel % 4) : words[i % 4]);
            if (residual) {
                x[i] += add[i];
            }
        }
        store(out + at, x);
    }
};

// inp, residual (or null), out [R, C]: rows `first_row..` of [B·T, C]; n = R·C.
extern "C" __global__ void __launch_bounds__(THREADS)
dropout(const ACT *inp, const ACT *residual, ACT *out, u32 positions, u32 channels, u64 key, u64 first_sample,
        u32 first_row, u32 threshold, f32 scale, u64 n) {
    const Mask mask{key, first_sample, first_row, threshold, scale};
    each_pack<1>(Body{inp, residual, out, positions, channels, mask}, n);
}
