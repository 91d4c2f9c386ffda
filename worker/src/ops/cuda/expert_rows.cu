// Rows moved to the order of experts and back. The rows of a token are added in the order of its slots.
//
// Bytes of a row of C elements of s bytes: gather_rows K reads and a write of C·s; combine_backward two reads and a write.

#include "element.cuh"

constexpr u32 THREADS = 256;

// out[m] = Σ_k weights[m, k]·inp[index[m, k] / per], or added to what is there; −1 adds nothing, and weights may be null. A
// thread makes VEC channels.
extern "C" __global__ void __launch_bounds__(THREADS)
gather_rows(u32 rows, u32 channels, u32 top_k, u32 per, const ACT *inp, const int *index, const f32 *weights, ACT *out,
            u32 accumulate) {
    const u32 packs = channels / VEC;
    const u64 pack = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (pack >= (u64)rows * packs) {
        return;
    }
    const u64 row = pack / packs, channel = pack % packs * VEC;
    f32 sum[VEC] = {};
    if (accumulate) {
        load(sum, out + row * channels + channel);
    }
    for (u64 slot = row * top_k; slot < (row + 1) * top_k; slot++) {
        if (index[slot] >= 0) {
            f32 x[VEC];
            load(x, inp + (u64)((u32)index[slot] / per) * channels + channel);
            const f32 weight = weights ? weights[slot] : 1.0f;
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                sum[i] += x[i] * weight;
            }
        }
    }
    store(out + row * channels + channel, sum);
}

// inp[m] becomes weights[slots[m]]·dout[slots[m] / K], 0 where the slot is −1; dweights[slots[m]] = inp[m]·dout[slots[m] / K].
// A warp a row.
extern "C" __global__ void __launch_bounds__(THREADS)
combine_backward(u32 rows, u32 channels, u32 top_k, u32, const ACT *dout, const int *slots, const f32 *weights, ACT *inp,
                 f32 *dweights) {
    const u32 lane = threadIdx.x % WARP, row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) {
        return;
    }
    const int slot = slots[row];
    const f32 weight = slot < 0 ? 0.0f : weights[slot];
    const ACT *const d = dout + (slot < 0 ? 0 : (u64)((u32)slot / top_k) * channels);
    ACT *const own = inp + (u64)row * channels;
    f32 sum = 0.0f;
    for (u32 channel = lane * VEC; channel < channels; channel += WARP * VEC) {
        f32 x[VEC] = {}, of_out[VEC] = {};
        if (slot >= 0) {
            load(x, own + channel);
            load(of_out, d + channel);
        }
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            sum += x[i] * of_out[i];
            of_out[i] *= weight;
        }
        store(own + channel, of_out);
    }
    sum = warp_sum(sum);
    if (lane == 0 && slot >= 0) {
        dweights[slot] = sum;
    }
}
