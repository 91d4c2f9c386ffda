// The router of a layer of experts; a warp a row. The scores of a row are in shared memory.
//
// Bytes: the logits three times forward, twice backward: little beside the rows that they route.

#include "element.cuh"

constexpr u32 THREADS = 128;
constexpr u32 WARPS = THREADS / WARP;
constexpr u32 NONE = 0xffffffffu;
constexpr f32 LEAST = -3.402823466e38f;

__device__ __forceinline__ f32 element(const ACT *at) {
    f32 value[1];
    load(value, at);
    return value[0];
}

__device__ __forceinline__ f32 sigmoid(f32 x) { return 1.0f / (1.0f + expf(fminf(-x, 87.0f))); }

// ln Σ e^logits, and the sum of the scores.
struct RowSums {
    f32 lse, sum;
};

// Makes the scores of a row: all lanes of its warp.
__device__ __forceinline__ RowSums score_row(const ACT *logits, f32 *scores, u32 experts, u32 is_softmax) {
    const u32 lane = threadIdx.x % WARP;
    f32 max = LEAST;
    for (u32 expert = lane; expert < experts; expert += WARP) {
        max = fmaxf(max, element(logits + expert));
    }
    max = warp_max(max);
    f32 exponentials = 0.0f, sum = 0.0f;
    for (u32 expert = lane; expert < experts; expert += WARP) {
        scores[expert] = expf(element(logits + expert) - max);
        exponentials += scores[expert];
    }
    exponentials = warp_sum(exponentials);
    for (u32 expert = lane; expert < experts; expert += WARP) {
        scores[expert] = is_softmax ? scores[expert] / exponentials : sigmoid(element(logits + expert));
        sum += scores[expert];
    }
    sum = warp_sum(sum);
    __syncwarp();
    return {max + logf(exponentials), is_softmax ? 1.0f : sum};
}

// logits [R, E]; chosen and weights [R, K], sums_of_rows [R, 2] for the statistics.
extern "C" __global__ void __launch_bounds__(THREADS)
route_forward(u32 rows, u32 experts, u32 top_k, u32 is_softmax, u32 normalized, const ACT *logits, int *chosen, f32 *weights,
              f32 *sums_of_rows) {
    SHARED_BYTES(memory);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * WARPS + warp;
    if (row >= rows) {
        return;
    }
    f32 *const scores = reinterpret_cast<f32 *>(memory) + warp * experts;
    const RowSums sums = score_row(logits + (u64)row * experts, scores, experts, is_softmax);
    // Which of this lane's experts are chosen.
    u32 taken = 0;
    f32 sum = 0.0f;
    for (u32 choice = 0; choice < top_k; choice++) {
        u32 best = NONE;
        f32 most = LEAST;
        for (u32 expert = lane; expert < experts; expert += WARP) {
            const f32 key = scores[expert];
            // No number counts as the least, so that all lanes agree.
            if (!(taken >> (expert / WARP) & 1u) && (best == NONE || key > most)) {
                best = expert;
                most = key > LEAST ? key : LEAST;
            }
        }
        #pragma unroll
        for (u32 distance = WARP / 2; distance > 0; distance /= 2) {
            const u32 other = __shfl_xor_sync(ALL_LANES, best, distance);
            const f32 key = __shfl_xor_sync(ALL_LANES, most, distance);
            if (other != NONE && (best == NONE || key > most || (key == most && other < best))) {
                best = other;
                most = key;
            }
        }
        taken |= best % WARP == lane ? 1u << (best / WARP) : 0u;
        sum += scores[best];
        if (lane == 0) {
            chosen[(u64)row * top_k + choice] = (int)best;
            weights[(u64)row * top_k + choice] = scores[best];
        }
    }
    if (lane == 0) {
        for (u32 choice = 0; normalized && choice < top_k; choice++) {
            weights[(u64)row * top_k + choice] /= sum;
        }
        sums_of_rows[2 * (u64)row] = sums.lse;
        sums_of_rows[2 * (u64)row + 1] = sums.sum;
    }
}

