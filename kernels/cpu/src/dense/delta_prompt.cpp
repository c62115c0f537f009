// The gated delta rule of a prompt: kSpan tokens at a time as products of matrices (arXiv 2412.06464, section 3.3),
// with the convolution before it and the norm and gate behind it.
//
// An item is a head of queries and keys, with its heads of values, from the first token to the last: all that it needs
// of a span stays in the second cache, and no thread waits for another one.
#include "parts.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <string.h>

#include <cmath>
#include <initializer_list>

namespace floe {
namespace {

constexpr int64_t kRows = 4; // of a triangular matrix that are multiplied together

struct Prompt {
    const floe_delta &d;
    int64_t heads, kv_heads, dim;
    float scale;
    int64_t tokens;
    const float *qkv;
    int64_t qkv_stride;
    const float *gates;
    int64_t gates_stride;
    const float *before;
    float *const *along;
    float *after, *out;
    uint8_t *scratch = nullptr;
    int64_t scratch_bytes = 0;

    int64_t group() const { return heads / kv_heads; }
    int64_t channels() const { return 2 * kv_heads * d.key_dim + heads * dim; }
    int64_t window() const { return (d.taps - 1) * channels(); } // numbers of a state before those of the heads
    int64_t head() const { return d.key_dim * dim; }             // numbers of a head's state
    float *state(int64_t at) const { return after + window() + at * head(); }

    // What the convolution is given of a token, from a channel on; of those before the first one, from the state.
    const float *given(int64_t token, int64_t channel) const {
        return token < 0 ? before + (token + d.taps - 1) * channels() + channel : qkv + token * qkv_stride + channel;
    }
};

// One span of a head of queries and keys. kk, qk: the products of keys and queries with the keys up to their own.
struct Span {
    int64_t first, count;
    float *q, *k, *columns, *kk, *qk, *system, *seen, *changes, *found, *gate;

    static int64_t bytes(const Prompt &p) {
        return 3 * aligned(4 * kSpan * p.d.key_dim) + 4 * aligned(4 * kSpan * kSpan) + 3 * aligned(4 * kSpan * p.dim);
    }

    Span(const Prompt &p, uint8_t *memory) : first(0), count(0) {
        for (float **part : {&q, &k, &columns}) *part = carve<float>(memory, kSpan * p.d.key_dim);
        for (float **part : {&kk, &qk, &system, &seen}) *part = carve<float>(memory, kSpan * kSpan);
        for (float **part : {&changes, &found, &gate}) *part = carve<float>(memory, kSpan * p.dim);
    }
};

// out (count, width): `width` channels of a span behind the convolution.
void convolve(const Prompt &p, const Span &s, int64_t channel, int64_t width, float *out) {
    const int64_t taps = p.d.taps, channels = p.channels();
    for (int64_t t = 0; t < s.count; t++) {
        float *const to = out + t * width;
        for (int64_t tap = 0; tap < taps; tap++) {
            const float *const from = p.given(s.first + t + tap - taps + 1, channel);
            const float *const factors = p.d.conv + tap * channels + channel;
            for (int64_t i = 0; i < width; i++) to[i] = (tap ? to[i] : 0) + from[i] * factors[i];
        }
    }
    silu_all(out, s.count * width);
}

// c (rows, columns) = m · b; b and c have the same stride.
void product(const float *m, int64_t m_stride, const float *b, int64_t rows, int64_t inner, int64_t columns, float *c,
             int64_t c_stride) {
    for (int64_t r = 0; r < rows; r++) memset(c + r * c_stride, 0, (size_t)columns * sizeof(float));
    dense_ops().add_product(m, m_stride, b, c_stride, rows, inner, columns, c, c_stride);
}

void products_of_keys(const Prompt &p, const Span &s) {
    const int64_t keys = p.d.key_dim;
    for (int64_t i = 0; i < keys; i++)
        for (int64_t t = 0; t < s.count; t++) s.columns[i * kSpan + t] = s.k[t * keys + i];
    for (int64_t t = 0; t < s.count;
         t += kSpan / 4) { // what lies above the diagonal is left out as far as that is easy
        const int64_t end = t + kSpan / 4 < s.count ? t + kSpan / 4 : s.count;
        product(s.k + t * keys, keys, s.columns, end - t, keys, end, s.kk + t * kSpan, kSpan);
        product(s.q + t * keys, keys, s.columns, end - t, keys, end, s.qk + t * kSpan, kSpan);
    }
}

// c (count, D) += m (count, kSpan) · b (count, D), m zero above the diagonal; b may be c if it is zero on it too.
void add_triangle(const Span &s, const float *m, const float *b, int64_t dim, float *c) {
    for (int64_t t = 0; t < s.count; t += kRows) {
        const int64_t rows = s.count - t < kRows ? s.count - t : kRows;
        dense_ops().add_product(m + t * kSpan, kSpan, b, dim, rows, t, dim, c + t * dim, dim);
        for (int64_t r = t; r < t + rows; r++)
            dense_ops().add_product(m + r * kSpan + t, kSpan, b + t * dim, dim, 1, r - t + (b != c), dim, c + r * dim,
                                    dim);
    }
}

void scale_rows(float *x, int64_t rows, int64_t n, const float *factors) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < n; i++) x[r * n + i] *= factors[r];
}

