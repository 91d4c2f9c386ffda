// SGD: constants μ, and 1 for Nesterov's momentum. Without momentum there is no state.

#include "update.cuh"

struct Sgd {
    f32 momentum;
    bool nesterov;

    __device__ __forceinline__ Sgd(const f32 *c, const f32 *) : momentum(c[0]), nesterov(c[1] != 0.0f) {}

    __device__ __forceinline__ void operator()(f32 &p, f32 grad, f32 scale, f32 (&state)[STATES], Rates rates) const {
        f32 update = grad * scale + rates.weight_decay * p;
#if SLOTS
        state[0] = momentum * state[0] + update;
        update = nesterov ? update + momentum * state[0] : state[0];
#endif
        p -= rates.lr * update;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) sgd(UPDATE_PARAMETERS) {
    update_all<Sgd>(UPDATE_ARGUMENTS);
}
