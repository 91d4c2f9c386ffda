// The masks of dropout: Philox4x32-10 (Salmon et al. 2011), with the counters that `ops/dropout.rs` describes.
//
// Attention is compiled with `DROPOUT` where it has a mask; without it, factors are 1, and the machine code is that of
// kernels that know no mask.

struct Mask {
    u64 key, first_sample;
    u32 first;     // row of the residual stream, or head of attention, that is the first here
    u32 threshold; // words below it drop their number
    f32 scale;     // of the numbers that stay

    __device__ __forceinline__ void words(u32 (&to)[4], u32 in_batch, u32 head, u32 row, u32 group) const {
        const u64 sample = first_sample + in_batch;
        u32 a = (u32)sample, b = ((u32)(sample >> 32) & 0xffffu) | head << 16, c = row, d = group;
        u32 key0 = (u32)key, key1 = (u32)(key >> 32);
        #pragma unroll
        for (int round = 0; round < 10; round++) {
            const u64 left = (u64)0xD2511F53u * a, right = (u64)0xCD9E8D57u * c;
            a = (u32)(right >> 32) ^ b ^ key0;
            c = (u32)(left >> 32) ^ d ^ key1;
            b = (u32)right;
            d = (u32)left;
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        to[0] = a, to[1] = b, to[2] = c, to[3] = d;
    }

    __device__ __forceinline__ f32 factor(u32 word) const { return word < threshold ? 0.0f : scale; }
};

// One of four, without an address.
template <class T> __device__ __forceinline__ T chosen(const T (&of)[4], u32 i) {
    const T low = i % 2 ? of[1] : of[0], high = i % 2 ? of[3] : of[2];
    return i / 2 ? high : low;
}

#ifdef DROPOUT
#define MASK_PARAMETERS , u64 mask_key, u64 first_sample, u32 first_head, u32 threshold, f32 mask_scale
constexpr bool HAS_MASK = true;
#define MASK Mask{mask_key, first_sample, first_head, threshold, mask_scale}
#else
#define MASK_PARAMETERS
constexpr bool HAS_MASK = false;
#define MASK NoMask{}
#endif

struct NoMask {};

// The factors of one query and four keys: of 16 keys, group `g` has keys 2g, 2g + 1, 2g + 8, 2g + 9, which one thread
// of a tensor core holds.
__device__ __forceinline__ void
of_group(f32 (&factors)[4], const Mask &mask, u32 in_batch, u32 head, u32 query, u32 group) {
    u32 words[4];
    mask.words(words, in_batch, mask.first + head, query, group);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        factors[i] = mask.factor(words[i]);
    }
}

__device__ __forceinline__ void of_group(f32 (&factors)[4], const NoMask &, u32, u32, u32, u32) {
    factors[0] = factors[1] = factors[2] = factors[3] = 1.0f;
}

// The factor of one query and key.
__device__ __forceinline__ f32 of_key(const Mask &mask, u32 in_batch, u32 head, u32 query, u32 key) {
    f32 factors[4];
    of_group(factors, mask, in_batch, head, query, key / 16 * 4 + key % 8 / 2);
    return chosen(factors, key % 2 + key / 8 % 2 * 2);
}

__device__ __forceinline__ f32 of_key(const NoMask &, u32, u32, u32, u32) { return 1.0f; }
