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
constexpr int64_t kStride = kColumns + 16;     // floats from one token's columns to the next's
constexpr int64_t kTogether = 48, kPacked = 6; // tokens with vectors side by side: at a time, and for which it pays
constexpr int64_t kNeuronsAhead = 8;           // whose parts are on their way while one is expanded

int clamped(int threads) { return threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads; }

struct Linear {
    const floe_matrix *weights;
    const Token *tokens;
    int64_t count;
    uint8_t *scratch;
    int64_t scratch_bytes;
    float *y;
    bool packs;
};

// Vectors that lie side by side, with all tokens.
void compute_packed(const Linear &c, int64_t first, int64_t end, uint8_t *scratch) {
    const floe_matrix &m = *c.weights;
    for (; first < end; first += kSide) {
        const int rows = (int)(end - first < kSide ? end - first : kSide);
        Stored w[kSide];
        Ahead ahead[kSide];
        matrix_rows(m.row, m.q, m.scale, m.zero, first, rows, w, ahead);
        row_ops().pack(m.row, w, rows, scratch);
        for (int64_t start = 0; start < c.count; start += kTogether) {
            const int64_t tokens = c.count - start < kTogether ? c.count - start : kTogether;
            const Token *group[kTogether];
            float *out[kTogether];
            for (int64_t t = 0; t < tokens; t++) {
                group[t] = c.tokens + start + t;
                out[t] = c.y + (start + t) * m.rows + first;
            }
            row_ops().dot_packed(m.row, scratch, group, tokens, rows, out);
            for (int64_t t = 0; t < tokens && m.bias != nullptr; t++)
                for (int r = 0; r < rows; r++) out[t][r] += m.bias[first + r];
        }
    }
}

// A few tokens at a time meet all rows of the item, so that the tokens' digits stay in the second cache.
void compute_linear(void *opaque, int64_t item, int worker) {
    const Linear &c = *(const Linear *)opaque;
    const floe_matrix &m = *c.weights;
    const int64_t end = (item + 1) * kItemRows < m.rows ? (item + 1) * kItemRows : m.rows;
    if (c.packs) return compute_packed(c, item * kItemRows, end, c.scratch + worker * c.scratch_bytes);
    for (int64_t first = 0; first < c.count; first += kBatch) {
        const int tokens = (int)(c.count - first < kBatch ? c.count - first : kBatch);
        const Token *group[kBatch];
        for (int t = 0; t < tokens; t++) group[t] = c.tokens + first + t;
        for (int64_t n = item * kItemRows; n < end; n += kBatch) {
            const int rows = (int)(end - n < kBatch ? end - n : kBatch);
            Stored w[kBatch];
            Ahead ahead[kBatch];
            float out[kBatch][kBatch];
            matrix_rows(m.row, m.q, m.scale, m.zero, n, rows, w, ahead);
            for (int r = 0; r < rows && first != 0; r++) ahead[r].lines = 0; // the first tokens have asked for them
            row_ops().dot(m.row, w, rows, group, tokens, nullptr, out, c.scratch + worker * c.scratch_bytes, ahead);
            for (int r = 0; r < rows; r++)
                for (int t = 0; t < tokens; t++)
                    c.y[(first + t) * m.rows + n + r] = m.bias == nullptr ? out[r][t] : out[r][t] + m.bias[n + r];
        }
    }
}

struct Expert {
    const floe_signal *signal;
    const floe_rows *rows;
    int64_t first_row; // of the expert
    int64_t other_bytes, count, columns;
    const float *thresholds, *down_thresholds;
    const Token *for_signal, *for_other;
    uint8_t *scratch;
    int64_t scratch_bytes;
    float *h; // (tiles, tokens, kTile): o(other · x) v, zero where left out; in sparse tiles, of the kept alone
    uint8_t *which, *counts; // (tiles, tokens, kTile) and (tiles, tokens): those neurons
    bool *sparse;            // (tiles)
    float *y;
    std::atomic<int64_t> active{0}, kept{0};

    const uint8_t *row(int64_t neuron) const { return rows->data + (first_row + neuron) * rows->row_bytes; }
};

float down_threshold(const Expert &c, int64_t t) { return c.down_thresholds == nullptr ? 0.0f : c.down_thresholds[t]; }

