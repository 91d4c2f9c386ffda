// What every kernel is written in: element types, 16-byte accesses, reductions. No CUDA header is needed.
//
// `ACT` (activations, parameters) and `GRAD` (gradients of parameters) are `f32` or `bf16`; `VEC` elements, 8 or 1,
// are loaded and stored at once. They are given by the compiler's command line. Arithmetic is in f32.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef float f32;
typedef double f64;

// The upper half of an f32.
struct bf16 {
    unsigned short bits;
};

#ifndef VEC
#define VEC 8
#endif

// Shared memory of a block, as large as the launch says.
#ifdef __CUDA_ARCH__
#define SHARED_BYTES(name) extern __shared__ __align__(128) unsigned char name[]
#else
#define SHARED_BYTES(name) unsigned char *const name = dynamic_shared
#endif

constexpr u32 WARP = 32;
constexpr u32 ALL_LANES = 0xffffffffu;

template <class T> struct Same { static constexpr bool bf16 = false; };
template <> struct Same<bf16> { static constexpr bool bf16 = true; };

// Two f32 as two bf16, rounded to nearest even, the first in the lower half.
__device__ __forceinline__ u32 narrow(f32 low, f32 high) {
#ifdef __CUDA_ARCH__
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    const f32 in[2] = {low, high};
    u32 out[2];
    for (int i = 0; i < 2; i++) {
        const u32 bits = __float_as_uint(in[i]);
        const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
        out[i] = nan ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }
    return out[0] | out[1] << 16;
#endif
}

__device__ __forceinline__ f32 widen_low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ f32 widen_high(u32 both) { return __uint_as_float(both & 0xffff0000u); }

// `N` elements in registers as they lie in memory: half the registers of an f32 each where they are bf16.
template <class T, int N> struct Pack;

template <> struct Pack<f32, 1> {
    f32 raw;
    __device__ __forceinline__ void load(const f32 *from) { raw = *from; }
    __device__ __forceinline__ void store(f32 *to) const { *to = raw; }
    __device__ __forceinline__ void get(f32 (&out)[1]) const { out[0] = raw; }
    __device__ __forceinline__ void set(const f32 (&x)[1]) { raw = x[0]; }
};

template <> struct Pack<bf16, 1> {
    bf16 raw;
    __device__ __forceinline__ void load(const bf16 *from) { raw = *from; }
    __device__ __forceinline__ void store(bf16 *to) const { *to = raw; }
    __device__ __forceinline__ void get(f32 (&out)[1]) const { out[0] = widen_low(raw.bits); }
    __device__ __forceinline__ void set(const f32 (&x)[1]) { raw.bits = (unsigned short)narrow(x[0], 0.0f); }
};

template <> struct Pack<bf16, 8> {
    uint4 raw;
    __device__ __forceinline__ void load(const bf16 *from) { raw = *reinterpret_cast<const uint4 *>(from); }
    __device__ __forceinline__ void store(bf16 *to) const { *reinterpret_cast<uint4 *>(to) = raw; }
    __device__ __forceinline__ void get(f32 (&out)[8]) const {
        out[0] = widen_low(raw.x), out[1] = widen_high(raw.x);
        out[2] = widen_low(raw.y), out[3] = widen_high(raw.y);
        out[4] = widen_low(raw.z), out[5] = widen_high(raw.z);
        out[6] = widen_low(raw.w), out[7] = widen_high(raw.w);
    }
    __device__ __forceinline__ void set(const f32 (&x)[8]) {
        raw.x = narrow(x[0], x[1]), raw.y = narrow(x[2], x[3]);
        raw.z = narrow(x[4], x[5]), raw.w = narrow(x[6], x[7]);
    }
};

template <> struct Pack<f32, 8> {
    uint4 raw[2];
    __device__ __forceinline__ void load(const f32 *from) {
        const uint4 *words = reinterpret_cast<const uint4 *>(from);
        raw[0] = words[0], raw[1] = words[1];
    }
    __device__ __forceinline__ void store(f32 *to) const {
        uint4 *words = reinterpret_cast<uint4 *>(to);
        words[0] = raw[0], words[1] = raw[1];
    }
    __device__ __forceinline__ void get(f32 (&out)[8]) const {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            out[4 * i] = __uint_as_float(raw[i].x), out[4 * i + 1] = __uint_as_float(raw[i].y);
            out[4 * i + 2] = __uint_as_float(raw[i].z), out[4 * i + 3] = __uint_as_float(raw[i].w);
        }
    }
    __device__ __forceinline__ void set(const f32 (&x)[8]) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            raw[i].x = __float_as_uint(x[4 * i]), raw[i].y = __float_as_uint(x[4 * i + 1]);
            raw[i].z = __float_as_uint(x[4 * i + 2]), raw[i].w = __float_as_uint(x[4 * i + 3]);
        }
    }
};

template <class T, int N> __device__ __forceinline__ void load(f32 (&out)[N], const T *from) {
    Pack<T, N> pack;
    pack.load(from);
    pack.get(out);
}

template <class T, int N> __device__ __forceinline__ void store(T *to, const f32 (&x)[N]) {
    Pack<T, N> pack;
    pack.set(x);
    pack.store(to);
}

// eˣ: as exact as the storage can show.
template <class T> __device__ __forceinline__ f32 exponential(f32 x) {
    return Same<T>::bf16 ? __expf(x) : expf(x);
}

template <class T> __device__ __forceinline__ T warp_sum(T x) {
    #pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        x += __shfl_xor_sync(ALL_LANES, x, distance);
    }
    return x;
}

__device__ __forceinline__ f32 warp_max(f32 x) {
    #pragma unroll
    for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, distance));
    }
    return x;
}

// Sums over the `THREADS` threads that share a row: one warp, or the whole block. `warps` is shared memory for
// N numbers a warp.
template <u32 THREADS, int N, class T> __device__ __forceinline__ void row_sums(T (&x)[N], T *warps) {
    #pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = warp_sum(x[i]);
    }
    if (THREADS == WARP) {
        return;
    }
    // Who still reads the sums of the last call must be done.
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        #pragma unroll
        for (int i = 0; i < N; i++) {
            warps[threadIdx.x / WARP * N + i] = x[i];
        }
    }
    __syncthreads();
    // Numbers of f64 that are all read before they are added outgrow the registers of 1,024 threads.
    constexpr int AT_ONCE = sizeof(T) > 4 ? 8 : WARP;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = warps[i];
        #pragma unroll AT_ONCE
        for (u32 warp = 1; warp < THREADS / WARP; warp++) {
            x[i] += warps[warp * N + i];
        }
    }
}

template <u32 THREADS, class T> __device__ __forceinline__ T row_sum(T x, T *warps) {
    T sums[1] = {x};
    row_sums<THREADS>(sums, warps);
    return sums[0];
}

// The same for the maximum; NaN is passed over.
template <u32 THREADS> __device__ __forceinline__ f32 row_max(f32 x, f32 *warps) {
    x = warp_max(x);
    if (THREADS == WARP) {
        return x;
    }
    __syncthreads();
    if (threadIdx.x % WARP == 0) {
        warps[threadIdx.x / WARP] = x;
    }
    __syncthreads();
    f32 max = warps[0];
    for (u32 warp = 1; warp < THREADS / WARP; warp++) {
        max = fmaxf(max, warps[warp]);
    }
    return max;
}
