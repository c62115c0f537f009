#include "mixers.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <string.h>

#include <cmath>

namespace floe {
namespace {

constexpr float kLeast = 1e-6f; // added to the squares of queries and keys

struct Sizes {
    int64_t keys, channels, head, state;

    explicit Sizes(const floe_dense_layer &l)
        : keys(l.kv_heads * l.delta->key_dim), channels(2 * keys + l.heads * l.dim), head(l.delta->key_dim * l.dim),
          state((l.delta->taps - 1) * channels + l.heads * head) {}
};

struct OneToken {
    const floe_dense_layer &l;
    Sizes of;
    const float *window, *before, *gates; // window: the tokens before, as projected
    float *qkv, *after, *mixed, *out;
};

constexpr int64_t kBlock = 512; // channels

void convolve(void *opaque, int64_t block, int) {
    const OneToken &w = *(const OneToken *)opaque;
    const floe_delta &d = *w.l.delta;
    const int64_t channels = w.of.channels, first = block * kBlock;
    const int64_t end = first + kBlock < channels ? first + kBlock : channels;
    const float *const last = d.conv + (d.taps - 1) * channels;
    for (int64_t c = first; c < end; c++) w.mixed[c] = w.qkv[c] * last[c];
    for (int64_t t = 0; t + 1 < d.taps; t++)
        for (int64_t c = first; c < end; c++) w.mixed[c] += w.window[t * channels + c] * d.conv[t * channels + c];
    silu_all(w.mixed + first, end - first);
}

void one_head(void *opaque, int64_t head, int) {
    const OneToken &w = *(const OneToken *)opaque;
    const floe_delta &d = *w.l.delta;
    const int64_t dim = w.l.dim, key_head = head / (w.l.heads / w.l.kv_heads), at = head * w.of.head;
    const float *const q = w.mixed + key_head * d.key_dim, *const k = q + w.of.keys;
    const float *const v = w.mixed + 2 * w.of.keys + head * dim;
    const float beta = 1 / (1 + std::exp(-w.gates[head]));
    const float decay = std::exp(-d.decay[head] * softplus(w.gates[w.l.heads + head] + d.bias[head]));
    float *const out = w.out + head * dim;
    dense_ops().delta(w.before + at, d.key_dim, dim, q, k, v, decay, beta, w.after + at, out);
    normalize(out, d.norm, dim, d.eps, out);
    float *const gate = w.qkv + w.of.channels + head * dim;
    silu_all(gate, dim);
    for (int64_t i = 0; i < dim; i++) out[i] *= gate[i];
}

} // namespace

void silu_all(float *x, int64_t n) {
    float e[kBlock];
    for (int64_t first = 0; first < n; first += kBlock, x += kBlock) {
        const int64_t count = n - first < kBlock ? n - first : kBlock;
        for (int64_t i = 0; i < count; i++) e[i] = -x[i];
        dense_ops().exponentials(e, count, 0);
        for (int64_t i = 0; i < count; i++) x[i] /= 1 + e[i];
    }
}

void unit(float *x, int64_t n, float scale) {
    float squares;
    dense_ops().multiply(x, x, 1, n, &squares);
    const float factor = scale / std::sqrt(squares + kLeast);
    for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

bool is_delta(const floe_dense_layer &l) {
    const floe_delta &d = *l.delta;
    if (l.heads < 1 || l.kv_heads < 1 || l.dim < 1 || l.heads % l.kv_heads || d.key_dim < 1 || d.taps < 2 ||
        l.latent != nullptr || l.gated)
        return false;
    const Sizes of(l);
    return d.gates.row.bits == 32 && is_shape(d.gates, 2 * l.heads, l.hidden) &&
           is_shape(l.first, of.channels + l.heads * l.dim, l.hidden) && is_shape(l.out, l.hidden, l.heads * l.dim);
}

int64_t delta_bytes(const floe_dense_layer &l) { return aligned(4 * Sizes(l).channels) + aligned(4 * 2 * l.heads); }

int step_delta(const floe_dense_layer &l, const floe_place &place, float *states, const float *x, int threads,
               uint8_t *memory, float *qkv, float *out) {
    const floe_delta &d = *l.delta;
    const Sizes of(l);
    float *const mixed = carve<float>(memory, of.channels), *const gates = carve<float>(memory, 2 * l.heads);
    const float *const before = states + place.position % place.states * of.state;
    float *const after = states + (place.position + 1) % place.states * of.state;
    const int code = multiply(d.gates, x, 1, 0, threads, gates);
    if (code != FLOE_OK) return code;
    const int64_t kept = (d.taps - 1) * of.channels;
    OneToken work = {l, of, before, before + kept, gates, qkv, after + kept, mixed, out};
    parallel_for(8 * of.channels < kSmall ? 1 : threads, (of.channels + kBlock - 1) / kBlock, convolve, &work);
    memcpy(after, before + of.channels, (size_t)(4 * (kept - of.channels)));
    memcpy(after + kept - of.channels, qkv, (size_t)(4 * of.channels));
    for (int64_t h = 0; h < l.kv_heads; h++) {
        unit(mixed + h * d.key_dim, d.key_dim, l.scale);
        unit(mixed + of.keys + h * d.key_dim, d.key_dim, 1);
    }
    parallel_for(8 * l.heads * of.head < kSmall ? 1 : threads, l.heads, one_head, &work);
    return FLOE_OK;
}

} // namespace floe
