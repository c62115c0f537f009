// A token's way through layer after layer: each one's dense part, then its experts, without coming back in between.
#include "buffers.h"
#include "expert_ops.h"

#include <algorithm>
#include <cmath>

using namespace floe;

namespace {

constexpr int64_t kMostChosen = 256;

// What is computed of a router's choice.
struct Work {
    int64_t token[2 * kMostChosen], expert[2 * kMostChosen];
    float weight[2 * kMostChosen], threshold[2 * kMostChosen], product[2 * kMostChosen];
};

bool fits(const floe_dense_layer &d, const floe_expert_layer *l, const floe_layers &all) {
    if (d.hidden != all.dense[0]->hidden || (d.router.weight == nullptr) != (l == nullptr)) return false;
    if (l == nullptr) return d.beside != nullptr;
    if (d.router.top_k != all.top_k || all.top_k > kMostChosen) return false;
    const int64_t parts = l->rule.parts;
    return (parts == 1 || parts == 2) && l->signal.experts == parts * d.router.experts &&
           l->limits.experts == l->signal.experts && l->signal.row.n == d.hidden;
}

// The experts of one layer: `added` (H), written, and what the layer's counts are.
int run_experts(const floe_expert_layer &l, int64_t top_k, const floe_routed &routed, const floe_pace &pace,
                float *added, int64_t *counts) {
    Work work;
    const int64_t parts = l.rule.parts;
    const floe_calls calls = {parts * top_k, work.token,     work.expert,
                              work.weight,   work.threshold, l.limits.product ? work.product : nullptr,
                              nullptr};
    int code = floe_select(&l.rule, &l.limits, 1, top_k, routed.index, routed.weights, &calls);
    if (code != FLOE_OK) return code;
    int64_t found[4 * kMostChosen];
    code = floe_moe_step(routed.hidden, 1, &l.signal, &l.rows, &calls, pace.expert_digits, pace.threads, added, found);
    if (code != FLOE_OK) return code;
    for (int64_t call = 0; call < calls.count; call++) {
        if (work.threshold[call] == INFINITY) continue;
        int64_t *to = counts + (parts == 2 ? 2 : 4) * call;
        to[0] = found[2 * call];
        to[1] = found[2 * call + 1];
    }
    return FLOE_OK;
}

} // namespace

void floe_stop_set(floe_stop *stop, int raised) { shared(stop->raised).store(raised, std::memory_order_relaxed); }

int floe_token_step(const floe_layers *layers, float *x, void *const *kv, const floe_place *place,
                    const floe_pace *pace, const floe_trace *trace) {
    thread_local Buffer buffer;
    if (layers->count < 1) return FLOE_BAD_SHAPE;
    const int64_t hidden = layers->dense[0]->hidden, top_k = layers->top_k;
    for (int64_t i = 0; i < layers->count; i++)
        if (!fits(*layers->dense[i], layers->experts[i], *layers)) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(2 * aligned(4 * hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *inner = carve<float>(memory, hidden), *added = carve<float>(memory, hidden);
    floe_routed routed = {x, inner, trace->index, trace->weights, nullptr};
    int64_t *counts = trace->counts;
    for (int64_t i = 0; i < layers->count; i++) {
        int code = floe_dense_step(layers->dense[i], x, i ? added : nullptr, kv[i], place, pace->dense_digits,
                                   pace->threads, &routed);
        if (code != FLOE_OK) return code;
        if (is_raised(*pace->stop)) return FLOE_STOPPED;
        std::fill_n(counts, 4 * top_k, -1);
        if (layers->experts[i] == nullptr) {
            std::fill_n(routed.index, top_k, 0);
            std::fill_n(routed.weights, top_k, 0.0f);
            std::fill_n(added, hidden, 0.0f);
        } else {
            code = run_experts(*layers->experts[i], top_k, routed, *pace, added, counts);
            if (code != FLOE_OK) return code;
        }
        routed.index += top_k;
        routed.weights += top_k;
        counts += 4 * top_k;
    }
    for (int64_t i = 0; i < hidden; i++) x[i] += added[i];
    return FLOE_OK;
}
