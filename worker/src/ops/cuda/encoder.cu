// From tokens to channels and back; the gradient of the token embedding is in token_backward.cu.
//
// Bytes: encoder_forward reads B·T rows of `wte`, the positions once (they stay in the cache) and writes B·T rows;
// position_backward reads B·T rows and writes the positions.

#include "element.cuh"

constexpr u32 THREADS = 256;

// out[b, t] = wte[tokens[b, t] − first] + wpe[t]; wpe may be null. The row of a token that is not one of the `held` from
// `first` on is −0: another rank has it. A thread makes VEC channels. Tokens are checked where they enter; one that is
// outside the whole vocabulary all the same gives NaN, which the loss shows, and reads no row of a token.
extern "C" __global__ void __launch_bounds__(THREADS)
encoder_forward(const int *tokens, const ACT *wte, const ACT *wpe, ACT *out, u32 rows, u32 channels, u32 positions,
                u32 first, u32 held, u32 vocab) {
    const u32 packs = channels / VEC;
    const u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (u64)rows * packs) {
        return;
    }
    const u64 row = index / packs;
    const u32 channel = (u32)(index % packs) * VEC;
    const u32 token = (u32)tokens[row];
    f32 sum[VEC];
    if (token - first < held) {
        load(sum, wte + (u64)(token - first) * channels + channel);
    } else {
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum[i] = token < vocab ? -0.0f : __uint_as_float(0x7fffffffu);
        }
    }
    if (wpe) {
        f32 position[VEC];
        load(position, wpe + (row % positions) * channels + channel);
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum[i] += position[i];
        }
    }
    store(out + row * channels + channel, sum);
}

// dwpe[first + t] = Σ_b dout[b, t], samples in order, or added to what is there; dout [stretches, samples, positions, channels],
// of stretches that begin at `first` and perhaps at `second`. Other positions get 0. A thread makes VEC channels of one
// position.
extern "C" __global__ void __launch_bounds__(THREADS)
position_backward(const ACT *dout, GRAD *dwpe, u32 samples, u32 channels, u32 positions, u32 known, u32 first, u32 second,
                  u32 accumulate) {
    const u32 packs = channels / VEC;
    const u64 index = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (u64)known * packs) {
        return;
    }
    const u32 position = (u32)(index / packs), channel = (u32)(index % packs) * VEC;
    const u64 at = (u64)position * channels + channel;
    f32 sum[VEC] = {};
    if (accumulate) {
        load(sum, dwpe + at);
    }
    // Positions before a stretch wrap around.
    const u32 late = position - first < positions ? 0 : 1, row = position - (late ? second : first);
    if (row < positions) {
        const ACT *const rows = dout + ((u64)late * samples * positions + row) * channels + channel;
        #pragma unroll 4
        for (u32 sample = 0; sample < samples; sample++) {
            f32 d[VEC];
            load(d, rows + (u64)sample * positions * channels);
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                sum[i] += d[i];
            }
        }
    }
    store(dwpe + at, sum);
}
