// Dense products with low-bit weights: a linear layer, and experts over the many tokens of a prompt.
//
// A few tokens meet rows as they are stored, eight with eight at a time (RowOps' `dot`), more of them rows whose codes
// were put side by side; nothing is dequantized for the gate and up projections. The down projection runs along the
// neurons instead: a tile of columns, of the neurons that are needed, is expanded to floats and multiplied with all
// tokens' activations. Each output is summed in one order, whatever thread computes it.
#include "buffers.h"
#include "expert_ops.h"
#include "thread_pool.h"

#include <string.h>

#include <algorithm>
#include <atomic>
#include <cmath>

namespace floe {
namespace {

constexpr int64_t kItemRows = kTile;
constexpr int64_t kColumns = 256; // of y at a time; kTile neurons of them, 64 KiB, stay in the second cache
constexpr int64_t kTogether = 64, kPacked = 6; // tokens with vectors side by side: at a time, and for which it pays
constexpr int64_t kTiles = 4;                  // whose rows stay in the second cache
constexpr int64_t kShare = 1024;               // neurons of an item, at most
constexpr int64_t kSums = 32 << 20;            // bytes of sums at a time
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

// Calls of one expert, among calls sorted by expert; more than kTogether are several parts.
struct Part {
    int64_t expert, first, count;
};

// One item is a part, over a share of its neurons. It has a sum of its own for each call, and sums are added up in
// order, so that no thread waits for another one.
struct Experts {
    const floe_signal &signal;
    const floe_rows &rows;
    int64_t down_at, shares, stride;
    int64_t packs_signal, packs_other;                                     // from so many calls on
    const Token *const *for_signal = nullptr, *const *for_other = nullptr; // of each call
    const float *thresholds = nullptr, *down_thresholds = nullptr, *weights = nullptr;
    int64_t *counts = nullptr; // (calls, shares, 2)
    const Part *parts = nullptr;
    uint8_t *scratch = nullptr;
    int64_t scratch_bytes = 0;
    float *sums = nullptr; // (calls, shares, stride), of the calls from first_call to last_call
    int64_t first_call = 0, last_call = 0;
    const int64_t *by_token = nullptr, *of_token = nullptr; // calls of each token, and where those of a token begin
    float *y = nullptr;

    float *sum(int64_t call, int64_t share) const { return sums + ((call - first_call) * shares + share) * stride; }
    float down_threshold(int64_t call) const { return down_thresholds == nullptr ? 0.0f : down_thresholds[call]; }
};

// A thread's memory for a part.
struct Desk {
    float *h; // (tiles, calls, kTile): o(other · x) v, zero where left out; in sparse tiles, of the kept alone
    float *tile;
    uint8_t *which, *used, *packed, *codes; // which: those neurons. used: (tiles, kTile) by any of the calls
    uint8_t (*counts)[kTogether];           // and how many
    bool sparse[kTiles];

    Desk(const Experts &e, uint8_t *at) {
        h = carve<float>(at, kTiles * kTogether * kTile);
        tile = carve<float>(at, kTile * kColumns);
        which = carve<uint8_t>(at, kTiles * kTogether * kTile);
        used = carve<uint8_t>(at, kTiles * kTile);
        counts = (uint8_t (*)[kTogether])carve<uint8_t>(at, kTiles * kTogether);
        codes = carve<uint8_t>(at, e.rows.other.n + kChunk);
        packed = at;
    }

