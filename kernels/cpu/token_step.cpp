// A token's way through layer after layer: each one's dense part, then its experts, without coming back in between.
#include "buffers.h"
#include "floe.h"

using namespace floe;

namespace {

constexpr int64_t kMostChosen = 256;
constexpr double kMostEase = 1000.0; // engine/selection.py

// What is computed of a router's choice, as engine/work.py's Plan has it.
struct Work {
    int64_t token[2 * kMostChosen], expert[2 * kMostChosen], place[2 * kMostChosen], calls = 0;
    float weight[2 * kMostChosen], threshold[2 * kMostChosen], down_threshold[2 * kMostChosen];
};

void plan(const floe_expert_layer &l, int64_t top_k, const int64_t *index, const float *weights, Work &work) {
    double sum = 0;
    for (int64_t k = 0; k < top_k; k++) sum += weights[k];
    const double mean = sum / (double)top_k, high = l.major > l.drop ? l.major : l.drop;
    for (int64_t k = 0; k < top_k; k++) {
        const double w = weights[k];
        // Written so that a weight that is not a number stays, and is noticed.
        const int64_t halves = !(w < l.drop * mean) + !(w < high * mean);
        double ease = 1;
        if (l.weighed) {
            ease = w == 0 ? kMostEase : mean / w;
            if (ease > kMostEase) ease = kMostEase;
        }
        for (int64_t part = 0; part < (halves < l.parts ? halves : l.parts); part++) {
            const int64_t expert = l.parts * index[k] + part, call = work.calls++;
            work.token[call] = 0;
            work.expert[call] = expert;
            work.place[call] = l.parts * k + part;
            work.weight[call] = weights[k];
            if (expert < 0 || expert >= l.experts) continue; // the step will say so
            work.threshold[call] = (float)((double)l.thresholds[expert] * ease);
            if (l.down_thresholds) work.down_threshold[call] = (float)((double)l.down_thresholds[expert] * ease);
        }
    }
}

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
        if (l.parts < 1 || l.parts > 2 || l.experts != l.parts * d.experts || l.up.n != hidden) return FLOE_BAD_SHAPE;
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
        plan(l, top_k, index, weights, work);
        int64_t found[4 * kMostChosen];
        code = floe_moe_step(inner, 1, &l.up, l.q, l.scale, l.zero, &l.gate, &l.down, l.rows, l.experts, l.neurons,
                             l.row_bytes, nullptr, 0, work.calls, work.token, work.expert, work.weight, work.threshold,
                             l.down_thresholds ? work.down_threshold : nullptr, expert_digits, threads, added, found);
        if (code != FLOE_OK) return code;
        for (int64_t c = 0; c < 4 * top_k; c++) counts[c] = -1;
        for (int64_t call = 0; call < work.calls; call++) {
            const int64_t to = l.parts == 2 ? 2 * work.place[call] : 4 * work.place[call];
            counts[to] = found[2 * call];
            counts[to + 1] = found[2 * call + 1];
        }
    }
    for (int64_t i = 0; i < hidden; i++) x[i] += added[i];
    return FLOE_OK;
}
