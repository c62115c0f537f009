// A token's way through layer after layer: each one's dense part, then its experts, without coming back in between.
#include "buffers.h"
#include "expert_ops.h"

#include <cmath>

using namespace floe;

namespace {

constexpr int64_t kMostChosen = 256;

// What is computed of a router's choice.
struct Work {
    int64_t token[2 * kMostChosen], expert[2 * kMostChosen];
    float weight[2 * kMostChosen], threshold[2 * kMostChosen], product[2 * kMostChosen];
};

bool fits(const floe_dense_layer &d, const floe_expert_layer &l, const floe_dense_layer &first) {
    if (d.hidden != first.hidden || d.router == nullptr || d.top_k != first.top_k || d.top_k > kMostChosen)
        return false;
    const int64_t parts = l.rule.parts;
    return (parts == 1 || parts == 2) && l.signal.experts == parts * d.experts &&
           l.limits.experts == l.signal.experts && l.signal.row.n == d.hidden;
}

} // namespace

void floe_stop_set(floe_stop *stop, int raised) { shared(stop->raised).store(raised, std::memory_order_relaxed); }

int floe_token_step(const floe_layers *layers, float *x, void *const *kv, const floe_place *place,
                    const floe_pace *pace, const floe_trace *trace) {
    thread_local Buffer buffer;
    if (layers->count < 1) return FLOE_BAD_SHAPE;
    const int64_t hidden = layers->dense[0]->hidden, top_k = layers->dense[0]->top_k;
    for (int64_t i = 0; i < layers->count; i++)
        if (!fits(*layers->dense[i], layers->experts[i], *layers->dense[0])) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(2 * aligned(4 * hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *inner = carve<float>(memory, hidden), *added = carve<float>(memory, hidden);
    floe_routed routed = {x, inner, trace->index, trace->weights, nullptr};
    int64_t *counts = trace->counts;
    for (int64_t i = 0; i < layers->count; i++) {
        const floe_expert_layer &l = layers->experts[i];
        int code = floe_dense_step(layers->dense[i], x, i ? added : nullptr, kv[i], place, pace->dense_digits,
                                   pace->threads, &routed);
        if (code != FLOE_OK) return code;
        if (is_raised(*pace->stop)) return FLOE_STOPPED;
        Work work;
        const int64_t parts = l.rule.parts;
        const floe_calls calls = {parts * top_k, work.token,     work.expert,
                                  work.weight,   work.threshold, l.limits.product ? work.product : nullptr,
                                  nullptr};
        code = floe_select(&l.rule, &l.limits, 1, top_k, routed.index, routed.weights, &calls);
        if (code != FLOE_OK) return code;
        int64_t found[4 * kMostChosen];
        code = floe_moe_step(inner, 1, &l.signal, &l.rows, &calls, pace->expert_digits, pace->threads, added, found);
        if (code != FLOE_OK) return code;
        for (int64_t c = 0; c < 4 * top_k; c++) counts[c] = -1;
        for (int64_t call = 0; call < calls.count; call++) {
            if (work.threshold[call] == INFINITY) continue;
            int64_t *to = counts + (parts == 2 ? 2 : 4) * call;
            to[0] = found[2 * call];
            to[1] = found[2 * call + 1];
        }
        routed.index += top_k;
        routed.weights += top_k;
        counts += 4 * top_k;
    }
    for (int64_t i = 0; i < hidden; i++) x[i] += added[i];
    return FLOE_OK;
}
