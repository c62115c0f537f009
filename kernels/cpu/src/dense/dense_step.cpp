// What comes before a layer's experts, for a token of each of some texts, in float32: norm, mixer, norm, router.
//
// Torch would take two dozen operations for it, whose calls cost more than their computing at small sizes.
#include "mixers.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace floe {
namespace {

constexpr int64_t kItemRows = 64;

bool fits(const floe_swiglu &s, int64_t hidden) {
    return s.neurons > 0 && is_shape(s.both, 2 * s.neurons, hidden) && is_shape(s.down, hidden, s.neurons);
}

// Bytes of scratch of a token's mixer.
int64_t mixer_bytes(const floe_dense_layer &l, int64_t position, int threads) {
    return l.delta != nullptr ? delta_bytes(l) : l.convolution != nullptr ? 0 : attention_bytes(l, position, threads);
}

bool fits(const floe_dense_layer &l) {
    if (l.hidden < 1) return false;
    if (l.router.weight != nullptr && !is_router(l.router)) return false;
    if (l.beside != nullptr && !fits(*l.beside, l.hidden)) return false;
    return l.delta != nullptr ? is_delta(l) : l.convolution != nullptr ? is_convolution(l) : is_attention(l);
}

struct Floats {
    const float *w, *x;
    int64_t tokens, rows, n;
    float *y;
};

void multiply_floats(const float *w, const float *x, int64_t tokens, int64_t rows, int64_t n, int threads, float *y) {
    Floats floats = {w, x, tokens, rows, n, y};
    const auto work = [](void *opaque, int64_t item, int) {
        const Floats &f = *(const Floats *)opaque;
        const int64_t first = item * kItemRows, count = f.rows - first < kItemRows ? f.rows - first : kItemRows;
        for (int64_t t = 0; t < f.tokens; t++)
            dense_ops().multiply(f.w + first * f.n, f.x + t * f.n, count, f.n, f.y + t * f.rows + first);
    };
    parallel_for(4 * rows * n < kSmall ? 1 : threads, (rows + kItemRows - 1) / kItemRows, work, &floats);
}

// y (tokens, H) += what every token is given besides experts, of x (tokens, H).
int add_beside(const floe_swiglu &s, const float *x, int64_t tokens, int digits, int threads, float *y) {
    thread_local Buffer buffer;
    const int64_t hidden = s.down.rows, neurons = s.neurons;
    uint8_t *memory = buffer.take(aligned(8 * tokens * neurons) + aligned(4 * tokens * hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *both = carve<float>(memory, 2 * tokens * neurons), *out = carve<float>(memory, tokens * hidden);
    int code = multiply(s.both, x, tokens, digits, threads, both);
    if (code != FLOE_OK) return code;
    for (int64_t t = 0; t < tokens; t++) { // each token's go where those of earlier ones were
        const float *const gate = both + 2 * t * neurons, *const up = gate + neurons;
        for (int64_t n = 0; n < neurons; n++) both[t * neurons + n] = gate[n] * (up[n] / (1 + std::exp(-gate[n])));
    }
    code = multiply(s.down, both, tokens, digits, threads, out);
    if (code != FLOE_OK) return code;
    for (int64_t t = 0; t < tokens; t++, x += hidden, y += hidden, out += hidden) {
        float factor = 1;
        if (s.scale != nullptr) {
            multiply_floats(s.scale, x, 1, 1, hidden, 1, &factor);
            factor = 1 / (1 + std::exp(-factor));
        }
        for (int64_t i = 0; i < hidden; i++) y[i] += factor * out[i];
    }
    return FLOE_OK;
}

// The experts of each token of hidden (tokens, H), and on the streams what is added whatever they are.
void route_all(const floe_router &r, int64_t hidden, int64_t tokens, int threads, uint8_t *memory,
               const floe_routed &routed) {
    float *scores = carve<float>(memory, tokens * r.experts), *const ranked = carve<float>(memory, r.experts);
    multiply_floats(r.weight, routed.hidden, tokens, r.experts, hidden, threads, scores);
    floe_routed one = routed;
    for (int64_t t = 0; t < tokens; t++, scores += r.experts) {
        route(r, scores, ranked, one);
        for (int64_t k = 0; r.down_bias != nullptr && k < r.top_k; k++) {
            const float *const bias = r.down_bias + one.index[k] * hidden;
            for (int64_t i = 0; i < hidden; i++) one.stream[i] += one.weights[k] * bias[i];
        }
        one.stream += hidden, one.index += r.top_k, one.weights += r.top_k;
        if (one.scores != nullptr) one.scores += r.experts;
    }
}

} // namespace

const DenseOps &dense_ops() {
    const DenseOps *const all[] = {dense_avx512(), dense_avx2()};
    for (const DenseOps *ops : all)
        if (ops != nullptr && strcmp(ops->name, row_ops().name) == 0) return *ops;
    return *dense_portable();
}

int64_t row_bytes(const floe_matrix &m) {
    if (m.row.bits == 32) return m.row.n > 0 ? 4 * m.row.n : (int64_t)FLOE_BAD_SHAPE;
    return m.row.bits == 16 ? (int64_t)FLOE_BAD_SHAPE : code_bytes(m.row);
}

bool is_shape(const floe_matrix &m, int64_t rows, int64_t columns) {
    return m.rows == rows && m.row.n == columns && row_bytes(m) > 0;
}

int multiply(const floe_matrix &m, const float *x, int64_t tokens, int digits, int threads, float *y) {
    if (m.row.bits == 32) {
        multiply_floats((const float *)m.q, x, tokens, m.rows, m.row.n, threads, y);
        for (int64_t t = 0; m.bias != nullptr && t < tokens; t++)
            for (int64_t i = 0; i < m.rows; i++) y[t * m.rows + i] += m.bias[i];
        return FLOE_OK;
    }
    return floe_linear(x, tokens, &m, digits, m.rows * row_bytes(m) < kSmall ? 1 : threads, y);
}

void normalize(const float *x, const float *weight, int64_t n, float eps, float *y) {
    float squares;
    dense_ops().multiply(x, x, 1, n, &squares);
    const float factor = 1.0f / std::sqrt(squares / (float)n + eps);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor * weight[i];
}

} // namespace floe

using namespace floe;

int floe_dense_check(const floe_dense_layer *layer) { return fits(*layer) ? FLOE_OK : FLOE_BAD_SHAPE; }

int floe_dense_step(const floe_dense_layer *layer, int64_t number, int64_t tokens, const float *x, const float *added,
                    const floe_place *places, int digits, int threads, const floe_routed *routed) {
    thread_local Buffer buffer;
    const floe_dense_layer &l = *layer;
    const floe_router &r = l.router;
    float *const stream = routed->stream, *const hidden = routed->hidden;
    if (!fits(l) || (r.weight != nullptr && (routed->index == nullptr || routed->weights == nullptr)))
        return FLOE_BAD_SHAPE;
    if (tokens < 1 || tokens > FLOE_MOST_TOGETHER || number < 0) return FLOE_BAD_SHAPE;
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    int64_t most = 0;
    for (int64_t t = 0; t < tokens; t++) {
        if (places[t].position < 0 || places[t].position >= places[t].capacity) return FLOE_BAD_INDEX;
        const int64_t bytes = mixer_bytes(l, places[t].position, threads);
        most = bytes > most ? bytes : most;
    }
    const int64_t logits = r.weight == nullptr ? 0 : aligned(4 * tokens * r.experts) + aligned(4 * r.experts);
    uint8_t *memory = buffer.take(aligned(4 * tokens * l.first.rows) + aligned(4 * tokens * l.out.row.n) +
                                  (most > logits ? most : logits));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *const given = carve<float>(memory, tokens * l.first.rows);
    float *const attended = carve<float>(memory, tokens * l.out.row.n);

    const int64_t width = l.hidden, numbers = tokens * width;
    for (int64_t i = 0; i < numbers; i++) stream[i] = added == nullptr ? x[i] : x[i] + added[i];
    for (int64_t i = 0; i < numbers; i += width) normalize(stream + i, l.before, width, l.eps, hidden + i);
    int code = multiply(l.first, hidden, tokens, digits, threads, given);
    for (int64_t t = 0; t < tokens && code == FLOE_OK; t++) {
        float *const own = given + t * l.first.rows, *const out = attended + t * l.out.row.n;
        void *const kv = places[t].kv[number];
        if (l.delta != nullptr)
            code = step_delta(l, places[t].position, (float *)kv, hidden + t * width, threads, memory, own, out);
        else if (l.convolution != nullptr) step_convolution(l, places[t].position, (float *)kv, own, out);
        else code = attend(l, places[t], (uint8_t *)kv, digits, threads, memory, own, out);
    }
    if (code == FLOE_OK) code = multiply(l.out, attended, tokens, digits, threads, hidden);
    if (code != FLOE_OK) return code;
    for (int64_t i = 0; i < numbers; i++) stream[i] += hidden[i];
    for (int64_t i = 0; i < numbers; i += width) normalize(stream + i, l.after, width, l.eps, hidden + i);
    if (r.weight != nullptr) route_all(r, width, tokens, threads, memory, *routed);
    return l.beside == nullptr ? (int)FLOE_OK : add_beside(*l.beside, hidden, tokens, digits, threads, stream);
}