// v of `tokens` tokens from `first` on and the neurons start..end, zero where it is below the threshold; h is (all
// tokens, kTile). Returns how many are not below it, and adds to *zeros how many of those are zero and reach the second
// threshold all the same.
int64_t compute_values(const Expert &c, int64_t start, int64_t end, int64_t first, int tokens, float *h,
                       uint8_t *scratch, int64_t *zeros) {
    int64_t active = 0;
    const Token *group[kBatch];
    for (int t = 0; t < tokens; t++) group[t] = c.for_signal + first + t;
    for (int64_t n = start; n < end; n += kBatch) {
        const int rows = (int)(end - n < kBatch ? end - n : kBatch);
        Stored w[kBatch];
        Ahead ahead[kBatch];
        float v[kBatch][kBatch];
        float bias[kBatch];
        for (int r = 0; r < rows; r++) bias[r] = c.signal->bias == nullptr ? 0.0f : c.signal->bias[c.first_row + n + r];
        matrix_rows(c.signal->row, c.signal->q, c.signal->scale, c.signal->zero, c.first_row + n, rows, w, ahead);
        for (int r = 0; r < rows && first != 0; r++) ahead[r].lines = 0; // the first tokens have asked for them
        row_ops().dot(c.signal->row, w, rows, group, tokens, nullptr, v, scratch, ahead);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tokens; t++) {
                const float value = applied(c.signal->function, v[r][t] + bias[r]);
                const bool reached = !(std::fabs(value) < c.thresholds[first + t]); // NaN goes on to the result
                active += reached;
                *zeros += reached && value == 0 && !(down_threshold(c, first + t) > 0);
                h[(first + t) * kTile + n - start + r] = reached ? value : 0;
            }
    }
    return active;
}

// The same tokens' and neurons' o(other · x) v in the place of v, zero where it is below the second threshold.
// Returns how many are not below it, of those whose v is not zero.
int64_t compute_products(const Expert &c, int64_t start, int64_t end, int64_t first, int tokens, float *h,
                         uint8_t *scratch) {
    int64_t kept = 0;
    const Token *group[kBatch];
    for (int t = 0; t < tokens; t++) group[t] = c.for_other + first + t;
    for (int64_t n = start; n < end; n += kBatch) {
        const int rows = (int)(end - n < kBatch ? end - n : kBatch);
        Stored w[kBatch];
        Ahead ahead[kBatch] = {};
        uint8_t wanted[kBatch] = {};
        float g[kBatch][kBatch], bias[kBatch];
        for (int r = 0; r < rows; r++) {
            const uint8_t *at = c.row(n + r);
            w[r] = stored(c.rows->other, at);
            bias[r] = bias_of(*c.rows, bias_at(*c.rows), at);
            if (first == 0) ahead[r] = {at + kBatch * c.rows->row_bytes, (c.other_bytes + 63) / 64};
            for (int t = 0; t < tokens; t++) wanted[r] |= (uint8_t)((h[(first + t) * kTile + n - start + r] != 0) << t);
        }
        row_ops().dot(c.rows->other, w, rows, group, tokens, wanted, g, scratch, ahead);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < tokens; t++) {
                if ((wanted[r] >> t & 1) == 0) continue;
                float &product = h[(first + t) * kTile + n - start + r];
                product *= applied(c.rows->function, g[r][t] + bias[r]);
                if (std::fabs(product) < down_threshold(c, first + t)) product = 0; // NaN goes on to the result
                else kept++;
            }
    }
    return kept;
}

// A tile of neurons: a few tokens at a time meet all of them, so that the tokens' digits stay in the second cache.
void compute_hidden(void *opaque, int64_t item, int worker) {
    Expert &c = *(Expert *)opaque;
    uint8_t *scratch = c.scratch + worker * c.scratch_bytes;
    const int64_t start = item * kTile, end = start + kTile < c.rows->neurons ? start + kTile : c.rows->neurons;
    float *h = c.h + start * c.count;
    int64_t active = 0, kept = 0;
    for (int64_t first = 0; first < c.count; first += kBatch) {
        const int tokens = (int)(c.count - first < kBatch ? c.count - first : kBatch);
        active += compute_values(c, start, end, first, tokens, h, scratch, &kept);
        kept += compute_products(c, start, end, first, tokens, h, scratch);
    }
    c.active += active;
    c.kept += kept;
    // In dense tiles each weight is loaded once for six tokens; that is worth more until a third of them are left out.
    c.sparse[item] = 3 * kept < 2 * (end - start) * c.count;
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
    const floe_vector &v = c.rows->down;
    const int64_t neurons = c.rows->neurons;
    const int64_t from = item * c.columns, to = from + c.columns < v.n ? from + c.columns : v.n;
    const int64_t first_group = v.bits == 16 ? 0 : from / v.group;
    const int64_t group_bytes = v.bits == 16 ? 0 : v.scale_bytes * ((to - 1) / v.group + 1 - first_group);
    uint8_t *scratch = c.scratch + worker * c.scratch_bytes;
    float *tile = (float *)scratch;
    float *y = tile + kTile * kColumns; // of its own: in c.y the tokens lie so far apart that they push each other out
    uint8_t *codes = (uint8_t *)(y + c.count * kStride);
    memset(y, 0, (size_t)(c.count * kStride) * sizeof(float));
    for (int64_t start = 0; start < neurons; start += kTile) {
        const int64_t here = neurons - start < kTile ? neurons - start : kTile;
        for (int64_t n = 0; n < here; n++) {
            const uint8_t *at = c.row(start + n) + c.other_bytes;
            const Stored ahead = stored(v, at + kNeuronsAhead * c.rows->row_bytes);
            prefetch(ahead.scale + v.scale_bytes * first_group, group_bytes);
            prefetch(ahead.zero + v.scale_bytes * first_group, group_bytes);
            prefetch(ahead.codes + from * v.bits / 8, (to - from) * v.bits / 8);
            row_ops().expand(v, stored(v, at), from, to, tile + n * kChunk, codes);
        }
        const float *h = c.h + start * c.count;
        const int64_t first = start / kTile * c.count;
        if (c.sparse[start / kTile])
            row_ops().add_active((const float (*)[kTile])h, (const uint8_t (*)[kTile])(c.which + first * kTile),
                                 c.counts + first, tile, to - from, c.count, y, kStride);
        else row_ops().add_products(h, tile, here, to - from, c.count, y, kStride);
    }
    for (int64_t t = 0; t < c.count; t++)
        memcpy(c.y + t * v.n + from, y + t * kStride, (size_t)(to - from) * sizeof(float));
}

} // namespace
} // namespace floe

