// Dense products with low-bit weights: a linear layer, and an expert over the many tokens of a prompt.
//
// Rows are multiplied as they are stored, eight of them with eight tokens at a time (RowOps' `dot`), so nothing is
// dequantized for the gate and up projections. The down projection runs along the neurons instead: a tile of columns
// is expanded to floats and multiplied with all tokens' activations. Each output is summed in one order, whatever
// thread computes it.
#include "buffers.h"
#include "expert_ops.h"
#include "thread_pool.h"

#include <string.h>

#include <atomic>
#include <cmath>

namespace floe {
namespace {

constexpr int64_t kItemRows = kTile;
constexpr int64_t kColumns = 512; // of y at a time, at most; kTile neurons of them, 128 KiB, stay in the second cache
constexpr int64_t kNeuronsAhead = 8; // whose parts are on their way while one is expanded

int clamped(int threads) { return threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads; }

// use(r, t, value) for `rows` vectors and all tokens.
template <class Use>
void each_product(const floe_vector &v, const Stored *w, int rows, const Token *tokens, int64_t count, uint8_t *scratch,
                  Ahead *ahead, Use use) {
    for (int64_t first = 0; first < count; first += kBatch) {
        const int here = (int)(count - first < kBatch ? count - first : kBatch);
        const Token *group[kBatch];
        float out[kBatch][kBatch];
        for (int t = 0; t < here; t++) group[t] = tokens + first + t;
        row_ops().dot(v, w, rows, group, here, nullptr, out, scratch, ahead);
        for (int r = 0; r < rows; r++) {
            ahead[r].lines = 0; // the first tokens have asked for them
            for (int t = 0; t < here; t++) use(r, first + t, out[r][t]);
        }
    }
}

struct Linear {
    const floe_vector *row;
    const uint8_t *q, *scale, *zero;
    const Token *tokens;
    int64_t count, width;
    uint8_t *scratch;
    int64_t scratch_bytes;
    float *y;
};

void compute_linear(void *opaque, int64_t item, int worker) {
    const Linear &c = *(const Linear *)opaque;
    const int64_t end = (item + 1) * kItemRows < c.width ? (item + 1) * kItemRows : c.width;
    for (int64_t n = item * kItemRows; n < end; n += kBatch) {
        const int rows = (int)(end - n < kBatch ? end - n : kBatch);
        Stored w[kBatch];
        Ahead ahead[kBatch];
        matrix_rows(*c.row, c.q, c.scale, c.zero, n, rows, w, ahead);
        each_product(*c.row, w, rows, c.tokens, c.count, c.scratch + worker * c.scratch_bytes, ahead,
                     [&](int r, int64_t t, float value) { c.y[t * c.width + n + r] = value; });
    }
}

struct Expert {
    const floe_vector *up, *gate, *down;
    const uint8_t *q, *scale, *zero, *rows;
    int64_t neurons, row_bytes, gate_bytes, count, columns;
    float threshold;
    const Token *for_up, *for_gate;
    uint8_t *scratch;
    int64_t scratch_bytes;
    float *h; // (tiles, tokens, kTile): silu(gate · x) v, zero where inactive; in sparse tiles, of the active alone
    uint8_t *which, *counts; // (tiles, tokens, kTile) and (tiles, tokens): those neurons
    bool *sparse;            // (tiles)
    float *y;
    std::atomic<int64_t> active{0};
};

// silu(gate · x) v for the active pairs of up to kBatch neurons from n on; h is (tokens, kTile) from neuron n on.
void compute_gates(const Expert &c, int64_t n, int rows, float *h, uint8_t *scratch) {
    Stored w[kBatch];
    Ahead ahead[kBatch];
    for (int r = 0; r < rows; r++) {
        const uint8_t *at = c.rows + (n + r) * c.row_bytes;
        w[r] = stored(*c.gate, at);
        ahead[r] = {at + kBatch * c.row_bytes, (c.gate_bytes + 63) / 64};
    }
    for (int64_t first = 0; first < c.count; first += kBatch) {
        const int here = (int)(c.count - first < kBatch ? c.count - first : kBatch);
        const Token *group[kBatch];
        uint8_t wanted[kBatch] = {};
        float g[kBatch][kBatch];
        for (int t = 0; t < here; t++) {
            group[t] = c.for_gate + first + t;
            for (int r = 0; r < rows; r++) wanted[r] |= (uint8_t)((h[(first + t) * kTile + r] != 0) << t);
        }
        row_ops().dot(*c.gate, w, rows, group, here, wanted, g, scratch, ahead);
        for (int r = 0; r < rows; r++) {
            ahead[r].lines = 0; // the first tokens have asked for them
            for (int t = 0; t < here; t++)
                if (wanted[r] >> t & 1) h[(first + t) * kTile + r] *= silu(g[r][t]);
        }
    }
}

void compute_hidden(void *opaque, int64_t item, int worker) {
    Expert &c = *(Expert *)opaque;
    uint8_t *scratch = c.scratch + worker * c.scratch_bytes;
    const int64_t start = item * kTile, end = start + kTile < c.neurons ? start + kTile : c.neurons;
    float *h = c.h + start * c.count;
    int64_t active = 0;
    for (int64_t n = start; n < end; n += kBatch) {
        const int rows = (int)(end - n < kBatch ? end - n : kBatch);
        Stored w[kBatch];
        Ahead ahead[kBatch];
        matrix_rows(*c.up, c.q, c.scale, c.zero, n, rows, w, ahead);
        each_product(*c.up, w, rows, c.for_up, c.count, scratch, ahead, [&](int r, int64_t t, float v) {
            const bool kept = !(std::fabs(v) < c.threshold); // NaN goes on to the result
            active += kept;
            h[t * kTile + n - start + r] = kept ? v : 0;
        });
        compute_gates(c, n, rows, h + n - start, scratch);
    }
    c.active += active;
    // In dense tiles each weight is loaded once for six tokens; that is worth more until a third of them are inactive.
    c.sparse[item] = 3 * active < 2 * (end - start) * c.count;
    for (int64_t t = 0; c.sparse[item] && t < c.count; t++) {
        float *factors = h + t * kTile;
        uint8_t *which = c.which + (start / kTile * c.count + t) * kTile;
        int count = 0;
        for (int n = 0; n < end - start; n++) {
            factors[count] = factors[n];
            which[count] = (uint8_t)n;
            count += factors[n] != 0;
        }
        c.counts[start / kTile * c.count + t] = (uint8_t)count;
    }
}

void prefetch(const uint8_t *from, int64_t bytes) {
    const uint8_t *end = from + bytes;
    for (from = (const uint8_t *)((uintptr_t)from & ~(uintptr_t)63); from < end; from += 64) FLOE_PREFETCH(from);
}

// All tokens' columns item * c.columns ... of y.
void compute_down(void *opaque, int64_t item, int worker) {
    const Expert &c = *(const Expert *)opaque;
    const floe_vector &v = *c.down;
    const int64_t from = item * c.columns, to = from + c.columns < v.n ? from + c.columns : v.n;
    const int64_t first_group = v.bits == 16 ? 0 : from / v.group;
    const int64_t group_bytes = v.bits == 16 ? 0 : 2 * ((to - 1) / v.group + 1 - first_group);
    uint8_t *scratch = c.scratch + worker * c.scratch_bytes;
    float *tile = (float *)scratch;
    uint8_t *codes = scratch + kTile * kColumns * (int64_t)sizeof(float);
    for (int64_t t = 0; t < c.count; t++) memset(c.y + t * v.n + from, 0, (size_t)(to - from) * sizeof(float));
    for (int64_t start = 0; start < c.neurons; start += kTile) {
        const int64_t here = c.neurons - start < kTile ? c.neurons - start : kTile;
        for (int64_t n = 0; n < here; n++) {
            const uint8_t *at = c.rows + (start + n) * c.row_bytes + c.gate_bytes;
            const Stored ahead = stored(v, at + kNeuronsAhead * c.row_bytes);
            prefetch(ahead.scale + 2 * first_group, group_bytes);
            prefetch(ahead.zero + 2 * first_group, group_bytes);
            prefetch(ahead.codes + from * v.bits / 8, (to - from) * v.bits / 8);
            row_ops().expand(v, stored(v, at), from, to, tile + n * kChunk, codes);
        }
        const float *h = c.h + start * c.count;
        const int64_t first = start / kTile * c.count;
        if (c.sparse[start / kTile])
            row_ops().add_active((const float (*)[kTile])h, (const uint8_t (*)[kTile])(c.which + first * kTile),
                                 c.counts + first, tile, to - from, c.count, c.y + from, v.n);
        else row_ops().add_products(h, tile, here, to - from, c.count, c.y + from, v.n);
    }
}

} // namespace
} // namespace floe

