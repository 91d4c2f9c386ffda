// Rows moved to the order of experts and back, or from one order into another. The rows of a token are added in the order of
// its slots.
//
// Bytes of a row of C elements of s bytes: index_rows K reads and a write of C·s; combine_backward two reads and a write.

#include "element.cuh"

constexpr u32 THREADS = 256;

// out[m] = Σ_k weights[m, k]·inp[index[m, k] / per], or added to what is there; −1 adds nothing. Without index, row m of inp;
// weights may be null too. Of `from` and `to` elements of a row, the last `channels`. A thread makes VEC of them.
extern "C" __global__ void __launch_bounds__(THREADS)
index_rows(u32 rows, u32 channels, u32 top_k, u32 per, const ACT *inp, const int *index, const f32 *weights, ACT *out,
           u32 from, u32 to, u32 accumulate) {
    const u32 packs = channels / VEC;
    const u64 pack = (u64)blockIdx.x * THREADS + threadIdx.x;
    if (pack >= (u64)rows * packs) {
        return;
    }
    const u64 row = pack / packs, channel = pack % packs * VEC;
    ACT *const own = out + row * to + to - channels + channel;
    f32 sum[VEC] = {};
    if (accumulate) {
        load(sum, own);
    }
    for (u64 slot = row * top_k; slot < (row + 1) * top_k; slot++) {
        const u32 source = index ? (u32)index[slot] : (u32)slot;
        if ((int)source >= 0) {
            f32 x[VEC];
            load(x, inp + (u64)(source / per) * from + from - channels + channel);
            const f32 weight = weights ? weights[slot] : 1.0f;
            #pragma unroll
            for (int i = 0; i < VEC; i++) {
                sum[i] += x[i] * weight;
            }
        }
    }
    store(own, sum);
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
