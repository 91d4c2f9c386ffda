// Constants.

#include "elementwise.cuh"

constexpr u32 BYTES = 16;

// The bytes of `pattern`, again and again; 16 at once where `out` starts at a multiple of 16.
extern "C" __global__ void __launch_bounds__(THREADS) fill(unsigned char *out, u64 pattern, u64 bytes) {
    const u64 at = ((u64)blockIdx.x * THREADS + threadIdx.x) * BYTES;
    if (VEC > 1 && at + BYTES <= bytes) {
        const u32 low = (u32)pattern, high = (u32)(pattern >> 32);
        *reinterpret_cast<uint4 *>(out + at) = make_uint4(low, high, low, high);
        return;
    }
    for (u64 byte = at; byte < bytes && byte < at + BYTES; byte++) {
        out[byte] = (unsigned char)(pattern >> 8 * (byte % 8));
    }
}
