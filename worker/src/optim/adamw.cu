// AdamW: constants β₁, 1 − β₁, β₂, 1 − β₂, ε, and both bias corrections where the device does not count the updates.

#include "update.cuh"

struct AdamW {
    f32 beta1, share1, beta2, share2, eps, correction1, correction2;

    __device__ __forceinline__ AdamW(const f32 *c, const f32 *corrections)
        : beta1(c[0]), share1(c[1]), beta2(c[2]), share2(c[3]), eps(c[4]),
          correction1(corrections ? corrections[0] : c[5]), correction2(corrections ? corrections[1] : c[6]) {}

    __device__ __forceinline__ void operator()(f32 &p, f32 grad, f32 scale, f32 (&state)[STATES], Rates rates) const {
        const f32 g = grad * scale;
        state[0] = beta1 * state[0] + share1 * g;
        state[1] = beta2 * state[1] + share2 * g * g;
        const f32 update = state[0] * correction1 / (sqrtf(state[1] * correction2) + eps);
        p -= rates.lr * (update + rates.weight_decay * p);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) adamw(UPDATE_PARAMETERS) {
    update_all<AdamW>(UPDATE_ARGUMENTS);
}
