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

// What is left out has no weight from then on; the others' are exp(score - most).
struct Weights {
    const double *scores;
    double *weights;
    int64_t count;

    double total() const {
        double sum = 0;
        for (int64_t i = 0; i < count; i++) sum += weights[i];
        return sum;
    }

    // All but the `wanted` likeliest, and what is as likely as the last of them.
    void keep_first(int64_t wanted, double *room) {
        std::copy(scores, scores + count, room);
        std::nth_element(room, room + wanted - 1, room + count, std::greater<double>());
        for (int64_t i = 0; i < count; i++)
            if (scores[i] < room[wanted - 1]) weights[i] = 0;
    }

    // All but the likeliest that together reach `share`; of equal ones the last stays.
    void keep_share(double share, int64_t *order) {
        int64_t kept = 0;
        for (int64_t i = 0; i < count; i++)
            if (weights[i] > 0) order[kept++] = i;
        std::stable_sort(order, order + kept, [this](int64_t a, int64_t b) { return scores[a] < scores[b]; });
        const double all = total();
        double reached = 0;
        for (int64_t i = 0; i + 1 < kept; i++) {
            reached += weights[order[i]] / all;
            if (!(reached <= 1 - share)) return;
            weights[order[i]] = 0;
        }
    }

    void keep_likely(double least) { // the likeliest weighs 1
        for (int64_t i = 0; i < count; i++)
            if (weights[i] < least) weights[i] = 0;
    }
};

// The first of the largest; NaN is larger than any number, as in torch.
int64_t largest(const double *scores, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count && !std::isnan(scores[best]); i++)
        if (scores[i] > scores[best] || std::isnan(scores[i])) best = i;
    return best;
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
    if (s.temperature == 0) return best;
    if (!std::isfinite(scores[best])) return FLOE_NOT_A_NUMBER;
    for (int64_t i = 0; i < count; i++) scores[i] /= s.temperature;
    for (int64_t i = 0; i < count; i++) weights[i] = std::exp(scores[i] - scores[best]);
    Weights left = {scores, weights, count};
    if (s.top_k > 0 && s.top_k < count) left.keep_first(s.top_k, room);
    if (s.top_p < 1) left.keep_share(s.top_p, order);
    if (s.min_p > 0) left.keep_likely(s.min_p);
    const double target = uniform * left.total();
    double reached = 0;
    int64_t last = best;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] == 0) continue;
        last = i;
        if ((reached += weights[i]) > target) break;
    }
    return last;
}

int64_t floe_decode(const floe_model *model, const floe_sampling *sampling, const float *rope, float *const *kv,
                    int64_t capacity, int64_t position, int dense_digits, int expert_digits, int threads,
                    const int32_t *stop, int64_t token, int64_t most, double seconds, const int64_t *last,
                    int64_t last_count, uint8_t *seen, const double *uniforms, int64_t *tokens, double *at,
                    int64_t *index, float *weights, int64_t *counts) {
    thread_local Buffer buffer;
    const floe_ends &ends = model->ends;
    if (model->layers < 1 || ends.hidden != model->dense[0]->hidden || most < 1) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(aligned(4 * ends.hidden) + aligned(4 * ends.vocabulary));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *x = carve<float>(memory, ends.hidden), *logits = carve<float>(memory, ends.vocabulary);
    const int64_t chosen = model->layers * model->dense[0]->top_k, turn = 2 * model->dense[0]->dim;
    const auto began = std::chrono::steady_clock::now();
    for (int64_t n = 0; n < most;) {
        if (token < 0 || token >= ends.vocabulary) return FLOE_BAD_INDEX;
        memcpy(x, ends.embedding + token * ends.hidden, (size_t)(4 * ends.hidden));
        int code = floe_token_step(model->layers, model->dense, model->experts, x, rope + n * turn, kv, capacity,
                                   position + n, dense_digits, expert_digits, threads, stop, index + n * chosen,
                                   weights + n * chosen, counts + 4 * n * chosen);
        if (code == FLOE_STOPPED && n > 0) return n;
        if (code == FLOE_OK) code = floe_head(&ends, x, expert_digits, threads, logits);
        if (code != FLOE_OK) return code;
        token = floe_draw(sampling, logits, ends.vocabulary, seen, uniforms[n]);
        if (token < 0) return token;
        const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began;
        tokens[n] = token;
        at[n++] = since.count();
        if (seen != nullptr) seen[token] = 1;
        if (since.count() >= seconds || std::find(last, last + last_count, token) != last + last_count) return n;
    }
    return most;
}
