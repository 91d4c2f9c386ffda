// Softmax and cross-entropy over rows of logits; ROW_THREADS threads, a warp or a block, share a row.
//
// Bytes a row of V elements of s bytes: V·s read; with the gradient V·s written too. For that the row is read again, from
// the caches: 100 KB where V is 50,304 in bf16, and the rows in flight are few. A row may start anywhere: it is cut into a
// head up to the next 16 bytes, packs, and a tail.
//
// Where ranks hold a part of the logits each, the three numbers that `cross_entropy_partial` leaves of a part and row take
// the row's place: the parts are combined in their order (the online softmax of Milakov & Gimelshein 2018).

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

// The maximum and the sum of a row, the same in all its threads.
__device__ __forceinline__ Softmax softmax_of(const Logits &logits, f32 *warps) {
    const u32 lane = threadIdx.x % ROW_THREADS;
    Softmax softmax;
    const uint4 *body = reinterpret_cast<const uint4 *>(logits.row + logits.head);
    #pragma unroll 4
    for (u32 pack = lane; pack < logits.packs; pack += ROW_THREADS) {
        const Words words{body[pack]};
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
    return Softmax{max, sum};
}

// logits[v] = e^(logits[v] − lse)·factor − [first + v = target]·factor; zeros where the target is negative.
__device__ __forceinline__ void
differentiate(const Logits &logits, int target, u32 first, f32 lse, f32 factor) {
    const u32 lane = threadIdx.x % ROW_THREADS;
    const bool ignored = target < 0;
    const auto gradient = [&](f32 x, u32 at) -> f32 {
        const f32 d = exponential<ACT>(x - lse) * factor - (first + at == (u32)target ? factor : 0.0f);
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

// Targets are checked where they enter; one beyond the vocabulary all the same gives NaN and reads nothing. The logit that
// another part has is 0 here.
__device__ __forceinline__ f32 logit_of(const Logits &logits, int target, u32 first, u32 vocab) {
    const u32 at = (u32)target - first;
    if (at < logits.vocab) {
        return element(logits.row + at);
    }
    return (u32)target < vocab ? 0.0f : __uint_as_float(0x7fffffffu);
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
    const f32 chosen = logit_of(its, target, 0, vocab);
    const Softmax softmax = softmax_of(its, warps);
    const f32 lse = softmax.max + logf(softmax.sum);
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
    differentiate(its, target, 0, lse, dlosses[row]);
}

// statistics[r] = maximum, Σ e^(x − maximum), the target's logit or 0, of the `held` logits from `first` on; zeros where the
// target is negative.
extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy_partial(ACT *logits, const int *targets, f32 *statistics, u32 rows, u32 first, u32 held, u32 vocab) {
    __shared__ f32 warps[BLOCK / WARP];
    const u32 row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= rows) {
        return;
    }
    const int target = targets[row];
    f32 numbers[3] = {0.0f, 0.0f, 0.0f};
    if (target >= 0) {
        const Logits its(logits + (u64)row * held, held);
        const Softmax softmax = softmax_of(its, warps);
        numbers[0] = softmax.max, numbers[1] = softmax.sum, numbers[2] = logit_of(its, target, first, vocab);
    }
    if (threadIdx.x % ROW_THREADS == 0) {
        #pragma unroll
        for (u32 i = 0; i < 3; i++) {
            statistics[(u64)row * 3 + i] = numbers[i];
        }
    }
}

// losses[r] and, with dlosses, the gradients of the `held` logits from `first` on, from the statistics [parts, R, 3].
extern "C" __global__ void __launch_bounds__(BLOCK)
cross_entropy_combine(ACT *logits, const f32 *statistics, const int *targets, f32 *losses, const f32 *dlosses, u32 rows,
                      u32 parts, u32 first, u32 held) {
    const u32 row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS;
    if (row >= rows) {
        return;
    }
    const int target = targets[row];
    Softmax all;
    for (u32 part = 0; part < parts; part++) {
        all.max = fmaxf(all.max, statistics[((u64)part * rows + row) * 3]);
    }
    f32 chosen = 0.0f;
    for (u32 part = 0; part < parts; part++) {
        const f32 *numbers = statistics + ((u64)part * rows + row) * 3;
        all.sum += numbers[1] * expf(numbers[0] - all.max);
        chosen += numbers[2];
    }
    const f32 lse = all.max + logf(all.sum);
    if (threadIdx.x % ROW_THREADS == 0) {
        losses[row] = target < 0 ? 0.0f : lse - chosen;
    }
    if (dlosses != nullptr) {
        differentiate(Logits(logits + (u64)row * held, held), target, first, lse, dlosses[row]);
    }
}
