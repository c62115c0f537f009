// An answer's tokens one after the other: embedding, all layers, logits, a token drawn from them, and that one's
// embedding again, without coming back in between.
#include "buffers.h"
#include "floe.h"

#include <string.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>

namespace floe {
namespace {

// The least of the `wanted` largest, which moves them about.
double least_of(double *scores, int64_t count, int64_t wanted) {
    std::nth_element(scores, scores + wanted - 1, scores + count, std::greater<double>());
    return scores[wanted - 1];
}

double sum(const double *weights, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i];
    return total;
}

// Takes the weight of all but the likeliest that together reach `share`; of equal ones the last stays.
void keep_share(const double *scores, double *weights, int64_t count, double share, int64_t *order) {
    const double all = sum(weights, count), too_light = all * (1 - share) / (2.0 * (double)count);
    double reached = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] == 0) continue;
        if (weights[i] > too_light) {
            order[kept++] = i;
        } else { // together not half of what is left out: they need not be sorted
            reached += weights[i] / all;
            weights[i] = 0;
        }
    }
    std::stable_sort(order, order + kept, [scores](int64_t a, int64_t b) { return scores[a] < scores[b]; });
    for (int64_t i = 0; i + 1 < kept; i++) {
        reached += weights[order[i]] / all;
        if (!(reached <= 1 - share)) return;
        weights[order[i]] = 0;
    }
}

// The first of the largest; NaN is larger than any number, as in torch.
int64_t largest(const double *scores, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (!(scores[i] <= scores[best]) && !std::isnan(scores[best])) best = i;
    return best;
}

// How far below the largest logit a token may be and still be drawn; INFINITY where all of them matter.
float reach_of(const floe_sampling &s, const uint8_t *seen) {
    if (seen != nullptr) return INFINITY; // a penalty may lower the largest
    if (s.temperature == 0) return 0;
    if (s.top_p != 1 || !(s.min_p > 0)) return INFINITY;
    return (float)(s.temperature * (1e-3 - std::log(s.min_p))); // a little more than draws look at
}

} // namespace
} // namespace floe

using namespace floe;

int64_t floe_draw(const floe_sampling *sampling, const float *logits, int64_t count, const uint8_t *seen,
                  double uniform) {
    thread_local Buffer buffer;
    const floe_sampling &s = *sampling;
    if (count < 1 || s.top_k < 0) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(4 * aligned(8 * count));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    double *scores = carve<double>(memory, count), *weights = carve<double>(memory, count);
    double *room = carve<double>(memory, count);
    int64_t *order = carve<int64_t>(memory, count);
    for (int64_t i = 0; i < count; i++) {
        scores[i] = logits[i];
        if (seen != nullptr && seen[i]) scores[i] = scores[i] < 0 ? scores[i] * s.penalty : scores[i] / s.penalty;
    }
    const int64_t best = largest(scores, count);
    if (!std::isfinite(scores[best])) return FLOE_NOT_A_NUMBER;
    if (s.temperature == 0) return best;
    for (int64_t i = 0; i < count; i++) scores[i] /= s.temperature;
    double least = -INFINITY;
    if (s.top_k > 0 && s.top_k < count) least = least_of(std::copy_n(scores, count, room) - count, count, s.top_k);
    if (s.top_p == 1 && s.min_p > 0) { // these would weigh too little below; exponentials take time
        const double light = scores[best] + std::log(s.min_p) - 1e-6;
        if (light > least) least = light;
    }
    for (int64_t i = 0; i < count; i++) weights[i] = scores[i] < least ? 0 : std::exp(scores[i] - scores[best]);
    if (s.top_p < 1) keep_share(scores, weights, count, s.top_p, order);
    for (int64_t i = 0; i < count; i++)
        if (weights[i] < s.min_p) weights[i] = 0; // the likeliest weighs 1
    const double target = uniform * sum(weights, count);
    double reached = 0;
    int64_t last = best;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] == 0) continue;
        last = i;
        if ((reached += weights[i]) > target) break;
    }
    return last;
}

int64_t floe_decode(const floe_layers *layers, const floe_ends *ends, const floe_sampling *sampling, void *const *kv,
                    const floe_place *place, const floe_pace *pace, const floe_draws *draws, const floe_trace *trace) {
    thread_local Buffer buffer;
    const floe_draws &d = *draws;
    const int64_t hidden = ends->hidden, vocabulary = ends->vocabulary;
    if (layers->count < 1 || hidden != layers->dense[0]->hidden || d.most < 1) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(aligned(4 * hidden) + aligned(4 * vocabulary));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *x = carve<float>(memory, hidden), *logits = carve<float>(memory, vocabulary);
    const int64_t chosen = layers->count * layers->top_k, turn = 2 * layers->dense[0]->dim;
    const auto began = std::chrono::steady_clock::now();
    const float reach = reach_of(*sampling, d.seen);
    int64_t token = d.token;
    for (int64_t n = 0; n < d.most;) {
        if (token < 0 || token >= vocabulary) return FLOE_BAD_INDEX;
        memcpy(x, ends->embedding + token * hidden, (size_t)(4 * hidden));
        const floe_place here = {place->rope + n * turn, place->capacity, place->position + n};
        const floe_trace filled = {trace->index + n * chosen, trace->weights + n * chosen,
                                   trace->counts + 4 * n * chosen};
        int code = floe_token_step(layers, x, kv, &here, pace, &filled);
        if (code == FLOE_STOPPED && n > 0) return n;
        if (code == FLOE_OK) code = floe_head(ends, x, reach, pace->expert_digits, pace->threads, logits);
        if (code != FLOE_OK) return code;
        token = floe_draw(sampling, logits, vocabulary, d.seen, d.uniforms[n]);
        if (token < 0) return token;
        const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began;
        d.tokens[n] = token;
        d.at[n++] = since.count();
        if (d.seen != nullptr) d.seen[token] = 1;
        const int64_t *const end = d.last + d.last_count;
        if (since.count() >= d.seconds || std::find(d.last, end, token) != end) return n;
    }
    return d.most;
}
