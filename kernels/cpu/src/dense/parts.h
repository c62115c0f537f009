// What the files of the dense part share.
#pragma once

#include "arch/dense_ops.h"
#include "src/expert_ops.h"

namespace floe {

// Of the instruction set in use.
const DenseOps &dense_ops();

// Bytes of a matrix's row, or FLOE_BAD_SHAPE for one that does not exist.
int64_t row_bytes(const floe_matrix &m);

// rope: dim cosines, then as many sines, the first half of which is negated.
inline void turn(float *head, const float *rope, int64_t dim) {
    const int64_t half = dim / 2;
    const float *sines = rope + dim;
    for (int64_t i = 0; i < half; i++) {
        const float left = head[i], right = head[i + half];
        head[i] = left * rope[i] + right * sines[i];
        head[i + half] = right * rope[i + half] + left * sines[i + half];
    }
}

// x[i] = silu(x[i]).
void silu_all(float *x, int64_t n);

// x / |x| · scale.
void unit(float *x, int64_t n, float scale);

inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Whether its sizes fit each other.
bool is_router(const floe_router &r);

// The experts with the largest scores and their weights, by `scores` as logits (experts), which is overwritten. NaN is
// larger than any number, as in torch; of equal ones the first goes first. ranked: room for all.
void route(const floe_router &r, float *scores, float *ranked, const floe_routed &routed);

} // namespace floe
