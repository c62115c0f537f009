// A token's way through layer after layer: each one's dense part, then its experts, without coming back in between.
#include "buffers.h"
#include "floe.h"

#include <cmath>

using namespace floe;

namespace {

constexpr int64_t kMostChosen = 256;

// What is computed of a router's choice.
struct Work {
    int64_t token[2 * kMostChosen], expert[2 * kMostChosen];
    float weight[2 * kMostChosen], threshold[2 * kMostChosen], down_threshold[2 * kMostChosen];
};

} // namespace

int floe_token_step(int64_t layers, const floe_dense_layer *const *dense, const floe_expert_layer *experts, float *x,
                    const float *rope, void *const *kv, int64_t capacity, int64_t position, int dense_digits,
                    int expert_digits, int threads, const int32_t *stop, int64_t *index, float *weights,
                    int64_t *counts) {
    thread_local Buffer buffer;
    if (layers < 1) return FLOE_BAD_SHAPE;
    const int64_t hidden = dense[0]->hidden, top_k = dense[0]->top_k;
    for (int64_t i = 0; i < layers; i++) {
        const floe_dense_layer &d = *dense[i];
        const floe_expert_layer &l = experts[i];
        if (d.hidden != hidden || d.router == nullptr || d.top_k != top_k || top_k > kMostChosen) return FLOE_BAD_SHAPE;
        const int64_t parts = l.rule.parts;
        if (parts < 1 || parts > 2 || l.experts != parts * d.experts || l.up.n != hidden) return FLOE_BAD_SHAPE;
    }
    uint8_t *memory = buffer.take(2 * aligned(4 * hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *inner = carve<float>(memory, hidden), *added = carve<float>(memory, hidden);
    for (int64_t i = 0; i < layers; i++, index += top_k, weights += top_k, counts += 4 * top_k) {
        const floe_expert_layer &l = experts[i];
        int code = floe_dense_step(dense[i], x, i ? added : nullptr, rope, kv[i], capacity, position, dense_digits,
                                   threads, x, inner, index, weights);
        if (code != FLOE_OK) return code;
        if (*(const volatile int32_t *)stop != 0) return FLOE_STOPPED;
        Work work;
        float *down_thresholds = l.down_thresholds ? work.down_threshold : nullptr;
        code = floe_select(&l.rule, 1, top_k, index, weights, l.experts, l.thresholds, l.down_thresholds, nullptr,
                           work.token, work.expert, work.weight, work.threshold, down_thresholds, nullptr);
        if (code != FLOE_OK) return code;
        const int64_t parts = l.rule.parts, calls = parts * top_k;
        int64_t found[4 * kMostChosen];
        code = floe_moe_step(inner, 1, &l.up, l.q, l.scale, l.zero, &l.gate, &l.down, l.rows, l.experts, l.neurons,
                             l.row_bytes, nullptr, 0, calls, work.token, work.expert, work.weight, work.threshold,
                             down_thresholds, expert_digits, threads, added, found);
        if (code != FLOE_OK) return code;
        for (int64_t c = 0; c < 4 * top_k; c++) counts[c] = -1;
        for (int64_t call = 0; call < calls; call++) {
            if (work.threshold[call] == INFINITY) continue;
            int64_t *to = counts + (parts == 2 ? 2 : 4) * call;
            to[0] = found[2 * call];
            to[1] = found[2 * call + 1];
        }
    }
    for (int64_t i = 0; i < hidden; i++) x[i] += added[i];
    return FLOE_OK;
}
