// Lion: constants β₁, 1 − β₁, β₂, 1 − β₂.

#include "update.cuh"

struct Lion {
    f32 beta1, share1, beta2, share2;

    __device__ __forceinline__ Lion(const f32 *c, const f32 *) : beta1(c[0]), share1(c[1]), beta2(c[2]), share2(c[3]) {}

    __device__ __forceinline__ void operator()(f32 &p, f32 grad, f32 scale, f32 (&state)[STATES], Rates rates) const {
        const f32 g = grad * scale;
        const f32 mean = beta1 * state[0] + share1 * g;
        const f32 sign = (mean > 0.0f ? 1.0f : 0.0f) - (mean < 0.0f ? 1.0f : 0.0f);
        p -= rates.lr * (sign + rates.weight_decay * p);
        state[0] = beta2 * state[0] + share2 * g;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) lion(UPDATE_PARAMETERS) {
    update_all<Lion>(UPDATE_ARGUMENTS);
}
