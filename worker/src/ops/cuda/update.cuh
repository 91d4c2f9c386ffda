// The update of f32 parameters, or masters, and of an optimizer's state by gradients of type GRAD, with a bf16 copy of
// the result if COPY is 1. One launch for elements of all rates: a table, an argument by value, says which has which.
//
// A rule's file defines a type made of (constants, bias corrections or null), with an operator on one element:
// parameter, gradient, factor of the gradient, SLOTS numbers of state, rates; and a kernel that calls `update_all<type>`.
//
// Bytes an element: 4 + 4·SLOTS + gradient read, 4 + 4·SLOTS + 2 (copy) written.

#include "elementwise.cuh"

struct Rates {
    f32 lr, weight_decay;
};

// `count` runs: 256 · (where it ends) + (index of its rates), ascending. An end is a multiple of VEC or that of all.
struct Table {
    u64 count;
    u64 runs[RUNS];
    Rates rates[RATES];
    f32 constants[CONSTANTS];

    __device__ __forceinline__ Rates at(u64 element) const {
        u32 low = 0, high = (u32)count - 1;
        while (low < high) {
            const u32 middle = (low + high) / 2;
            if (runs[middle] >> 8 <= element) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return rates[runs[low] & 255];
    }
};

// An array has at least one element.
constexpr int STATES = SLOTS > 0 ? SLOTS : 1;

template <class Rule> struct Update {
    f32 *param;
    const GRAD *grad;
    bf16 *copy;
    f32 *slots[STATES];
    f32 scale;
    Rule rule;
    const Table &table;

    template <int N> struct State {
        Pack<f32, N> param, slots[STATES];
        Pack<GRAD, N> grad;
    };

    template <int N> __device__ __forceinline__ void load(State<N> &state, u64 at) const {
        state.grad.load(grad + at);
        #pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            state.slots[s].load(slots[s] + at);
        }
        state.param.load(param + at);
    }

    template <int N> __device__ __forceinline__ void finish(State<N> &state, u64 at) const {
        f32 p[N], g[N], values[STATES][N];
        state.param.get(p);
        state.grad.get(g);
        #pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            state.slots[s].get(values[s]);
        }
        const Rates rates = table.at(at);
        #pragma unroll
        for (int i = 0; i < N; i++) {
            f32 element[STATES];
            #pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                element[s] = values[s][i];
            }
            rule(p[i], g[i], scale, element, rates);
            #pragma unroll
            for (int s = 0; s < SLOTS; s++) {
                values[s][i] = element[s];
            }
        }
        store(param + at, p);
        #pragma unroll
        for (int s = 0; s < SLOTS; s++) {
            store(slots[s] + at, values[s]);
        }
#if COPY
        store(copy + at, p);
#endif
    }
};

// A factor that is not finite, the sign of a step to be skipped, leaves everything as it was. Where the device counts the
// updates, two bias corrections follow the factor in memory.
template <class Rule>
__device__ __forceinline__ void update_all(f32 *param, const GRAD *grad, bf16 *copy, f32 *slot0, f32 *slot1,
                                           const f32 *scale, u32 counted, u64 n, const Table &table) {
    const f32 factor = *scale;
    if (!(fabsf(factor) <= 3.402823466e38f)) {
        return;
    }
    const Rule rule(table.constants, counted ? scale + 1 : nullptr);
    Update<Rule> update{param, grad, copy, {slot0}, factor, rule, table};
    if constexpr (SLOTS > 1) {
        update.slots[STATES - 1] = slot1;
    }
    each_pack<1>(update, n);
}

// What every kernel of a rule is given, and hands on.
#define UPDATE_PARAMETERS                                                                                              \
    f32 *param, const GRAD *grad, bf16 *copy, f32 *slot0, f32 *slot1, const f32 *scale, u32 counted, u64 n,            \
        const __grid_constant__ Table table
#define UPDATE_ARGUMENTS param, grad, copy, slot0, slot1, scale, counted, n, table
