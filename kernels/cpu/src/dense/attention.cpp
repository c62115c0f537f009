// Attention of one token, grouped or through a latent vector. Stored tokens are taken in spans of kSpan, one after
// another or by several threads, and added up in one order.
#include "latent.h"
#include "mixers.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <algorithm>
#include <cmath>
#include <optional>

namespace floe {
namespace {

// How many heads of keys, and of values, it projects.
int64_t own_key_heads(const floe_dense_layer &l) { return l.queries_alone ? 0 : l.kv_heads; }

// Norms and limit of the joined queries, keys and values, as some families have them.
void prepare_heads(const floe_dense_layer &l, float *qkv) {
    const int64_t key_heads = own_key_heads(l), queries = l.heads * l.dim, keys = key_heads * l.dim;
    if (l.q_norm != nullptr && l.each_head) {
        for (int64_t h = 0; h < l.heads + key_heads; h++)
            normalize(qkv + h * l.dim, h < l.heads ? l.q_norm : l.k_norm, l.dim, l.eps, qkv + h * l.dim);
    } else if (l.q_norm != nullptr) {
        normalize(qkv, l.q_norm, queries, l.eps, qkv);
        if (keys > 0) normalize(qkv + queries, l.k_norm, keys, l.eps, qkv + queries);
    }
    for (float *v = qkv + queries + keys; l.v_normed && v < qkv + queries + 2 * keys; v += l.dim)
        normalize(v, nullptr, l.dim, l.eps, v);
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

// What the sizes of a token's attention are in a layer.
struct Seen {
    Heads heads;
    int64_t first, tokens, spans;

    Seen(const floe_dense_layer &l, int64_t position)
        : heads{l.heads, l.kv_heads, l.dim, l.stored, l.latent == nullptr ? 0 : l.latent->rank},
          first(l.window > 0 && l.window <= position ? position + 1 - l.window : 0),
          tokens(position + (l.queries_alone ? 0 : 1) - first), spans((tokens + kSpan - 1) / kSpan) {}

    int64_t bytes(const floe_dense_layer &l, int threads) const {
        return aligned(4 * threads * l.heads * kSpan) + aligned(4 * spans * l.heads * heads.value()) +
               aligned(8 * spans * l.heads) + (l.gated ? aligned(4 * l.heads * l.dim) : 0) +
               (l.keys_alone ? aligned(4 * (l.heads + 2 * l.kv_heads) * l.dim) : 0) +
               (l.latent == nullptr ? 0 : Latent::bytes(l, threads));
    }
};

} // namespace

bool is_attention(const floe_dense_layer &l) {
    if (l.heads < 1 || l.kv_heads < 1 || l.dim < 2 || l.heads % l.kv_heads || l.window < 0) return false;
    if (l.stored < FLOE_KEPT_FLOAT || l.stored > FLOE_KEPT_CODES) return false;
    if ((l.q_norm == nullptr) != (l.k_norm == nullptr) && !l.queries_alone) return false;
    if (l.rope_at < 0 || (l.keys_alone && l.gated)) return false;
    if (l.queries_alone && (l.gated || l.keys_alone || l.v_normed || l.latent != nullptr)) return false;
    if (l.latent != nullptr) return !l.gated && !l.keys_alone && !l.v_normed && is_latent(l, *l.latent);
    const int64_t heads = (l.gated ? 2 : 1) * l.heads + (l.keys_alone ? 1 : 2) * own_key_heads(l);
    return l.dim % 2 == 0 && is_shape(l.first, heads * l.dim, l.hidden) && is_shape(l.out, l.hidden, l.heads * l.dim);
}

int64_t attention_bytes(const floe_dense_layer &l, int64_t position, int threads) {
    return Seen(l, position).bytes(l, threads);
}

int attend(const floe_dense_layer &l, const floe_place &place, uint8_t *kv, int digits, int threads, uint8_t *memory,
           float *qkv, float *attended) {
    const Seen seen(l, place.position);
    const int64_t width = seen.heads.bytes(), queries = l.heads * l.dim, keys = own_key_heads(l) * l.dim;
    const float *const rope = place.rope + l.rope_at;
    if (l.keys_alone) {
        float *const whole = carve<float>(memory, queries + 2 * keys);
        std::copy_n(qkv, queries + keys, whole);
        std::copy_n(qkv + queries, keys, whole + queries + keys);
        qkv = whole;
    }
    Attention a = {seen.heads, qkv, kv + seen.first * width, seen.tokens, nullptr, nullptr, nullptr, l.sinks};
    a.scores = carve<float>(memory, threads * l.heads * kSpan);
    a.sums = carve<float>(memory, seen.spans * l.heads * a.h.value());
    a.shares = carve<Share>(memory, seen.spans * l.heads);
    float *const gates = carve<float>(memory, l.gated ? queries : 0);
    if (l.gated) { // keys and values behind the queries, as elsewhere
        std::copy_n(qkv + queries, queries, gates);
        std::copy_n(qkv + 2 * queries, 2 * keys, qkv + queries);
    }
    float *own = qkv + queries; // what is stored of the token
    std::optional<Latent> through;
    if (l.latent != nullptr) through.emplace(l, rope, digits, threads, qkv, memory);
    if (!through) {
        prepare_heads(l, qkv);
        for (int64_t h = 0; h < l.heads + own_key_heads(l); h++) turn(qkv + h * l.dim, rope, l.dim);
        for (int64_t i = 0; i < queries; i++) qkv[i] *= l.scale;
    } else {
        const int code = through->prepare();
        if (code != FLOE_OK) return code;
        a.queries = through->queries, own = through->vector;
    }
    if (!l.queries_alone) dense_ops().keep(a.h, own, kv + place.position * width);
    // The more heads share a key, the more there is to compute by what is read.
    parallel_for(a.tokens * width * (1 + a.h.group() / 8) < kSmall ? 1 : threads, seen.spans, attend_span, &a);
    join_spans(a, seen.spans, through ? a.sums : attended);
    for (int64_t i = 0; l.gated && i < queries; i++) attended[i] /= 1 + std::exp(-gates[i]);
    if (!through) return FLOE_OK;
    const int code = through->release(a.sums);
    std::copy_n(through->out, l.out.row.n, attended);
    return code;
}

} // namespace floe