// statistics [3E + 1]: slots and probabilities of expert `blockIdx.x`, and slots up to its capacity; the last block: squares
// of ln Σ e^logits.
extern "C" __global__ void __launch_bounds__(THREADS)
route_statistics(u32 rows, u32 experts, u32 top_k, u32 is_softmax, u32, const ACT *logits, const int *chosen,
                 const f32 *sums_of_rows, f32 *statistics, u32 capacity) {
    __shared__ f32 warps[2 * WARPS];
    const u32 expert = blockIdx.x;
    f32 sums[2] = {};
    for (u32 row = threadIdx.x; row < rows; row += THREADS) {
        const f32 lse = sums_of_rows[2 * (u64)row], sum = sums_of_rows[2 * (u64)row + 1];
        if (expert == experts) {
            sums[1] += lse * lse;
            continue;
        }
        const f32 logit = element(logits + (u64)row * experts + expert);
        sums[1] += is_softmax ? expf(logit - lse) : sigmoid(logit) / sum;
        for (u32 choice = 0; choice < top_k; choice++) {
            sums[0] += (u32)chosen[(u64)row * top_k + choice] == expert ? 1.0f : 0.0f;
        }
    }
    row_sums<THREADS>(sums, warps);
    if (threadIdx.x == 0) {
        if (expert < experts) {
            statistics[expert] = sums[0];
            statistics[2 * experts + 1 + expert] = fminf(sums[0], (f32)capacity);
        }
        statistics[experts + expert] = sums[1];
    }
}

// logits become dlogits; load [E]: slots of each expert.
extern "C" __global__ void __launch_bounds__(THREADS)
route_backward(u32 rows, u32 experts, u32 top_k, u32 is_softmax, u32 normalized, ACT *logits, const int *chosen,
               const f32 *dweights, const f32 *load, f32 balance, f32 z) {
    SHARED_BYTES(memory);
    const u32 lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = blockIdx.x * WARPS + warp;
    if (row >= rows) {
        return;
    }
    ACT *const own = logits + (u64)row * experts;
    f32 *const scores = reinterpret_cast<f32 *>(memory) + 2 * warp * experts, *const dscores = scores + experts;
    const RowSums sums = score_row(own, scores, experts, is_softmax);
    f32 mean = 0.0f;
    for (u32 expert = lane; expert < experts; expert += WARP) {
        mean += balance * load[expert] * scores[expert];
    }
    mean = warp_sum(mean) / sums.sum;
    for (u32 expert = lane; expert < experts; expert += WARP) {
        dscores[expert] = (balance * load[expert] - mean) / sums.sum;
    }
    __syncwarp();
    if (lane == 0) {
        f32 sum = 0.0f, dot = 0.0f;
        for (u64 slot = (u64)row * top_k; slot < ((u64)row + 1) * top_k; slot++) {
            sum += scores[chosen[slot]];
            dot += dweights[slot] * scores[chosen[slot]];
        }
        for (u64 slot = (u64)row * top_k; slot < ((u64)row + 1) * top_k; slot++) {
            dscores[chosen[slot]] += normalized ? (dweights[slot] - dot / sum) / sum : dweights[slot];
        }
    }
    __syncwarp();
    f32 inner = 0.0f;
    for (u32 expert = lane; expert < experts; expert += WARP) {
        inner += scores[expert] * dscores[expert];
    }
    inner = warp_sum(inner);
    for (u32 expert = lane; expert < experts; expert += WARP) {
        const f32 score = scores[expert], dscore = dscores[expert];
        const f32 of_score = is_softmax ? score * (dscore - inner) : score * (1.0f - score) * dscore;
        const f32 d[1] = {of_score + 2.0f * z * sums.lse * expf(element(own + expert) - sums.lse)};
        store(own + expert, d);
    }
}