    static int64_t bytes(const floe_signal &signal, const floe_rows &rows, int64_t packs_signal, int64_t packs_other) {
        const int64_t of_signal = packs_signal < kNever ? packed_bytes(signal.row) : 0;
        const int64_t of_other = packs_other < kNever ? packed_bytes(rows.other) : 0;
        return kTiles * kTogether * kTile * 5 + 4 * kTile * kColumns + kTiles * (kTile + kTogether) +
               aligned(rows.other.n + kChunk) + aligned(of_signal > of_other ? of_signal : of_other);
    }
};

// use(neuron, count, call, products) of a tile's vectors start..end with a part's tokens, some at a time.
// rows_at(neuron, count, vectors, ahead) finds them. h: where it is zero, the product is not needed; nullptr if all
// are.
template <class RowsAt, class Use>
void each_product(const floe_vector &v, const Token *const *tokens, int64_t count, bool packs, int64_t start,
                  int64_t end, const float *h, const Desk &desk, RowsAt rows_at, Use use) {
    Stored w[kSide];
    Ahead ahead[kSide];
    if (packs) {
        float found[kTogether][kSide], *out[kTogether];
        for (int64_t t = 0; t < count; t++) out[t] = found[t];
        for (int64_t n = start; n < end; n += kSide) {
            const int rows = (int)(end - n < kSide ? end - n : kSide);
            rows_at(n, rows, w, ahead);
            row_ops().pack(v, w, rows, desk.packed);
            row_ops().dot_packed(v, desk.packed, tokens, count, rows, out);
            for (int64_t t = 0; t < count; t++) use(n, rows, t, found[t]);
        }
        return;
    }
    for (int64_t first = 0; first < count; first += kBatch) {
        const int here = (int)(count - first < kBatch ? count - first : kBatch);
        for (int64_t n = start; n < end; n += kBatch) {
            const int rows = (int)(end - n < kBatch ? end - n : kBatch);
            uint8_t wanted[kBatch] = {};
            float found[kBatch][kBatch], products[kBatch] = {};
            rows_at(n, rows, w, ahead);
            for (int r = 0; r < rows && first != 0; r++) ahead[r].lines = 0; // the first tokens have asked for them
            for (int t = 0; t < here && h != nullptr; t++)
                for (int r = 0; r < rows; r++)
                    wanted[r] |= (uint8_t)((h[(first + t) * kTile + n - start + r] != 0) << t);
            row_ops().dot(v, w, rows, tokens + first, here, h == nullptr ? nullptr : wanted, found, desk.codes, ahead);
            for (int t = 0; t < here; t++) {
                for (int r = 0; r < rows; r++) products[r] = found[r][t];
                use(n, rows, first + t, products);
            }
        }
    }
}

// A tile's neurons start..end: h, and what of it is used.
void compute_hidden(const Experts &e, const Part &p, int64_t start, int64_t end, int64_t tile, int64_t *counts,
                    const Desk &desk, bool *sparse) {
    const floe_signal &s = e.signal;
    const floe_rows &r = e.rows;
    const int64_t first_row = p.expert * r.neurons, biases = bias_at(r);
    const uint8_t *const records = r.data + first_row * r.row_bytes;
    float *const h = desk.h + tile * kTogether * kTile;
    int64_t reached = 0, kept = 0;
    each_product(
        s.row, e.for_signal + p.first, p.count, p.count >= e.packs_signal, start, end, nullptr, desk,
        [&](int64_t n, int rows, Stored *w, Ahead *ahead) {
            matrix_rows(s.row, s.q, s.scale, s.zero, first_row + n, rows, w, ahead);
        },
        [&](int64_t n, int rows, int64_t t, const float *products) {
            const float threshold = e.thresholds[p.first + t];
            float *const to = h + t * kTile + n - start;
            int here = 0, nothing = 0; // nothing: zero, and yet kept
            for (int i = 0; i < rows; i++) {
                const float value =
                    applied(s.function, s.bias == nullptr ? products[i] : products[i] + s.bias[first_row + n + i]);
                const bool is = !(std::fabs(value) < threshold); // NaN goes on to the result
                here += is, nothing += is && value == 0;
                to[i] = is ? value : 0;
            }
            if (e.down_threshold(p.first + t) > 0) nothing = 0;
            counts[2 * e.shares * t] += here, counts[2 * e.shares * t + 1] += nothing;
            reached += here, kept += nothing;
        });
    const bool few = 3 * reached < (end - start) * p.count; // else it is faster to compute all
    const auto multiply = [&](int64_t n, int rows, int64_t t, const float *products) {
        const float threshold = e.down_threshold(p.first + t);
        float *const to = h + t * kTile + n - start;
        int here = 0;
        for (int i = 0; i < rows; i++) {
            if (to[i] == 0) continue;
            const float bias = bias_of(r, biases, records + (n + i) * r.row_bytes);
            const float value = to[i] * applied(r.function, products[i] + bias);
            const bool is = !(std::fabs(value) < threshold); // NaN goes on to the result
            to[i] = is ? value : 0, here += is;
        }
        counts[2 * e.shares * t + 1] += here, kept += here;
    };
    if (gated(r))
        each_product(
            r.other, e.for_other + p.first, p.count, p.count >= e.packs_other, start, end, few ? h : nullptr, desk,
            [&](int64_t n, int rows, Stored *w, Ahead *ahead) {
                for (int i = 0; i < rows; i++) {
                    const uint8_t *const at = records + (n + i) * r.row_bytes;
                    w[i] = stored(r.other, at);
                    ahead[i] = {at + kBatch * r.row_bytes, (e.down_at + 63) / 64};
                }
            },
            multiply);
    else
        for (int64_t t = 0; t < p.count; t++)
            for (int64_t n = start; n < end; n += kSide) {
                const float nothing[kSide] = {};
                multiply(n, (int)(end - n < kSide ? end - n : kSide), t, nothing);
            }
    // In dense tiles each weight is loaded once for six tokens; that is worth more until a third of them are left out.
    *sparse = 3 * kept < 2 * (end - start) * p.count;
    uint8_t *const used = desk.used + tile * kTile;
    memset(used, *sparse ? 0 : 1, kTile);
    for (int64_t t = 0; *sparse && t < p.count; t++) {
        float *const factors = h + t * kTile;
        uint8_t *const which = desk.which + (tile * kTogether + t) * kTile;
        int count = 0;
        for (int n = 0; n < end - start; n++) {
            factors[count] = factors[n];
            which[count] = (uint8_t)n;
            used[n] |= factors[n] != 0;
            count += factors[n] != 0;
        }
        desk.counts[tile][t] = (uint8_t)count;
    }
}

void prefetch(const uint8_t *from, int64_t bytes) {
    const uint8_t *end = from + bytes;
    for (from = (const uint8_t *)((uintptr_t)from & ~(uintptr_t)63); from < end; from += 64) FLOE_PREFETCH(from);
}

// Columns from..to of a tile's neurons start..end, for all calls of a part: from what is in h.
void add_down(const Experts &e, const Part &p, int64_t start, int64_t end, int64_t tile, int64_t from, int64_t to,
              int64_t share, const Desk &desk) {
    const floe_vector &v = e.rows.down;
    const uint8_t *const records = e.rows.data + (p.expert * e.rows.neurons + start) * e.rows.row_bytes + e.down_at;
    const uint8_t *const used = desk.used + tile * kTile;
    const int64_t bytes = e.rows.row_bytes - e.down_at;
    for (int64_t n = 0; n < end - start; n++) {
        if (from == 0 && n + kNeuronsAhead < end - start && used[n + kNeuronsAhead])
            prefetch(records + (n + kNeuronsAhead) * e.rows.row_bytes, bytes); // of all columns, which come next
        if (used[n])
            row_ops().expand(v, stored(v, records + n * e.rows.row_bytes), from, to, desk.tile + n * kChunk,
                             desk.codes);
    }
    const float *const h = desk.h + tile * kTogether * kTile;
    float *const y = e.sum(p.first, share) + from;
    const int64_t stride = e.shares * e.stride;
    if (desk.sparse[tile])
        row_ops().add_active((const float (*)[kTile])h,
                             (const uint8_t (*)[kTile])(desk.which + tile * kTogether * kTile), desk.counts[tile],
                             desk.tile, to - from, p.count, y, stride);
    else row_ops().add_products(h, desk.tile, end - start, to - from, p.count, y, stride);
}

void compute_part(void *opaque, int64_t item, int worker) {
    const Experts &e = *(const Experts *)opaque;
    const Part &p = e.parts[item / e.shares];
    const int64_t share = item % e.shares, width = e.rows.down.n, neurons = e.rows.neurons;
    const int64_t first = neurons * share / e.shares / kTile * kTile;
    const int64_t last = share + 1 < e.shares ? neurons * (share + 1) / e.shares / kTile * kTile : neurons;
    Desk desk(e, e.scratch + worker * e.scratch_bytes);
    int64_t *const counts = e.counts + 2 * (p.first * e.shares + share);
    for (int64_t t = 0; t < p.count; t++) {
        memset(e.sum(p.first + t, share), 0, (size_t)width * sizeof(float));
        counts[2 * e.shares * t] = counts[2 * e.shares * t + 1] = 0;
    }
    const auto end_of = [&](int64_t start) { return start + kTile < last ? start + kTile : last; };
    for (int64_t start = first; start < last; start += kTiles * kTile) {
        int64_t tiles = 0;
        for (; tiles < kTiles && start + tiles * kTile < last; tiles++) {
            const int64_t at = start + tiles * kTile;
            compute_hidden(e, p, at, end_of(at), tiles, counts, desk, desk.sparse + tiles);
        }
        for (int64_t from = 0; from < width; from += kColumns)
            for (int64_t tile = 0; tile < tiles; tile++) {
                const int64_t at = start + tile * kTile, to = from + kColumns < width ? from + kColumns : width;
                add_down(e, p, at, end_of(at), tile, from, to, share, desk);
            }
    }
}

// A token's sums onto y.
void add_sums(void *opaque, int64_t token, int) {
    const Experts &e = *(const Experts *)opaque;
    const int64_t width = e.rows.down.n;
    float *const y = e.y + token * width;
    for (int64_t i = e.of_token[token]; i < e.of_token[token + 1]; i++) {
        const int64_t call = e.by_token[i];
        if (call < e.first_call || call >= e.last_call) continue;
        for (int64_t share = 0; share < e.shares; share++) {
            const float *const sum = e.sum(call, share);
            const float weight = e.weights[call];
            for (int64_t n = 0; n < width; n++) y[n] += weight * sum[n];
        }
    }
}

} // namespace
} // namespace floe

