// Reductions of the emulated NCCL: in order of rank, so that results are the same on every run and on every rank. Sums
// of bf16 are done in f32 and rounded once, where the real library rounds at each step of its algorithm.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace nccl {

// `ncclDataType_t`
enum Type : int { U8 = 1, I32 = 2, F32 = 7, F64 = 8, BF16 = 9 };

// `ncclRedOp_t`; from SCALED on they are made by ncclRedOpCreatePreMulSum, and are all SCALED between ranks.
enum Op : int { SUM = 0, MAX = 2, AVG = 4, SCALED = 5 };

// Bytes of an element; 0 for a type that is not emulated.
inline size_t width_of(int type) {
    switch (type) {
    case U8:
        return 1;
    case BF16:
        return 2;
    case I32:
    case F32:
        return 4;
    case F64:
        return 8;
    default:
        return 0;
    }
}

inline const char *name_of(int type) {
    switch (type) {
    case U8:
        return "u8";
    case I32:
        return "i32";
    case F32:
        return "f32";
    case F64:
        return "f64";
    case BF16:
        return "bf16";
    default:
        return "?";
    }
}

inline const char *name_of_op(int op) {
    switch (op) {
    case SUM:
        return "sum";
    case MAX:
        return "max";
    case AVG:
        return "mean";
    default:
        return "scaled sum";
    }
}

struct Bf16 {
    uint16_t bits;
};

// What elements are summed in.
inline int64_t widen(uint8_t x) { return x; }
inline int64_t widen(int32_t x) { return x; }
inline float widen(float x) { return x; }
inline double widen(double x) { return x; }
inline float widen(Bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
}

// Whole numbers wrap around.
inline void narrow(int64_t wide, uint8_t &x) { x = (uint8_t)wide; }
inline void narrow(int64_t wide, int32_t &x) { x = (int32_t)(uint32_t)wide; }
inline void narrow(float wide, float &x) { x = wide; }
inline void narrow(double wide, double &x) { x = wide; }
// To the nearest, halves to even.
inline void narrow(float wide, Bf16 &x) {
    uint32_t bits;
    memcpy(&bits, &wide, sizeof bits);
    const bool is_nan = wide != wide;
    x.bits = (uint16_t)(is_nan ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// One rank's elements, and its factor as one element.
struct Contribution {
    const char *elements;
    const char *scalar;
};

// What a rank's elements are multiplied by. A mean is a sum of elements that are multiplied by 1/ranks in their own
// type; that of whole numbers is divided at the end.
template <class T> auto factor_of(int op, const Contribution &from, size_t ranks) {
    T factor;
    if (op == SCALED) {
        memcpy(&factor, from.scalar, sizeof factor);
        return widen(factor);
    }
    using Wide = decltype(widen(factor));
    const bool is_whole = Wide(1) / Wide(2) == Wide(0);
    narrow(op == AVG && !is_whole ? Wide(1) / Wide(ranks) : Wide(1), factor);
    return widen(factor);
}

template <class T>
void reduce_as(int op, const std::vector<Contribution> &ranks, size_t count, char *to) {
    using Wide = decltype(widen(T()));
    constexpr size_t BLOCK = 2048;
    const bool is_mean_of_whole = op == AVG && Wide(1) / Wide(2) == Wide(0);
    Wide sums[BLOCK];
    for (size_t from = 0; from < count; from += BLOCK) {
        const size_t n = std::min(BLOCK, count - from);
        for (size_t rank = 0; rank < ranks.size(); rank++) {
            const T *x = reinterpret_cast<const T *>(ranks[rank].elements) + from;
            const Wide factor = factor_of<T>(op, ranks[rank], ranks.size());
            for (size_t i = 0; i < n; i++) {
                const Wide wide = widen(x[i]);
                if (rank == 0) {
                    sums[i] = wide * factor;
                } else if (op == MAX) {
                    sums[i] = sums[i] < wide ? wide : sums[i];
                } else {
                    sums[i] += wide * factor;
                }
            }
        }
        T *out = reinterpret_cast<T *>(to) + from;
        for (size_t i = 0; i < n; i++) {
            narrow(sums[i], out[i]);
            if (is_mean_of_whole) {
                narrow(widen(out[i]) / Wide(ranks.size()), out[i]);
            }
        }
    }
}

// `count` elements of each rank.
inline void reduce(int type, int op, const std::vector<Contribution> &ranks, size_t count, char *to) {
    switch (type) {
    case U8:
        return reduce_as<uint8_t>(op, ranks, count, to);
    case I32:
        return reduce_as<int32_t>(op, ranks, count, to);
    case F32:
        return reduce_as<float>(op, ranks, count, to);
    case F64:
        return reduce_as<double>(op, ranks, count, to);
    case BF16:
        return reduce_as<Bf16>(op, ranks, count, to);
    }
}

} // namespace nccl