using namespace floe;

int floe_linear(const float *x, int64_t tokens, const floe_matrix *weights, int digits, int threads, float *y) {
    thread_local Buffer buffer;
    const floe_vector &row = weights->row;
    if (code_bytes(row) < 0 || tokens < 0 || weights->rows < 0 || digits < 1 || digits > 3) return FLOE_BAD_SHAPE;
    threads = clamped(threads);
    const bool packs = tokens >= kPacked && row_ops().packs(row, digits);
    const int64_t scratch_bytes = packs ? packed_bytes(row) : aligned(row.n + kChunk);
    uint8_t *memory = buffer.take(tokens_bytes(row, tokens) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    const Token *prepared = prepare_tokens(row, x, tokens, digits, threads, memory);
    Linear c = {weights, prepared, tokens, memory, scratch_bytes, y, packs};
    parallel_for(threads, (weights->rows + kItemRows - 1) / kItemRows, compute_linear, &c);
    return FLOE_OK;
}

int floe_expert_swiglu(const float *x, int64_t tokens, const floe_signal *signal, const floe_rows *rows, int64_t expert,
                       const float *thresholds, const float *down_thresholds, int digits, int threads, float *y,
                       int64_t *counts) {
    thread_local Buffer buffer;
    const floe_vector &other = rows->other, &down = rows->down;
    const int64_t other_codes = code_bytes(other), down_codes = code_bytes(down), neurons = rows->neurons;
    if (code_bytes(signal->row) < 0 || other_codes < 0 || down_codes < 0 || signal->row.n != other.n ||
        other.n != down.n || !complete(*signal, *rows) || tokens < 0 || neurons < 0 || signal->neurons != neurons ||
        digits < 1 || digits > 3)
        return FLOE_BAD_SHAPE;
    const int64_t other_bytes = down_at(*rows);
    if (rows->row_bytes < other_bytes + head_bytes(down) + down_codes) return FLOE_BAD_SHAPE;
    if (expert < 0 || expert >= signal->experts || expert >= rows->experts) return FLOE_BAD_INDEX;
    threads = clamped(threads);
    const int64_t tiles = (neurons + kTile - 1) / kTile;
    const int64_t floats = kTile * kColumns + tokens * kStride;
    const int64_t scratch_bytes = aligned(floats * (int64_t)sizeof(float) + other.n + kChunk);
    uint8_t *memory =
        buffer.take(tokens_bytes(signal->row, tokens) + tokens_bytes(other, tokens) + 5 * tiles * kTile * tokens +
                    aligned(tiles * tokens) + aligned(tiles) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    Expert c = {};
    c.signal = signal;
    c.rows = rows;
    c.first_row = expert * neurons;
    c.other_bytes = other_bytes;
    c.count = tokens;
    c.thresholds = thresholds;
    c.down_thresholds = down_thresholds;
    c.for_signal = prepare_tokens(signal->row, x, tokens, digits, threads, memory);
    c.for_other = prepare_tokens(other, x, tokens, digits, threads, memory);
    c.h = carve<float>(memory, tiles * kTile * tokens);
    c.which = carve<uint8_t>(memory, tiles * kTile * tokens);
    c.counts = carve<uint8_t>(memory, tiles * tokens);
    c.sparse = carve<bool>(memory, tiles);
    c.scratch = memory;
    c.scratch_bytes = scratch_bytes;
    c.y = y;
    parallel_for(threads, tiles, compute_hidden, &c);
    // Each output is summed over the neurons alike, so the width of the tiles is free: every thread shall have one.
    c.columns = down.n >= kColumns * threads ? kColumns : kColumns / 2;
    parallel_for(threads, (down.n + c.columns - 1) / c.columns, compute_down, &c);
    counts[0] = c.active;
    counts[1] = c.kept;
    return FLOE_OK;
}