using namespace floe;

int floe_linear(const float *x, int64_t tokens, const floe_matrix *weights, int digits, int threads, float *y) {
    thread_local Buffer buffer;
    const floe_vector &row = weights->row;
    if (code_bytes(row) < 0 || tokens < 0 || weights->rows < 0 || digits < 1 || digits > 3) return FLOE_BAD_SHAPE;
    threads = clamped(threads);
    const bool packs = tokens >= row_ops().packs_from(row, digits);
    const int64_t scratch_bytes = packs ? packed_bytes(row) : aligned(row.n + kChunk);
    uint8_t *memory = buffer.take(tokens_bytes(row, tokens) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    const Token *prepared = prepare_tokens(row, x, tokens, digits, threads, memory);
    Linear c = {weights, prepared, tokens, memory, scratch_bytes, y, packs};
    parallel_for(threads, (weights->rows + kItemRows - 1) / kItemRows, compute_linear, &c);
    return FLOE_OK;
}

int floe_experts_swiglu(const float *x, int64_t tokens, const floe_signal *of_signal, const floe_rows *of_rows,
                        const floe_calls *of_calls, int digits, int threads, float *y, int64_t *counts) {
    thread_local Buffer buffer, sums;
    const floe_signal &signal = *of_signal;
    const floe_rows &rows = *of_rows;
    const floe_calls &calls = *of_calls;
    const floe_vector &other = rows.other, &down = rows.down;
    const int64_t neurons = rows.neurons, experts = rows.experts, count = calls.count;
    const int64_t down_codes = code_bytes(down);
    if (code_bytes(signal.row) < 0 || other_bytes(rows) < 0 || down_codes < 0 || signal.row.n != other.n ||
        other.n != down.n || !complete(signal, rows) || tokens < 0 || neurons < 0 || experts < 0 || count < 0 ||
        signal.neurons != neurons || signal.experts != experts || digits < 1 || digits > 3 ||
        (count > 0 && calls.threshold == nullptr))
        return FLOE_BAD_SHAPE;
    const int64_t column_at = down_at(rows), shares = (neurons + kShare - 1) / kShare + (neurons == 0);
    if (rows.row_bytes < column_at + head_bytes(down) + down_codes) return FLOE_BAD_SHAPE;
    if (!in_range(calls.token, count, tokens) || !in_range(calls.expert, count, experts)) return FLOE_BAD_INDEX;
    threads = clamped(threads);
    const int64_t packs_signal = row_ops().packs_from(signal.row, digits);
    const int64_t packs_other = gated(rows) ? row_ops().packs_from(other, digits) : kNever;
    const int64_t scratch_bytes = Desk::bytes(signal, rows, packs_signal, packs_other);
    const int64_t places = experts > tokens ? experts : tokens;
    uint8_t *memory =
        buffer.take(tokens_bytes(signal.row, tokens) + (gated(rows) ? tokens_bytes(other, tokens) : 0) +
                    6 * aligned(8 * count) + 3 * aligned(4 * count) + aligned(16 * count * shares) +
                    aligned(sizeof(Part) * count) + 2 * aligned(8 * (places + 1)) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    Experts e = {signal, rows, column_at, shares, down.n + 16, packs_signal, packs_other};
    const Token *const signal_tokens = prepare_tokens(signal.row, x, tokens, digits, threads, memory);
    const Token *const other_tokens =
        gated(rows) ? prepare_tokens(other, x, tokens, digits, threads, memory) : signal_tokens; // not read
    const auto numbers = [&](int64_t n) { return carve<int64_t>(memory, n); };
    int64_t *const order = numbers(count), *const by_token = numbers(count), *const begin = numbers(places + 1);
    int64_t *const of_token = numbers(places + 1);
    const Token **const for_signal = carve<const Token *>(memory, count);
    const Token **const for_other = carve<const Token *>(memory, count);
    float *const thresholds = carve<float>(memory, count), *const products = carve<float>(memory, count);
    float *const weights = carve<float>(memory, count);
    Part *const parts = carve<Part>(memory, count);
    e.counts = carve<int64_t>(memory, 2 * count * shares);
    e.scratch = memory, e.scratch_bytes = scratch_bytes;

    // Sorted by expert, without what is left out; then by token.
    const auto sort = [&](int64_t n, int64_t keys, auto key_of, int64_t *from, int64_t *sorted) {
        for (int64_t i = 0; i <= keys; i++) from[i] = 0;
        for (int64_t i = 0; i < n; i++) from[key_of(i) + 1]++;
        for (int64_t i = 0; i < keys; i++) from[i + 1] += from[i];
        for (int64_t i = 0; i < n; i++) sorted[from[key_of(i)]++] = i;
        for (int64_t i = keys; i > 0; i--) from[i] = from[i - 1];
        from[0] = 0;
    };
    sort(count, experts, [&](int64_t p) { return calls.expert[p]; }, begin, order);
    int64_t called = 0, part_count = 0;
    for (int64_t i = 0; i < count; i++) {
        const int64_t call = order[i], expert = calls.expert[call];
        counts[2 * call] = counts[2 * call + 1] = 0;
        if (calls.threshold[call] == INFINITY) continue;
        Part *const last = part_count ? parts + part_count - 1 : nullptr;
        if (last != nullptr && last->expert == expert && last->count < kTogether) last->count++;
        else parts[part_count++] = {expert, called, 1};
        for_signal[called] = signal_tokens + calls.token[call], for_other[called] = other_tokens + calls.token[call];
        thresholds[called] = calls.threshold[call], weights[called] = calls.weight[call];
        products[called] = calls.product == nullptr ? 0 : calls.product[call];
        order[called++] = call;
    }
    sort(called, tokens, [&](int64_t i) { return calls.token[order[i]]; }, of_token, by_token);
    e.for_signal = for_signal, e.for_other = for_other, e.thresholds = thresholds, e.weights = weights;
    e.down_thresholds = calls.product == nullptr ? nullptr : products;
    e.by_token = by_token, e.of_token = of_token, e.y = y;
    std::fill_n(y, tokens * down.n, 0.0f); // memset would need a place for no tokens, too

    // As many parts at a time as have room for their sums; which these are depends on the calls alone.
    for (int64_t first = 0; first < part_count;) {
        int64_t end = first;
        const int64_t most = kSums / (4 * shares * e.stride), from = parts[first].first;
        do end++;
        while (end < part_count && parts[end].first + parts[end].count - from <= most);
        e.parts = parts + first, e.first_call = from, e.last_call = parts[end - 1].first + parts[end - 1].count;
        e.sums = (float *)sums.take(4 * (e.last_call - from) * shares * e.stride);
        if (e.sums == nullptr) return FLOE_NO_MEMORY;
        parallel_for(threads, (end - first) * shares, compute_part, &e);
        parallel_for(threads, tokens, add_sums, &e);
        first = end;
    }
    for (int64_t i = 0; i < called * shares; i++) {
        counts[2 * order[i / shares]] += e.counts[2 * i];
        counts[2 * order[i / shares] + 1] += e.counts[2 * i + 1];
    }
    return FLOE_OK;
}

int floe_expert_swiglu(const float *x, int64_t tokens, const floe_signal *signal, const floe_rows *rows, int64_t expert,
                       const float *thresholds, const float *down_thresholds, int digits, int threads, float *y,
                       int64_t *counts) {
    thread_local Buffer buffer;
    const int64_t most = tokens < 0 ? 0 : tokens;
    uint8_t *memory = buffer.take(4 * aligned(8 * most) + aligned(4 * most));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    int64_t *const token = carve<int64_t>(memory, most), *const same = carve<int64_t>(memory, most);
    int64_t *const each = carve<int64_t>(memory, 2 * most);
    float *const ones = carve<float>(memory, most);
    for (int64_t t = 0; t < most; t++) token[t] = t, same[t] = expert, ones[t] = 1;
    if (most == 0 && (expert < 0 || expert >= rows->experts)) return FLOE_BAD_INDEX;
    floe_calls calls = {};
    calls.count = tokens, calls.token = token, calls.expert = same, calls.weight = ones;
    calls.threshold = const_cast<float *>(thresholds), calls.product = const_cast<float *>(down_thresholds);
    const int code = floe_experts_swiglu(x, tokens, signal, rows, &calls, digits, threads, y, each);
    if (code != FLOE_OK) return code;
    counts[0] = counts[1] = 0;
    for (int64_t t = 0; t < 2 * most; t++) counts[t % 2] += each[t];
    return FLOE_OK;
}
