// Muon: momentum and direction of a matrix, sums of matrices, and the update by an orthogonal one.

#include "update.cuh"

// The direction replaces what is in `p`. Constants μ, 1 − μ, and 1 for Nesterov's momentum.
struct Momentum {
    f32 momentum, share;
    bool nesterov;

    __device__ __forceinline__ Momentum(const f32 *c, const f32 *)
        : momentum(c[0]), share(c[1]), nesterov(c[2] != 0.0f) {}

    __device__ __forceinline__ void operator()(f32 &p, f32 grad, f32 scale, f32 (&state)[STATES], Rates) const {
        const f32 g = grad * scale;
        state[0] = momentum * state[0] + share * g;
        p = nesterov ? share * g + momentum * state[0] : state[0];
    }
};

// p = keep·p + add·scale·grad. Constants keep and add.
struct Blend {
    f32 keep, add;

    __device__ __forceinline__ Blend(const f32 *c, const f32 *) : keep(c[0]), add(c[1]) {}

    __device__ __forceinline__ void operator()(f32 &p, f32 grad, f32 scale, f32 (&)[STATES], Rates) const {
        const f32 kept = keep == 0.0f ? 0.0f : keep * p;
        p = kept + add * (grad * scale);
    }
};

// The gradient is orthogonal: its factor does not matter.
struct Descend {
    __device__ __forceinline__ Descend(const f32 *, const f32 *) {}

    __device__ __forceinline__ void operator()(f32 &p, f32 grad, f32, f32 (&)[STATES], Rates rates) const {
        p -= rates.lr * (grad + rates.weight_decay * p);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) muon_momentum(UPDATE_PARAMETERS) {
    update_all<Momentum>(UPDATE_ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS) muon_blend(UPDATE_PARAMETERS) {
    update_all<Blend>(UPDATE_ARGUMENTS);
}
extern "C" __global__ void __launch_bounds__(THREADS) muon_descend(UPDATE_PARAMETERS) {
    update_all<Descend>(UPDATE_ARGUMENTS);
}