void one_head(const Prompt &p, const Span &s, int64_t head) {
    const DenseOps &ops = dense_ops();
    const int64_t keys = p.d.key_dim, dim = p.dim, count = s.count;
    float faded[kSpan], beta[kSpan], left[kSpan], later[kSpan]; // faded: logarithms of what is left since the start
    for (int64_t t = 0; t < count; t++) {
        const float *const gates = p.gates + (s.first + t) * p.gates_stride;
        beta[t] = 1 / (1 + std::exp(-gates[head]));
        faded[t] = (t ? faded[t - 1] : 0) - p.d.decay[head] * softplus(gates[p.heads + head] + p.d.bias[head]);
        left[t] = std::exp(faded[t]);
    }
    for (int64_t t = 0; t < count; t++) {
        float between[kSpan];
        for (int64_t i = 0; i <= t; i++) between[i] = faded[t] - faded[i];
        ops.exponentials(between, t + 1, 0);
        float *const system = s.system + t * kSpan, *const seen = s.seen + t * kSpan;
        for (int64_t i = 0; i <= t; i++) {
            system[i] = -beta[t] * s.kk[t * kSpan + i] * between[i];
            seen[i] = s.qk[t * kSpan + i] * between[i];
        }
        later[t] = std::exp(faded[count - 1] - faded[t]);
    }
    float *const state = p.state(head);
    convolve(p, s, 2 * p.kv_heads * keys + head * dim, dim, s.changes);
    product(s.k, keys, state, count, keys, dim, s.found, dim);
    for (int64_t t = 0; t < count; t++)
        for (int64_t i = t * dim; i < (t + 1) * dim; i++)
            s.changes[i] = beta[t] * (s.changes[i] - left[t] * s.found[i]);
    add_triangle(s, s.system, s.changes, dim, s.changes); // of each token's change those before it are taken
    product(s.q, keys, state, count, keys, dim, s.found, dim);
    scale_rows(s.found, count, dim, left);
    add_triangle(s, s.seen, s.changes, dim, s.found);
    scale_rows(s.changes, count, dim, later);
    for (int64_t i = 0; i < p.head(); i++) state[i] *= left[count - 1];
    ops.add_product(s.columns, kSpan, s.changes, dim, keys, count, dim, state, dim);

    for (int64_t t = 0; t < count; t++)
        memcpy(s.gate + t * dim, p.qkv + (s.first + t) * p.qkv_stride + p.channels() + head * dim, (size_t)(4 * dim));
    silu_all(s.gate, count * dim);
    for (int64_t t = 0; t < count; t++) {
        float *const out = p.out + ((s.first + t) * p.heads + head) * dim;
        normalize(s.found + t * dim, p.d.norm, dim, p.d.eps, out);
        for (int64_t i = 0; i < dim; i++) out[i] *= s.gate[t * dim + i];
    }
}

// The part of a head of queries and keys in the state behind the first tokens, where `to` is not the last one.
void keep_state(const Prompt &p, int64_t group, int64_t tokens, float *to) {
    const int64_t keys = p.d.key_dim, heads = p.group(), queries = p.kv_heads * keys;
    const auto keep = [&](int64_t channel, int64_t width) {
        for (int64_t t = 0; t + 1 < p.d.taps; t++)
            memcpy(to + t * p.channels() + channel, p.given(tokens - p.d.taps + 1 + t, channel), (size_t)(4 * width));
    };
    keep(group * keys, keys);
    keep(queries + group * keys, keys);
    keep(2 * queries + group * heads * p.dim, heads * p.dim);
    if (to == p.after) return;
    memcpy(to + p.window() + group * heads * p.head(), p.state(group * heads), (size_t)(4 * heads * p.head()));
}

void one_group(void *opaque, int64_t group, int worker) {
    const Prompt &p = *(const Prompt *)opaque;
    const int64_t keys = p.d.key_dim, heads = p.group();
    Span s(p, p.scratch + worker * p.scratch_bytes);
    memcpy(p.state(group * heads), p.before + p.window() + group * heads * p.head(), (size_t)(4 * heads * p.head()));
    for (; s.first < p.tokens; s.first += kSpan) {
        float *const kept = s.first ? p.along[s.first / kSpan - 1] : nullptr;
        if (kept != nullptr) keep_state(p, group, s.first, kept);
        s.count = p.tokens - s.first < kSpan ? p.tokens - s.first : kSpan;
        convolve(p, s, group * keys, keys, s.q);
        convolve(p, s, (p.kv_heads + group) * keys, keys, s.k);
        for (int64_t t = 0; t < s.count; t++) {
            unit(s.q + t * keys, keys, p.scale);
            unit(s.k + t * keys, keys, 1);
        }
        products_of_keys(p, s);
        for (int64_t h = 0; h < heads; h++) one_head(p, s, group * heads + h);
    }
    keep_state(p, group, p.tokens, p.after);
}

} // namespace
} // namespace floe

using namespace floe;

int floe_delta_rule(const floe_delta *delta, int64_t heads, int64_t kv_heads, int64_t dim, float scale, int64_t tokens,
                    const float *qkv, int64_t qkv_stride, const float *gates, int64_t gates_stride, const float *before,
                    float *const *along, int threads, float *after, float *out) {
    thread_local Buffer buffer;
    if (heads < 1 || kv_heads < 1 || dim < 1 || heads % kv_heads || delta->key_dim < 1 || delta->taps < 2 ||
        tokens < 1 || (tokens > kSpan && along == nullptr))
        return FLOE_BAD_SHAPE;
    Prompt p = {*delta,     heads, kv_heads,     dim,    scale, tokens, qkv,
                qkv_stride, gates, gates_stride, before, along, after,  out};
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    p.scratch_bytes = Span::bytes(p);
    p.scratch = buffer.take(threads * p.scratch_bytes);
    if (p.scratch == nullptr) return FLOE_NO_MEMORY;
    parallel_for(threads, kv_heads, one_group, &p);
    return FLOE_OK;
}
