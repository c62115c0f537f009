// An answer's tokens one after the other: embedding, all layers, logits, a token drawn from them, and that one's
// embedding again, without coming back in between.
#include "src/buffers.h"
#include "src/expert_ops.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace floe {
namespace {

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

int64_t floe_decode(const floe_layers *layers, const floe_ends *ends, const floe_sampling *sampling,
                    const floe_place *place, const floe_pace *pace, const floe_draws *draws, const floe_trace *trace) {
    thread_local Buffer buffer;
    const floe_draws &d = *draws;
    const int64_t hidden = ends->hidden, vocabulary = ends->vocabulary, at_once = d.guessed == nullptr ? 1 : d.most;
    if (layers->count < 1 || hidden != layers->dense[0]->hidden || d.most < 1 || layers->rope < 0 ||
        at_once > FLOE_MOST_TOGETHER)
        return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(aligned(4 * at_once * hidden) + aligned(4 * at_once * vocabulary));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *x = carve<float>(memory, at_once * hidden);
    float *logits = carve<float>(memory, at_once * vocabulary);
    const int64_t chosen = layers->count * layers->top_k;
    const auto began = std::chrono::steady_clock::now();
    const float reach = reach_of(*sampling, d.seen);
    int64_t token = d.token;
    for (int64_t n = 0; n < d.most;) {
        floe_place here[FLOE_MOST_TOGETHER];
        for (int64_t t = 0; t < at_once; t++) {
            const int64_t given = t == 0 ? token : d.guessed[t - 1];
            if (given < 0 || given >= vocabulary) return FLOE_BAD_INDEX;
            for (int64_t i = 0; i < hidden; i++) x[t * hidden + i] = ends->scale * ends->embedding[given * hidden + i];
            here[t] = {place->rope + (n + t) * layers->rope, place->kv, place->capacity, place->position + n + t,
                       place->states};
        }
        const floe_trace filled = {trace->index + n * chosen, trace->weights + n * chosen,
                                   trace->counts + 4 * n * chosen};
        int code = floe_token_step(layers, at_once, x, here, pace, &filled);
        if (code == FLOE_STOPPED && n > 0) return n;
        if (code == FLOE_OK) code = floe_head(ends, at_once, x, reach, pace->expert_digits, pace->threads, logits);
        if (code != FLOE_OK) return code;
        if (d.streams != nullptr) std::copy_n(x, at_once * hidden, d.streams + n * hidden);
        for (int64_t t = 0; t < at_once; t++) {
            token = floe_draw(sampling, logits + t * vocabulary, vocabulary, d.seen, d.uniforms[n]);
            if (token < 0) return token;
            const std::chrono::duration<double> since = std::chrono::steady_clock::now() - began;
            d.tokens[n] = token;
            d.at[n++] = since.count();
            if (d.seen != nullptr) d.seen[token] = 1;
            const int64_t *const end = d.last + d.last_count;
            if (std::find(d.last, end, token) != end) return n;
            if (d.guessed != nullptr ? n == d.most || token != d.guessed[t] : since.count() >= d.seconds) return n;
        }
    }
    return d.most;
}
