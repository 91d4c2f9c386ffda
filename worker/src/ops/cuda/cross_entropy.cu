// Softmax and cross-entropy over rows of logits; ROW_THREADS threads, a warp or a block, share a row.
//
// Bytes a row of V elements of s bytes: V·s read; with the gradient V·s written too. For that the row is read again, from
// the caches: 100 KB where V is 50,304 in bf16, and the rows in flight are few. A row may start anywhere: it is cut into a
// head up to the next 16 bytes, packs, and a tail.

#include "element.cuh"

constexpr u32 BLOCK = ROW_THREADS == WARP ? 256 : ROW_THREADS;
constexpr u32 ROWS = BLOCK / ROW_THREADS;
constexpr u32 PACK = 16 / sizeof(ACT);

// A row of `vocab` logits, as its threads see it.
struct Logits {
    ACT *row;
    u32 head, packs, vocab;

    __device__ __forceinline__ Logits(ACT *row, u32 vocab) : row(row), vocab(vocab) {
        const u32 past = (u32)((u64)row % 16) / sizeof(ACT);
        head = min(past == 0 ? 0 : PACK - past, vocab);
        packs = (vocab - head) / PACK;
    }
};

// The elements of 16 bytes.
struct Words {
    uint4 raw;

    __device__ __forceinline__ void get(f32 (&out)[PACK]) const {
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        #pragma unroll
        for (u32 i = 0; i < PACK; i++) {
            out[i] = !Same<ACT>::bf16 ? __uint_as_float(words[i % 4])
                     : i % 2 == 0     ? widen_low(words[i / 2 % 4])
                                      : widen_high(words[i / 2 % 4]);
        }
    }

    __device__ __forceinline__ void set(const f32 (&x)[PACK]) {
        u32 words[4];
        #pragma unroll
        for (u32 i = 0; i < 4; i++) {
            words[i] = Same<ACT>::bf16 ? narrow(x[2 * i % PACK], x[(2 * i + 1) % PACK]) : __float_as_uint(x[i]);
        }
        raw = make_uint4(words[0], words[1], words[2], words[3]);
    }
};

// A maximum, and the sum of e^(x − maximum), of the elements seen so far. It starts at the least finite number, so
// that the difference of two infinities appears only where the row has one.
struct Softmax {
    f32 max = -3.402823466e38f;
    f32 sum = 0.0f;

    template <u32 N> __device__ __forceinline__ void add(const f32 (&x)[N]) {
        f32 greatest = max;
        #pragma unroll
        for (u32 i = 0; i < N; i++) {
            greatest = fmaxf(greatest, x[i]);
        }
        sum *= exponential<ACT>(max - greatest);
        max = greatest;
        #pragma unroll
        for (u32 i = 0; i < N; i++) {
            sum += exponential<ACT>(x[i] - max);
        }
    }
};

__device__ __forceinline__ f32 element(const ACT *at) {
    f32 value[1];
    load(value, at);
    return value[0];
}

// ln Σ e^x over a row, the same in all its threads.
__device__ __forceinline__ f32 log_sum(const Logits &logits, f32 *warps) {
    const u32 lane = threadIdx.x % ROW_THREADS;
    Softmax softmax;
    const uint4 *body = reinterpret_cast<const uint4 *>(logits.row + logits.head);
    #pragma unroll 4
    for (u32 pack = lane; pack < logits.packs; pack += ROW_THREADS) {
        Words words{body[pack]};
        f32 x[PACK];
        words.get(x);
        softmax.add(x);
    }
    // At most PACK − 1 elements each, fewer than the threads of a row.
    const u32 tail = logits.head + logits.packs * PACK;
    if (lane < logits.head) {
        const f32 x[1] = {element(logits.row + lane)};
        softmax.add(x);
    }
    if (lane < logits.vocab - tail) {
        const f32 x[1] = {element(logits.row + tail + lane)};
        softmax.add(x);
    }
    const f32 max = row_max<ROW_THREADS>(softmax.max, warps);
    const f32 sum = row_sum<ROW_THREADS>(softmax.sum * exponential<ACT>(softmax.max - max), warps);
    return max + logf(sum);
}

// logits[v] = e^(logits[v] − lse)·factor − [v = target]·factor; zeros where the target is negative.
__device__ __forceinline__ void differentiate(const Logits &logits, int target, f32 lse, f32 factor) {
    const u32 lane = threadIdx.x % ROW_THREADS;
    const bool ignored = target < 0;
    const auto gradient = [&](f32 x, u32 at) -> f32 {
        const f32 d = exponential<ACT>(x - lse) * factor - (at == (u32)target ? factor : 0.0f);
        return ignored ? 0.0f : d;
    };
    uint4 *body = reinterpret_cast<uint4 *>(logits.row + logits.head);
    #pragma unroll 4
    for (u32 i = lane; i < logits.packs; i += ROW_THREADS) {
        // What was read last is the likeliest to be in a cache.
        const u32 pack = logits.packs - 1 - i;
        Words words{body[pack]};
        f32 x[PACK];
        words.get(x);
        #pragma unroll
        for (u32 k = 0; k < PACK; k++) {
            x[k] = gradient(x[k], logits.head + pack * PACK + k);
        }
        words.set(x);
        body[pack] = words.raw;
    }
    const u32 tail = logits.head + logits.packs * PACK;
    if (lane < logits.head) {
        const f32 x[1] = {gradient(element(logits.row + lane), lane)};
        store(logits.row + lane, x);
    }
    if (lane < logits.vocab - tail) {
        const f32 x[1] = {gradient(element(logits.row + tail + lane), tail + lane)};
        store(logits.row + tail + lane, x);
    }
}

// Targets are checked where they enter; one beyond the vocabulary all the same gives NaN and reads nothing.
__device__ __forceinline__ f32 logit_of(const Logits &logits, int target) {
    return (u32)target < logits.vocab ? element(logits.row + target) : __uint_as_float(0x7fffffffu);
}

// losses[r] = ln Σ_v e^logits[r, v] − logits[r, targets[r]], 0 where the target is negative. With dlosses, logits become
// dlogits, in place.
extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy(ACT *logits, const int *targets, f32 *losses, const f32 *dlosses, u32 rows, u32 vocab) {
    __shared__ f32 warps[BLOCK / WARP];
    const u32 row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= rows) {
        return;
    }
    const Logits its(logits + (u64)row * vocab, vocab);
    const int target = targets[row];
    const f32 chosen = logit_of(its, target);
    const f32 lse = log_sum(its, warps);
    if (threadIdx.x % ROW_THREADS == 0) {
        losses[row] = target < 0 ? 0.0f : lse - chosen;
    }
    if (dlosses == nullptr) {
        return;
    }
    // Nobody overwrites what another thread of the row has still to read.
    if (ROW_THREADS == WARP) {
        __syncwarp();
    } else {
        __syncthreads();
    }
    differentiate(its, target, lse, dlosses[row]);
}
