// What comes before a layer's experts, for one token and in float32: norm, attention, norm, router.
//
// Torch would take two dozen operations for it, whose calls cost more than their computing at small sizes. Stored
// tokens are taken in spans of kSpan, one after another or by several threads, and added up in one order.
#include "latent.h"
#include "parts.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <string.h>

#include <cmath>
#include <optional>

namespace floe {
namespace {

constexpr int64_t kItemRows = 64;

bool fits(const floe_swiglu &s, int64_t hidden) {
    return s.neurons > 0 && is_shape(s.both, 2 * s.neurons, hidden) && is_shape(s.down, hidden, s.neurons);
}

bool fits(const floe_dense_layer &l) {
    if (l.hidden < 1 || l.heads < 1 || l.kv_heads < 1 || l.dim < 2 || l.heads % l.kv_heads) return false;
    if (l.stored < FLOE_KEPT_FLOAT || l.stored > FLOE_KEPT_CODES) return false;
    if (l.window < 0 || (l.q_norm == nullptr) != (l.k_norm == nullptr)) return false;
    if (l.router.weight != nullptr && !is_router(l.router)) return false;
    if (l.beside != nullptr && !fits(*l.beside, l.hidden)) return false;
    if (l.latent != nullptr) return is_latent(l, *l.latent);
    return l.dim % 2 == 0 && is_shape(l.qkv, (l.heads + 2 * l.kv_heads) * l.dim, l.hidden) &&
           is_shape(l.out, l.hidden, l.heads * l.dim);
}

struct Floats {
    const float *w, *x;
    int64_t rows, n;
    float *y;
};

void multiply_floats(const float *w, const float *x, int64_t rows, int64_t n, int threads, float *y) {
    Floats floats = {w, x, rows, n, y};
    const auto work = [](void *opaque, int64_t item, int) {
        const Floats &f = *(const Floats *)opaque;
        const int64_t first = item * kItemRows, count = f.rows - first < kItemRows ? f.rows - first : kItemRows;
        dense_ops().multiply(f.w + first * f.n, f.x, count, f.n, f.y + first);
    };
    parallel_for(4 * rows * n < kSmall ? 1 : threads, (rows + kItemRows - 1) / kItemRows, work, &floats);
}

// Norms and limit of the joined queries, keys and values, as some families have them.
void prepare_heads(const floe_dense_layer &l, float *qkv) {
    const int64_t queries = l.heads * l.dim, keys = l.kv_heads * l.dim;
    if (l.q_norm != nullptr && l.each_head) {
        for (int64_t h = 0; h < l.heads + l.kv_heads; h++)
            normalize(qkv + h * l.dim, h < l.heads ? l.q_norm : l.k_norm, l.dim, l.eps, qkv + h * l.dim);
    } else if (l.q_norm != nullptr) {
        normalize(qkv, l.q_norm, queries, l.eps, qkv);
        normalize(qkv + queries, l.k_norm, keys, l.eps, qkv + queries);
    }
    for (int64_t i = 0; l.clip < INFINITY && i < queries + 2 * keys; i++) // NaN is left as it is
        qkv[i] = qkv[i] < -l.clip ? -l.clip : qkv[i] > l.clip ? l.clip : qkv[i];
}

struct Attention {
    Heads h;
    const float *queries;
    const uint8_t *kv;
    int64_t tokens;
    float *scores; // of each thread
    Share *shares; // (spans, heads)
    float *sums;   // (spans, heads, V)
    const float *sinks;
};

void attend_span(void *opaque, int64_t span, int worker) {
    const Attention &a = *(const Attention *)opaque;
    const int64_t first = span * kSpan, count = a.tokens - first < kSpan ? a.tokens - first : kSpan;
    dense_ops().attend(a.h, a.queries, a.kv + first * a.h.bytes(), count, a.scores + worker * a.h.heads * kSpan,
                       a.shares + span * a.h.heads, a.sums + span * a.h.heads * a.h.value());
}

// The spans' results in one: out (heads, V), which may be the first span's sums.
void join_spans(const Attention &a, int64_t spans, float *out) {
    const int64_t width = a.h.value();
    for (int64_t q = 0; q < a.h.heads; q++) {
        float most = a.shares[q].most;
        if (a.sinks != nullptr && a.sinks[q] > most) most = a.sinks[q];
        for (int64_t s = 1; s < spans; s++)
            if (a.shares[s * a.h.heads + q].most > most) most = a.shares[s * a.h.heads + q].most;
        float total = a.sinks == nullptr ? 0 : std::exp(a.sinks[q] - most);
        for (int64_t s = 0; s < spans; s++) {
            Share &share = a.shares[s * a.h.heads + q];
            share.most = std::exp(share.most - most); // the span's factor
            total += share.most * share.total;
        }
        for (int64_t s = 0; s < spans; s++) {
            const float factor = a.shares[s * a.h.heads + q].most / total;
            const float *sums = a.sums + (s * a.h.heads + q) * width;
            for (int64_t d = 0; d < width; d++) out[q * width + d] = factor * sums[d] + (s ? out[q * width + d] : 0);
        }
    }
}

// y (H) += what every token is given besides experts, of x (H).
int add_beside(const floe_swiglu &s, const float *x, int digits, int threads, float *y) {
    thread_local Buffer buffer;
    const int64_t hidden = s.down.rows;
    uint8_t *memory = buffer.take(aligned(8 * s.neurons) + aligned(4 * hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *both = carve<float>(memory, 2 * s.neurons), *out = carve<float>(memory, hidden);
    int code = multiply(s.both, x, digits, threads, both);
    if (code != FLOE_OK) return code;
    for (int64_t n = 0; n < s.neurons; n++) both[n] *= both[s.neurons + n] / (1 + std::exp(-both[n]));
    code = multiply(s.down, both, digits, threads, out);
    if (code != FLOE_OK) return code;
    float factor = 1;
    if (s.scale != nullptr) {
        multiply_floats(s.scale, x, 1, hidden, 1, &factor);
        factor = 1 / (1 + std::exp(-factor));
    }
    for (int64_t i = 0; i < hidden; i++) y[i] += factor * out[i];
    return FLOE_OK;
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

int multiply(const floe_matrix &m, const float *x, int digits, int threads, float *y) {
    if (m.row.bits == 32) {
        multiply_floats((const float *)m.q, x, m.rows, m.row.n, threads, y);
        for (int64_t i = 0; m.bias != nullptr && i < m.rows; i++) y[i] += m.bias[i];
        return FLOE_OK;
    }
    return floe_linear(x, 1, &m, digits, m.rows * row_bytes(m) < kSmall ? 1 : threads, y);
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

int floe_dense_step(const floe_dense_layer *layer, const float *x, const float *added, void *kv,
                    const floe_place *place, int digits, int threads, const floe_routed *routed) {
    thread_local Buffer buffer;
    const floe_dense_layer &l = *layer;
    const int64_t position = place->position;
    float *const stream = routed->stream, *const hidden = routed->hidden;
    const floe_router &r = l.router;
    if (!fits(l) || (r.weight != nullptr && (routed->index == nullptr || routed->weights == nullptr)))
        return FLOE_BAD_SHAPE;
    if (position < 0 || position >= place->capacity) return FLOE_BAD_INDEX;
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;

    const floe_latent *const latent = l.latent;
    const Heads heads = {l.heads, l.kv_heads, l.dim, l.stored, latent == nullptr ? 0 : latent->rank};
    Attention a = {heads, nullptr, nullptr, 0, nullptr, nullptr, nullptr, l.sinks};
    const int64_t first = l.window > 0 && l.window <= position ? position + 1 - l.window : 0;
    a.tokens = position + 1 - first;
    a.kv = (const uint8_t *)kv + first * a.h.bytes();
    const int64_t spans = (a.tokens + kSpan - 1) / kSpan, queries = l.heads * l.dim,
                  sums = spans * l.heads * a.h.value();
    const int64_t scores = threads * l.heads * kSpan, logits = r.weight != nullptr ? r.experts : 0;
    uint8_t *memory =
        buffer.take(aligned(4 * l.qkv.rows) + aligned(4 * scores) + aligned(4 * sums) + aligned(8 * spans * l.heads) +
                    2 * aligned(4 * logits) + (latent == nullptr ? 0 : Latent::bytes(l, threads)));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *qkv = carve<float>(memory, l.qkv.rows);
    a.queries = qkv;
    a.scores = carve<float>(memory, scores);
    a.sums = carve<float>(memory, sums);
    a.shares = carve<Share>(memory, spans * l.heads);
    float *router_scores = carve<float>(memory, logits), *ranked = carve<float>(memory, logits);

    for (int64_t i = 0; i < l.hidden; i++) stream[i] = added == nullptr ? x[i] : x[i] + added[i];
    normalize(stream, l.before, l.hidden, l.eps, hidden);
    int code = multiply(l.qkv, hidden, digits, threads, qkv);
    if (code != FLOE_OK) return code;
    float *own = qkv + queries, *attended = a.sums; // what is stored of the token, and what heads have seen
    std::optional<Latent> through;
    if (latent != nullptr) through.emplace(l, place->rope, digits, threads, qkv, memory);
    if (!through) {
        prepare_heads(l, qkv);
        for (int64_t h = 0; h < l.heads + l.kv_heads; h++) turn(qkv + h * l.dim, place->rope, l.dim);
        for (int64_t i = 0; i < queries; i++) qkv[i] *= l.scale;
    } else {
        code = through->prepare();
        if (code != FLOE_OK) return code;
        a.queries = through->queries, own = through->vector, attended = through->out;
    }
    dense_ops().keep(a.h, own, (uint8_t *)kv + position * a.h.bytes());

    // The more heads share a key, the more there is to compute by what is read.
    parallel_for(a.tokens * a.h.bytes() * (1 + a.h.group() / 8) < kSmall ? 1 : threads, spans, attend_span, &a);
    join_spans(a, spans, a.sums);
    if (through) code = through->release(a.sums);
    if (code != FLOE_OK) return code;
    code = multiply(l.out, attended, digits, threads, hidden);
    if (code != FLOE_OK) return code;
    for (int64_t i = 0; i < l.hidden; i++) stream[i] += hidden[i];
    normalize(stream, l.after, l.hidden, l.eps, hidden);
    if (r.weight != nullptr) {
        multiply_floats(r.weight, hidden, r.experts, l.hidden, threads, router_scores);
        route(r, router_scores, ranked, *routed);
        for (int64_t k = 0; r.down_bias != nullptr && k < r.top_k; k++) {
            const float *const bias = r.down_bias + routed->index[k] * l.hidden;
            const float weight = routed->weights[k];
            for (int64_t i = 0; i < l.hidden; i++) stream[i] += weight * bias[i];
        }
    }
    return l.beside == nullptr ? (int)FLOE_OK : add_beside(*l.beside, hidden, digits, threads, stream);
}
