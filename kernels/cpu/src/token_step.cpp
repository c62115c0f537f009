// Tokens' way through layer after layer: each one's dense part, then its experts, without coming back in between.
#include "buffers.h"
#include "expert_ops.h"

#include <algorithm>
#include <cmath>

using namespace floe;

namespace {

constexpr int64_t kMostChosen = 256;

bool fits(const floe_dense_layer &d, const floe_expert_layer *l, const floe_layers &all) {
    if (d.hidden != all.dense[0]->hidden || (d.router.weight == nullptr) != (l == nullptr)) return false;
    if (l == nullptr) return d.beside != nullptr;
    if (d.router.top_k != all.top_k || all.top_k > kMostChosen) return false;
    const int64_t parts = l->rule.parts;
    return (parts == 1 || parts == 2) && l->signal.experts == parts * d.router.experts &&
           l->limits.experts == l->signal.experts && l->signal.row.n == d.hidden;
}

// The experts of one layer: `added` (tokens, H), written, and what the layer's counts are.
int run_experts(const floe_expert_layer &l, int64_t tokens, int64_t top_k, const floe_routed &routed,
                const floe_pace &pace, float *added, int64_t *counts) {
    thread_local Buffer buffer;
    const int64_t parts = l.rule.parts, count = parts * tokens * top_k;
    uint8_t *memory = buffer.take(4 * aligned(8 * count) + 3 * aligned(4 * count));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    const floe_calls calls = {
        count,
        carve<int64_t>(memory, count),
        carve<int64_t>(memory, count),
        carve<float>(memory, count),
        carve<float>(memory, count),
        l.limits.product ? carve<float>(memory, count) : nullptr,
        nullptr,
    };
    int code = floe_select(&l.rule, &l.limits, tokens, top_k, routed.index, routed.weights, &calls);
    if (code != FLOE_OK) return code;
    int64_t *const found = carve<int64_t>(memory, 2 * count);
    code = floe_moe_step(routed.hidden, tokens, &l.signal, &l.rows, &calls, pace.expert_digits, pace.threads, added,
                         found);
    if (code != FLOE_OK) return code;
    for (int64_t call = 0; call < count; call++) {
        if (calls.threshold[call] == INFINITY) continue;
        int64_t *to = counts + (parts == 2 ? 2 : 4) * call;
        to[0] = found[2 * call];
        to[1] = found[2 * call + 1];
    }
    return FLOE_OK;
}

} // namespace

void floe_stop_set(floe_stop *stop, int raised) { shared(stop->raised).store(raised, std::memory_order_relaxed); }

int floe_token_step(const floe_layers *layers, int64_t tokens, float *x, const floe_place *places,
                    const floe_pace *pace, const floe_trace *trace) {
    thread_local Buffer buffer;
    if (layers->count < 1 || tokens < 1 || tokens > FLOE_MOST_TOGETHER) return FLOE_BAD_SHAPE;
    const int64_t numbers = tokens * layers->dense[0]->hidden, chosen = tokens * layers->top_k;
    for (int64_t i = 0; i < layers->count; i++)
        if (!fits(*layers->dense[i], layers->experts[i], *layers)) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(3 * aligned(4 * numbers));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *inner = carve<float>(memory, numbers), *added = carve<float>(memory, numbers);
    floe_routed routed = {x, inner, trace->index, trace->weights, nullptr, carve<float>(memory, numbers)};
    const float *joining = nullptr; // what the layer before adds
    int64_t *counts = trace->counts;
    for (int64_t i = 0; i < layers->count; i++) {
        const floe_dense_layer &dense = *layers->dense[i];
        int code = floe_dense_step(&dense, i, tokens, x, joining, places, pace->dense_digits, pace->threads, &routed);
        if (code != FLOE_OK) return code;
        if (is_raised(*pace->stop)) return FLOE_STOPPED;
        std::fill_n(counts, 4 * chosen, -1);
        if (layers->experts[i] == nullptr) {
            std::fill_n(routed.index, chosen, 0);
            std::fill_n(routed.weights, chosen, 0.0f);
            std::fill_n(added, numbers, 0.0f);
        } else {
            code = run_experts(*layers->experts[i], tokens, layers->top_k, routed, *pace, added, counts);
            if (code != FLOE_OK) return code;
        }
        joining = dense.sandwich == nullptr || layers->experts[i] == nullptr ? added : nullptr;
        if (joining == nullptr) close_layer(dense, tokens, routed.parallel, added, x);
        routed.index += chosen;
        routed.weights += chosen;
        counts += 4 * chosen;
    }
    for (int64_t i = 0; joining != nullptr && i < numbers; i++) x[i] += joining[i];
    return FLOE_OK;
}