using namespace floe;

int floe_linear(const float *x, int64_t tokens, const floe_vector *row, const uint8_t *q, const uint8_t *scale,
                const uint8_t *zero, int64_t width, int digits, int threads, float *y) {
    thread_local Buffer buffer;
    if (code_bytes(*row) < 0 || tokens < 0 || width < 0 || digits < 2 || digits > 3) return FLOE_BAD_SHAPE;
    threads = clamped(threads);
    const int64_t scratch_bytes = aligned(row->n + kChunk);
    uint8_t *memory = buffer.take(tokens_bytes(*row, tokens) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    const Token *prepared = prepare_tokens(*row, x, tokens, digits, threads, memory);
    Linear c = {row, q, scale, zero, prepared, tokens, width, memory, scratch_bytes, y};
    parallel_for(threads, (width + kItemRows - 1) / kItemRows, compute_linear, &c);
    return FLOE_OK;
}

int64_t floe_expert_swiglu(const float *x, int64_t tokens, const floe_vector *up, const uint8_t *q,
                           const uint8_t *scale, const uint8_t *zero, const floe_vector *gate, const floe_vector *down,
                           const uint8_t *rows, int64_t neurons, int64_t row_bytes, float threshold, int digits,
                           int threads, float *y) {
    thread_local Buffer buffer;
    const int64_t gate_codes = code_bytes(*gate), down_codes = code_bytes(*down);
    if (code_bytes(*up) < 0 || gate_codes < 0 || down_codes < 0 || up->n != gate->n || gate->n != down->n ||
        tokens < 0 || neurons < 0 || digits < 2 || digits > 3)
        return FLOE_BAD_SHAPE;
    const int64_t gate_bytes = 4 * groups_of(*gate) + gate_codes;
    if (row_bytes < gate_bytes + 4 * groups_of(*down) + down_codes) return FLOE_BAD_SHAPE;
    threads = clamped(threads);
    const int64_t tiles = (neurons + kTile - 1) / kTile;
    const int64_t scratch_bytes = aligned(kTile * kColumns * (int64_t)sizeof(float) + up->n + kChunk);
    uint8_t *memory = buffer.take(tokens_bytes(*up, tokens) + tokens_bytes(*gate, tokens) + 5 * tiles * kTile * tokens +
                                  aligned(tiles * tokens) + aligned(tiles) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    Expert c = {};
    c.up = up;
    c.gate = gate;
    c.down = down;
    c.q = q;
    c.scale = scale;
    c.zero = zero;
    c.rows = rows;
    c.neurons = neurons;
    c.row_bytes = row_bytes;
    c.gate_bytes = gate_bytes;
    c.count = tokens;
    c.threshold = threshold;
    c.for_up = prepare_tokens(*up, x, tokens, digits, threads, memory);
    c.for_gate = prepare_tokens(*gate, x, tokens, digits, threads, memory);
    c.h = carve<float>(memory, tiles * kTile * tokens);
    c.which = carve<uint8_t>(memory, tiles * kTile * tokens);
    c.counts = carve<uint8_t>(memory, tiles * tokens);
    c.sparse = carve<bool>(memory, tiles);
    c.scratch = memory;
    c.scratch_bytes = scratch_bytes;
    c.y = y;
    parallel_for(threads, (neurons + kItemRows - 1) / kItemRows, compute_hidden, &c);
    // Each output is summed over the neurons alike, so the width of the tiles is free: every thread shall have one.
    c.columns = down->n >= kColumns * threads ? kColumns : kColumns / 2;
    parallel_for(threads, (down->n + c.columns - 1) / c.columns, compute_down, &c);
    return c.active;
}
