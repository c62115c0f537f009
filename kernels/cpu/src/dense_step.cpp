// What comes before a layer's experts, for one token and in float32: norm, attention, norm, router.
//
// Torch would take two dozen operations for it, whose calls cost more than their computing at small sizes. Stored
// tokens are taken in spans of kSpan, one after another or by several threads, and added up in one order.
#include "arch/dense_ops.h"
#include "buffers.h"
#include "expert_ops.h"
#include "thread_pool.h"

#include <string.h>

#include <algorithm>
#include <cfloat>
#include <cmath>

namespace floe {
namespace {

constexpr int64_t kItemRows = 64;

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

bool fits(const floe_router &r) {
    if (r.experts < 1 || r.top_k < 1 || r.groups < 1 || r.experts % r.groups) return false;
    if (r.top_groups < 1 || r.top_groups > r.groups || r.top_k > r.top_groups * (r.experts / r.groups)) return false;
    return r.groups == 1 || r.correction == nullptr || r.experts / r.groups > 1; // a pair in each
}

bool fits(const floe_swiglu &s, int64_t hidden) {
    return s.neurons > 0 && is_shape(s.both, 2 * s.neurons, hidden) && is_shape(s.down, hidden, s.neurons);
}

bool fits(const floe_dense_layer &l) {
    if (l.hidden < 1 || l.heads < 1 || l.kv_heads < 1 || l.dim < 2 || l.dim % 2 || l.heads % l.kv_heads) return false;
    if (l.stored < FLOE_KEPT_FLOAT || l.stored > FLOE_KEPT_CODES) return false;
    if (l.window < 0 || (l.q_norm == nullptr) != (l.k_norm == nullptr)) return false;
    if (l.router.weight != nullptr && !fits(l.router)) return false;
    if (l.beside != nullptr && !fits(*l.beside, l.hidden)) return false;
    return is_shape(l.qkv, (l.heads + 2 * l.kv_heads) * l.dim, l.hidden) && is_shape(l.out, l.hidden, l.heads * l.dim);
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

// rope: dim cosines, then as many sines, the first half of which is negated.
void turn(float *head, const float *rope, int64_t dim) {
    const int64_t half = dim / 2;
    const float *sines = rope + dim;
    for (int64_t i = 0; i < half; i++) {
        const float left = head[i], right = head[i + half];
        head[i] = left * rope[i] + right * sines[i];
        head[i + half] = right * rope[i + half] + left * sines[i + half];
    }
}

struct Attention {
    Heads h;
    const float *queries;
    const uint8_t *kv;
    int64_t tokens;
    float *scores; // of each thread
    Share *shares; // (spans, heads)
    float *sums;   // (spans, heads, D)
    const float *sinks;
};

void attend_span(void *opaque, int64_t span, int worker) {
    const Attention &a = *(const Attention *)opaque;
    const int64_t first = span * kSpan, count = a.tokens - first < kSpan ? a.tokens - first : kSpan;
    dense_ops().attend(a.h, a.queries, a.kv + first * a.h.bytes(), count, a.scores + worker * a.h.heads * kSpan,
                       a.shares + span * a.h.heads, a.sums + span * a.h.heads * a.h.dim);
}

// The spans' results in one: out (heads, D), which may be the first span's sums.
void join_spans(const Attention &a, int64_t spans, float *out) {
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
            const float *sums = a.sums + (s * a.h.heads + q) * a.h.dim;
            for (int64_t d = 0; d < a.h.dim; d++)
                out[q * a.h.dim + d] = factor * sums[d] + (s ? out[q * a.h.dim + d] : 0);
        }
    }
}

// Of the logits (experts), in place.
void make_scores(const floe_router &r, float *scores) {
    for (int64_t e = 0; r.bias && e < r.experts; e++) scores[e] += r.bias[e];
    if (r.sigmoid) {
        for (int64_t e = 0; e < r.experts; e++) scores[e] = 1 / (1 + std::exp(-scores[e]));
        return;
    }
    float most = scores[0];
    for (int64_t e = 1; e < r.experts; e++) most = scores[e] > most ? scores[e] : most;
    const float total = dense_ops().exponentials(scores, r.experts, most);
    for (int64_t e = 0; e < r.experts; e++) scores[e] /= total;
}

// The largest of some numbers, which is taken away; of equal ones the first.
int64_t take_best(float *ranked, int64_t count) {
    const int64_t best = std::max_element(ranked, ranked + count) - ranked;
    ranked[best] = -INFINITY;
    return best;
}

// Leave only the experts of the best groups.
void keep_groups(const floe_router &r, float *ranked) {
    const int64_t each = r.experts / r.groups;
    const auto worth = [&](int64_t group) {
        const float *of = ranked + group * each;
        float first = -INFINITY, second = -INFINITY;
        for (int64_t e = 0; e < each; e++)
            if (of[e] > first) second = first, first = of[e];
            else if (of[e] > second) second = of[e];
        return r.correction ? first + second : first;
    };
    for (int64_t left = r.groups; left > r.top_groups; left--) {
        int64_t worst = -1;
        float least = 0;
        for (int64_t group = 0; group < r.groups; group++) {
            const float own = worth(group);
            if (own == -INFINITY) continue; // left out already
            if (worst < 0 || own <= least) worst = group, least = own;
        }
        std::fill_n(ranked + (worst < 0 ? 0 : worst) * each, each, -INFINITY);
    }
}

// The experts with the largest scores and their weights. NaN is larger than any number, as in torch; of equal ones the
// first goes first. ranked: room for all.
void route(const floe_router &r, float *scores, float *ranked, const floe_routed &routed) {
    make_scores(r, scores);
    if (routed.scores) std::copy_n(scores, r.experts, routed.scores);
    for (int64_t e = 0; e < r.experts; e++) {
        const float own = r.correction ? scores[e] + r.correction[e] : scores[e];
        ranked[e] = std::isnan(own) ? INFINITY : own > -FLT_MAX ? own : -FLT_MAX;
    }
    if (r.top_groups < r.groups) keep_groups(r, ranked);
    float sum = 0;
    for (int64_t k = 0; k < r.top_k; k++) {
        routed.index[k] = take_best(ranked, r.experts);
        routed.weights[k] = scores[routed.index[k]];
        sum += routed.weights[k];
    }
    for (int64_t k = 0; r.shares && k < r.top_k; k++) routed.weights[k] /= sum;
    for (int64_t k = 0; r.scale != 1 && k < r.top_k; k++) routed.weights[k] *= r.scale;
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

    Attention a = {{l.heads, l.kv_heads, l.dim, l.stored}, nullptr, nullptr, 0, nullptr, nullptr, nullptr, l.sinks};
    const int64_t first = l.window > 0 && l.window <= position ? position + 1 - l.window : 0;
    a.tokens = position + 1 - first;
    a.kv = (const uint8_t *)kv + first * a.h.bytes();
    const int64_t spans = (a.tokens + kSpan - 1) / kSpan, queries = l.heads * l.dim;
    const int64_t scores = threads * l.heads * kSpan, logits = r.weight != nullptr ? r.experts : 0;
    uint8_t *memory = buffer.take(aligned(4 * l.qkv.rows) + aligned(4 * scores) + aligned(4 * spans * queries) +
                                  aligned(8 * spans * l.heads) + 2 * aligned(4 * logits));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *qkv = carve<float>(memory, l.qkv.rows);
    a.queries = qkv;
    a.scores = carve<float>(memory, scores);
    a.sums = carve<float>(memory, spans * queries);
    a.shares = carve<Share>(memory, spans * l.heads);
    float *router_scores = carve<float>(memory, logits), *ranked = carve<float>(memory, logits);

    for (int64_t i = 0; i < l.hidden; i++) stream[i] = added == nullptr ? x[i] : x[i] + added[i];
    normalize(stream, l.before, l.hidden, l.eps, hidden);
    int code = multiply(l.qkv, hidden, digits, threads, qkv);
    if (code != FLOE_OK) return code;
    prepare_heads(l, qkv);
    for (int64_t h = 0; h < l.heads + l.kv_heads; h++) turn(qkv + h * l.dim, place->rope, l.dim);
    for (int64_t i = 0; i < queries; i++) qkv[i] *= l.scale;
    dense_ops().keep(a.h, qkv + queries, (uint8_t *)kv + position * a.h.bytes());

    parallel_for(a.tokens * a.h.bytes() < kSmall ? 1 : threads, spans, attend_span, &a);
    join_spans(a, spans, a.sums);
    code = multiply(l.out, a.sums, digits, threads, hidden);
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
