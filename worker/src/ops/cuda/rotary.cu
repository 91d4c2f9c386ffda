// Rotary position embedding, in place, with the CPU's bits: operations that must not be fused are functions that the
// compiler does not fuse (`__dmul_rn`, …).
//
// Given by the compiler's command line: `ACT`, `HEAD` channels of a head, `VEC`.
// Bytes: 2s an element of queries and keys. FLOP in f64: about 40 a row and pair, for all heads.

#include "element.cuh"

constexpr u32 THREADS = 256;
constexpr u32 PAIRS = HEAD / 2;

// What each pair turns by a position, in 2⁻⁶⁴ of a turn.
struct Turns {
    u64 of_pair[PAIRS];
};

// Taylor's series of sin x / x and cos x in x², highest power first, as constants of the CPU's kernel.
__device__ __forceinline__ f64 add_term(f64 sum, f64 square, f64 coefficient) {
    return __dadd_rn(__dmul_rn(sum, square), coefficient);
}

// Cosine and sine of a fraction of a turn, rounded to f32.
__device__ __forceinline__ void cosine_and_sine(u64 turn, f32 &cosine_out, f32 &sine_out) {
    constexpr f64 RADIANS = 6.283185307179586 / 18446744073709551616.0;
    // The nearest quarter of a turn, and what remains: at most an eighth either way.
    const u64 quarter = (turn + (1ull << 61)) >> 62;
    const f64 rest = __dmul_rn((f64)(long long)(turn - (quarter << 62)), RADIANS);
    const f64 square = __dmul_rn(rest, rest);
    f64 sine = -1.0 / 1307674368000.0;
    sine = add_term(sine, square, 1.0 / 6227020800.0);
    sine = add_term(sine, square, -1.0 / 39916800.0);
    sine = add_term(sine, square, 1.0 / 362880.0);
    sine = add_term(sine, square, -1.0 / 5040.0);
    sine = add_term(sine, square, 1.0 / 120.0);
    sine = add_term(sine, square, -1.0 / 6.0);
    sine = __dmul_rn(add_term(sine, square, 1.0), rest);
    f64 cosine = 1.0 / 20922789888000.0;
    cosine = add_term(cosine, square, -1.0 / 87178291200.0);
    cosine = add_term(cosine, square, 1.0 / 479001600.0);
    cosine = add_term(cosine, square, -1.0 / 3628800.0);
    cosine = add_term(cosine, square, 1.0 / 40320.0);
    cosine = add_term(cosine, square, -1.0 / 720.0);
    cosine = add_term(cosine, square, 1.0 / 24.0);
    cosine = add_term(cosine, square, -1.0 / 2.0);
    cosine = add_term(cosine, square, 1.0);
    const f32 c = (f32)(quarter & 1 ? -sine : cosine), s = (f32)(quarter & 1 ? cosine : sine);
    cosine_out = quarter & 2 ? -c : c;
    sine_out = quarter & 2 ? -s : s;
}

// x [rows, stride], of which each row begins with `heads` heads of HEAD channels: pairs (i, i + HEAD/2) are rotated by
// the angle of the row's position, or back. A thread has VEC pairs of a row, of all heads.
extern "C" __global__ void __launch_bounds__(THREADS)
rotary(ACT *x, u32 rows, u32 positions, u32 heads, u32 stride, u64 first_position, u32 back,
       const __grid_constant__ Turns turns) {
    const u32 at = blockIdx.x * THREADS + threadIdx.x;
    const u32 row = at / (PAIRS / VEC), pair = at % (PAIRS / VEC) * VEC;
    if (row >= rows) {
        return;
    }
    f32 cosines[VEC], sines[VEC];
    #pragma unroll
    for (int i = 0; i < VEC; i++) {
        cosine_and_sine((first_position + row % positions) * turns.of_pair[pair + i], cosines[i], sines[i]);
        sines[i] = back ? -sines[i] : sines[i];
    }
    x += (u64)row * stride + pair;
    #pragma unroll 4
    for (u32 head = 0; head < heads; head++) {
        f32 low[VEC], high[VEC];
        load(low, x + head * HEAD);
        load(high, x + head * HEAD + PAIRS);
        #pragma unroll
        for (int i = 0; i < VEC; i++) {
            const f32 before = low[i];
            low[i] = __fsub_rn(__fmul_rn(before, cosines[i]), __fmul_rn(high[i], sines[i]));
            high[i] = __fadd_rn(__fmul_rn(high[i], cosines[i]), __fmul_rn(before, sines[i]));
        }
        store(x + head * HEAD, low);
        store(x + head * HEAD + PAIRS, high);
    }
}
