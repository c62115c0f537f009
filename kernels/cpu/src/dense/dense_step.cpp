// What comes before a layer's experts, for a token of each of some texts, or some of one in order, in float32: norm,
// mixer, norm, router.
//
// Torch would take two dozen operations for it, whose calls cost more than their computing at small sizes.
#include "mixers.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>

namespace floe {
namespace {

constexpr int64_t kItemRows = 64;
constexpr float kGelu = 1.5957691216057308f; // 2 sqrt(2 / pi): gelu by tanh is x · sigmoid of that times a cubic

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
    if (l.sandwich != nullptr && l.beside == nullptr && l.router.weight == nullptr) return false;
    return l.delta != nullptr ? is_delta(l) : l.convolution != nullptr ? is_convolution(l) : is_attention(l);
}

float mean_of(const float *x, int64_t n) {
    constexpr int64_t kSums = 16; // side by side
    float sums[kSums] = {};
    for (int64_t i = 0; i < n; i++) sums[i % kSums] += x[i];
    return std::accumulate(sums, sums + kSums, 0.0f) / (float)n;
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
        for (int64_t n = 0; n < neurons; n++) {
            const float slope = s.gelu ? kGelu * (gate[n] + 0.044715f * gate[n] * gate[n] * gate[n]) : gate[n];
            both[t * neurons + n] = gate[n] * (up[n] / (1 + std::exp(-slope)));
        }
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

// The experts of each token by x (tokens, H), and on the streams what is added whatever they are.
void route_all(const floe_router &r, const float *x, int64_t hidden, int64_t tokens, int threads, uint8_t *memory,
               const floe_routed &routed) {
    float *scores = carve<float>(memory, tokens * r.experts), *const ranked = carve<float>(memory, r.experts);
    multiply_floats(r.weight, x, tokens, r.experts, hidden, threads, scores);
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
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor * (weight == nullptr ? 1 : weight[i]);
}

void normalize(const float *x, const floe_norm &norm, int64_t n, float eps, float *y) {
    if (norm.centred) {
        const float mean = mean_of(x, n);
        for (int64_t i = 0; i < n; i++) y[i] = x[i] - mean;
        x = y;
    }
    normalize(x, norm.weight, n, eps, y);
    for (int64_t i = 0; norm.bias != nullptr && i < n; i++) y[i] += norm.bias[i];
}

} // namespace floe

using namespace floe;

void floe::close_layer(const floe_dense_layer &l, int64_t tokens, const float *parallel, float *experts,
                       float *stream) {
    const floe_sandwich &s = *l.sandwich;
    for (int64_t t = 0; t < tokens; t++, parallel += l.hidden, experts += l.hidden, stream += l.hidden) {
        if (s.experts != nullptr) normalize(experts, s.experts, l.hidden, l.eps, experts);
        for (int64_t i = 0; i < l.hidden; i++) experts[i] += parallel[i];
        normalize(experts, s.both, l.hidden, l.eps, experts);
        for (int64_t i = 0; i < l.hidden; i++) stream[i] = s.scale * (stream[i] + experts[i]);
    }
}

int floe_dense_check(const floe_dense_layer *layer) { return fits(*layer) ? FLOE_OK : FLOE_BAD_SHAPE; }

int floe_dense_step(const floe_dense_layer *layer, int64_t number, int64_t tokens, const float *x, const float *added,
                    const floe_place *places, int digits, int threads, const floe_routed *routed) {
    thread_local Buffer buffer;
    const floe_dense_layer &l = *layer;
    const floe_router &r = l.router;
    float *const stream = routed->stream, *const hidden = routed->hidden;
    if (!fits(l) || (r.weight != nullptr && (routed->index == nullptr || routed->weights == nullptr)) ||
        (l.sandwich != nullptr && routed->parallel == nullptr))
        return FLOE_BAD_SHAPE;
    if (tokens < 1 || tokens > FLOE_MOST_TOGETHER || number < 0) return FLOE_BAD_SHAPE;
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    int64_t most = 0;
    for (int64_t t = 0; t < tokens; t++) {
        if (places[t].position < 0 || places[t].position >= places[t].capacity) return FLOE_BAD_INDEX;
        if (l.queries_alone && places[t].position < 1) return FLOE_BAD_INDEX; // there is nothing to see
        if ((l.delta != nullptr || l.convolution != nullptr) && places[t].states < 2) return FLOE_BAD_SHAPE;
        const int64_t bytes = mixer_bytes(l, places[t].position, threads);
        most = bytes > most ? bytes : most;
    }
    const int64_t numbers = tokens * l.hidden, asked = r.norm == nullptr ? 0 : aligned(4 * numbers);
    const int64_t logits = r.weight == nullptr ? 0 : asked + aligned(4 * tokens * r.experts) + aligned(4 * r.experts);
    uint8_t *memory = buffer.take(aligned(4 * tokens * l.first.rows) + aligned(4 * tokens * l.out.row.n) +
                                  (most > logits ? most : logits));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *const given = carve<float>(memory, tokens * l.first.rows);
    float *const attended = carve<float>(memory, tokens * l.out.row.n);

    const int64_t width = l.hidden;
    const floe_sandwich *const s = l.sandwich;
    const auto normalize_all = [&](const float *from, const float *weight, float *to) {
        for (int64_t i = 0; i < numbers; i += width) normalize(from + i, weight, width, l.eps, to + i);
    };
    for (int64_t i = 0; i < numbers; i++) stream[i] = added == nullptr ? x[i] : x[i] + added[i];
    for (int64_t i = 0; i < numbers; i += width) normalize(stream + i, l.before, width, l.eps, hidden + i);
    int code = multiply(l.first, hidden, tokens, digits, threads, given);
    for (int64_t t = 0; t < tokens && code == FLOE_OK; t++) {
        float *const own = given + t * l.first.rows, *const out = attended + t * l.out.row.n;
        void *const kv = places[t].kv[number];
        if (l.delta != nullptr)
            code = step_delta(l, places[t], (float *)kv, hidden + t * width, threads, memory, own, out);
        else if (l.convolution != nullptr) step_convolution(l, places[t], (float *)kv, own, out);
        else code = attend(l, places[t], (uint8_t *)kv, digits, threads, memory, own, out);
    }
    if (code == FLOE_OK) code = multiply(l.out, attended, tokens, digits, threads, hidden);
    if (code != FLOE_OK) return code;
    if (s != nullptr) normalize_all(hidden, s->mixed, hidden);
    for (int64_t i = 0; i < numbers; i++) stream[i] += hidden[i];
    const auto join = [&]() { // what every token is given, by what `hidden` holds
        std::fill_n(routed->parallel, numbers, 0.0f);
        if (l.beside == nullptr) return (int)FLOE_OK;
        const int done = add_beside(*l.beside, hidden, tokens, digits, threads, routed->parallel);
        if (s->beside != nullptr) normalize_all(routed->parallel, s->beside, routed->parallel);
        return done;
    };
    if (s != nullptr && s->before != nullptr) {
        normalize_all(stream, s->before, hidden);
        if ((code = join()) != FLOE_OK) return code;
    }
    for (int64_t i = 0; i < numbers; i += width) normalize(stream + i, l.after, width, l.eps, hidden + i);
    if (s != nullptr && s->before == nullptr && (code = join()) != FLOE_OK) return code;
    if (r.weight != nullptr) {
        float *const own = carve<float>(memory, r.norm == nullptr ? 0 : numbers);
        if (r.norm != nullptr) normalize_all(stream, r.norm, own);
        route_all(r, r.norm == nullptr ? hidden : own, width, tokens, threads, memory, *routed);
    }
    if (s != nullptr && r.weight == nullptr) { // nothing else joins
        std::fill_n(hidden, numbers, 0.0f);
        close_layer(l, tokens, routed->parallel, hidden, stream);
    }
    if (l.beside == nullptr || s != nullptr) return FLOE_OK;
    return add_beside(*l.beside, hidden, tokens, digits, threads, stream);
}
