// What tensor cores and asynchronous copies do, an instruction a function: `mma.sync.m16n8k16` on bf16, `ldmatrix`,
// `cp.async`; sm_80 and later. Where there is no GPU, the same written out, so that kernels can be run on the CPU.
//
// Shared memory is addressed by 32-bit numbers.

#include "element.cuh"

#ifdef __CUDA_ARCH__

__device__ __forceinline__ u32 shared_address(const void *pointer) { return (u32)__cvta_generic_to_shared(pointer); }

__device__ __forceinline__ f32 exp2_fast(f32 x) {
    f32 y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies 16 bytes; zeros where `valid` is false.
__device__ __forceinline__ void copy_chunk(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// The same of 8 bytes.
__device__ __forceinline__ void copy_pair(u32 to, const void *from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(valid ? 8 : 0) : "memory");
}

__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void store_word(u32 to, u32 word) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

__device__ __forceinline__ uint4 load_chunk(u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(from) : "memory");
    return x;
}

__device__ __forceinline__ void store_chunk(void *to, uint4 x) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Four 8×8 matrices; lanes 8i..8i+7 give the rows of matrix i.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

__device__ __forceinline__ void load_matrices_transposed(u32 (&to)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}

// sum[16, 8] += left[16, 16] · right[16, 8]
__device__ __forceinline__ void multiply_add(f32 (&sum)[4], const u32 (&left)[4], u32 right_low, u32 right_high) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
                 : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right_low), "r"(right_high));
}

#else

// Addresses count from here.
static unsigned char shared_origin;

inline u32 shared_address(const void *pointer) { return (u32)((const unsigned char *)pointer - &shared_origin); }
inline unsigned char *shared_at(u32 address) { return &shared_origin + (int)address; }
inline f32 exp2_fast(f32 x) { return exp2f(x); }

// A copy arrives when its thread waits for it, no sooner.
inline void copy_bytes(u32 to, const void *from, bool valid, u32 bytes) {
    cuda_on_cpu::begin_copy(shared_at(to), valid ? from : nullptr, bytes);
}

inline void copy_chunk(u32 to, const void *from, bool valid) { copy_bytes(to, from, valid, 16); }
inline void copy_pair(u32 to, const void *from, bool valid) { copy_bytes(to, from, valid, 8); }
inline void copies_done() { cuda_on_cpu::await_copies(); }
inline void store_word(u32 to, u32 word) { *(u32 *)shared_at(to) = word; }
inline void store_chunk(void *to, uint4 x) { *(uint4 *)to = x; }
inline uint4 load_chunk(u32 from) { return *(const uint4 *)shared_at(from); }

// What the lanes of a warp show each other: written, met, read, met again. On a GPU it is in registers.
static u32 shown[1024][6];

inline u32 (*shown_by_warp())[6] { return shown + threadIdx.x / 32 * 32; }

inline void load_matrices(u32 (&to)[4], u32 from) {
    const u32 lane = threadIdx.x % 32;
    shown[threadIdx.x][0] = from;
    __syncwarp();
    for (u32 i = 0; i < 4; i++) {
        to[i] = *(const u32 *)(shared_at(shown_by_warp()[8 * i + lane / 4][0]) + lane % 4 * 4);
    }
    __syncwarp();
}

inline void load_matrices_transposed(u32 (&to)[4], u32 from) {
    const u32 lane = threadIdx.x % 32;
    shown[threadIdx.x][0] = from;
    __syncwarp();
    for (u32 i = 0; i < 4; i++) {
        to[i] = 0;
        for (u32 half = 0; half < 2; half++) {
            const u32 row = shown_by_warp()[8 * i + lane % 4 * 2 + half][0];
            to[i] |= (u32) * (const unsigned short *)(shared_at(row) + lane / 4 * 2) << 16 * half;
        }
    }
    __syncwarp();
}

inline void multiply_add(f32 (&sum)[4], const u32 (&left)[4], u32 right_low, u32 right_high) {
    const u32 lane = threadIdx.x % 32;
    const u32 operands[6] = {left[0], left[1], left[2], left[3], right_low, right_high};
    for (u32 i = 0; i < 6; i++) {
        shown[threadIdx.x][i] = operands[i];
    }
    __syncwarp();
    for (u32 k = 0; k < 8; k++) {
        const u32 high = k / 4, quad = k % 4;
        for (u32 i = 0; i < 4; i++) {
            const u32 row = shown_by_warp()[lane / 4 * 4 + quad][2 * high + i / 2];
            const u32 column = shown_by_warp()[(lane % 4 * 2 + i % 2) * 4 + quad][4 + high];
            sum[i] = fmaf(widen_low(row), widen_low(column), sum[i]);
            sum[i] = fmaf(widen_high(row), widen_high(column), sum[i]);
        }
    }
    __syncwarp();
}

#endif
