// A router's choice of experts, by the logits of one token.
#include "parts.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <numeric>

namespace floe {
namespace {

// Of the logits (experts), in place.
void make_scores(const floe_router &r, float *scores) {
    if (r.kind == FLOE_SIGMOID) {
        for (int64_t e = 0; e < r.experts; e++) scores[e] = 1 / (1 + std::exp(-scores[e]));
        return;
    }
    float most = scores[0];
    for (int64_t e = 1; e < r.experts; e++) most = scores[e] > most ? scores[e] : most;
    const float total = dense_ops().exponentials(scores, r.experts, most);
    for (int64_t e = 0; e < r.experts; e++) scores[e] /= total;
}

// The largest of some numbers, which is taken away; of equal ones the first.
int64_t take_best(float *ranked, int64_t count) {
    const int64_t best = std::max_element(ranked, ranked + count) - ranked;
    ranked[best] = -INFINITY;
    return best;
}

// Leave only the experts of the best groups.
void keep_groups(const floe_router &r, float *ranked) {
    const int64_t each = r.experts / r.groups;
    const auto worth = [&](int64_t group) {
        const float *of = ranked + group * each;
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = 0; e < each; e++)
            if (of[e] > first) second = first, first = of[e];
            else if (of[e] > second) second = of[e];
        return r.correction ? first + second : first;
    };
    for (int64_t left = r.groups; left > r.top_groups; left--) {
        int64_t worst = -1;
        float least = 0;
        for (int64_t group = 0; group < r.groups; group++) {
            const float own = worth(group);
            if (own == -INFINITY) continue; // left out already
            if (worst < 0 || own <= least) worst = group, least = own;
        }
        std::fill_n(ranked + (worst < 0 ? 0 : worst) * each, each, -INFINITY);
    }
}

// Numbers of which take_best finds the largest, the place of NaN first.
float rank(float score) { return std::isnan(score) ? INFINITY : score > -FLT_MAX ? score : -FLT_MAX; }

// Fills the choice by scores.
void choose(const floe_router &r, const float *scores, float *ranked, const floe_routed &routed) {
    for (int64_t e = 0; e < r.experts; e++) ranked[e] = rank(r.correction ? scores[e] + r.correction[e] : scores[e]);
    if (r.top_groups < r.groups) keep_groups(r, ranked);
    for (int64_t k = 0; k < r.top_k; k++) {
        routed.index[k] = take_best(ranked, r.experts);
        routed.weights[k] = scores[routed.index[k]];
    }
}

// Fills the choice by SparseMixer.
void mix(const floe_router &r, const float *logits, float *left, const floe_routed &routed) {
    std::transform(logits, logits + r.experts, left, rank);
    for (int64_t k = 0; k < r.top_k; k++) {
        const int64_t best = take_best(left, r.experts);
        const float most = logits[best];
        float total = std::exp(most - most); // NaN where the logit is none
        for (int64_t e = 0; e < r.experts; e++) {
            const float size = std::abs(logits[e]) > most ? std::abs(logits[e]) : most;
            if (left[e] > -INFINITY && !((most - logits[e]) / size > 2 * r.jitter)) total += std::exp(logits[e] - most);
        }
        routed.index[k] = best;
        routed.weights[k] = 1 / total;
    }
}

} // namespace

bool is_router(const floe_router &r) {
    if (r.kind < FLOE_SOFTMAX || r.kind > FLOE_SPARSEMIXER) return false;
    if (r.kind == FLOE_SPARSEMIXER && (r.correction || r.groups > 1 || !(r.jitter >= 0))) return false;
    if (r.experts < 1 || r.top_k < 1 || r.groups < 1 || r.experts % r.groups) return false;
    if (r.top_groups < 1 || r.top_groups > r.groups || r.top_k > r.top_groups * (r.experts / r.groups)) return false;
    return r.groups == 1 || r.correction == nullptr || r.experts / r.groups > 1; // a pair in each
}

void route(const floe_router &r, float *scores, float *ranked, const floe_routed &routed) {
    for (int64_t e = 0; r.bias && e < r.experts; e++) scores[e] += r.bias[e];
    if (r.kind == FLOE_SPARSEMIXER) mix(r, scores, ranked, routed);
    make_scores(r, scores);
    if (routed.scores) std::copy_n(scores, r.experts, routed.scores);
    if (r.kind != FLOE_SPARSEMIXER) choose(r, scores, ranked, routed);
    const float sum = std::accumulate(routed.weights, routed.weights + r.top_k, 0.0f);
    for (int64_t k = 0; r.shares && k < r.top_k; k++) routed.weights[k] /= sum;
    for (int64_t k = 0; r.scale != 1 && k < r.top_k; k++) routed.weights[k] *= r.scale;
    for (int64_t k = 0; r.factors && k < r.top_k; k++) routed.weights[k] *= r.factors[routed.index[k]];
}

} // namespace floe
