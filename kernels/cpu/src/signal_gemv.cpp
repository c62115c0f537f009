// signal_gemv: every row of the experts' signal projections against x, thresholded and compacted on the way.
//
// Work is cut into blocks of rows of one expert, computed for all of its calls while the rows are in the cache.
// A block writes its survivors to a place of its own; blocks are then put together in order. So neurons come out
// ascending, and the same whatever thread computed what.
#include "buffers.h"
#include "expert_ops.h"
#include "thread_pool.h"

#include <string.h>

#include <cmath>

namespace floe {
namespace {

constexpr int64_t kBlockRows = 128;

struct Found {
    Buffer memory;
    const int32_t *neurons = nullptr; // (P, blocks, kBlockRows)
    const float *values = nullptr;
    const int32_t *counts = nullptr; // (P, blocks)
    int64_t places = 0, total = 0;   // P · blocks
};

Found &found() {
    thread_local Found kept;
    return kept;
}

struct Context {
    const floe_signal *signal;
    const floe_calls *calls;
    int64_t blocks;
    const int64_t *first_call, *order; // calls of unique expert u: order[first_call[u] .. first_call[u + 1]]
    const Token *tokens;
    uint8_t *scratch;
    int64_t scratch_bytes;
    int32_t *found_neurons, *counts;
    float *found_values;
};

// The signal's function of what a call found in one block, keeping what still reaches the threshold. Where no |s(z)| is
// above |z|, most neurons are gone already, and their exponential is never computed.
void apply(const Context &c, int64_t call, int64_t place) {
    int32_t *neurons = c.found_neurons + place * kBlockRows;
    float *values = c.found_values + place * kBlockRows;
    int32_t found = 0;
    for (int32_t i = 0; i < c.counts[place]; i++) {
        const float v = applied(c.signal->function, values[i]);
        neurons[found] = neurons[i];
        values[found] = v;
        found += !(std::fabs(v) < c.calls->threshold[call]);
    }
    c.counts[place] = found;
}

void compute_block(void *opaque, int64_t item, int worker) {
    const Context &c = *(const Context *)opaque;
    const RowOps &ops = row_ops();
    const floe_signal &signal = *c.signal;
    const int64_t unique = item / c.blocks, block = item % c.blocks;
    const int64_t first = c.first_call[unique], last = c.first_call[unique + 1];
    const int64_t expert = c.calls->expert[c.order[first]];
    const int64_t start = block * kBlockRows;
    const float *const bias = signal.bias == nullptr ? nullptr : signal.bias + expert * signal.neurons;
    // What is below the threshold even before the function is applied; two functions can make a value larger.
    const bool larger = signal.function == FLOE_CLAMPED_UP || signal.function == FLOE_RELU2;
    const float *const thresholds = larger ? nullptr : c.calls->threshold;
    const int64_t end = start + kBlockRows < signal.neurons ? start + kBlockRows : signal.neurons;
    uint8_t *scratch = c.scratch + worker * c.scratch_bytes;
    for (int64_t i = first; i < last; i++) c.counts[c.order[i] * c.blocks + block] = 0;
    for (int64_t n = start; n < end; n += kBatch) {
        const int rows = (int)(end - n < kBatch ? end - n : kBatch);
        Stored stored[kBatch];
        Ahead ahead[kBatch];
        matrix_rows(signal.row, signal.q, signal.scale, signal.zero, expert * signal.neurons + n, rows, stored, ahead);
        for (int64_t i = first; i < last; i += kBatch) {
            const Token *tokens[kBatch];
            float v[kBatch][kBatch];
            const int count = (int)(last - i < kBatch ? last - i : kBatch);
            for (int t = 0; t < count; t++) tokens[t] = c.tokens + c.calls->token[c.order[i + t]];
            ops.dot(signal.row, stored, rows, tokens, count, nullptr, v, scratch, ahead);
            for (int r = 0; r < rows; r++) ahead[r].lines = 0; // the first tokens have asked for them
            for (int t = 0; t < count; t++) {
                const int64_t call = c.order[i + t], place = call * c.blocks + block;
                int32_t &found = c.counts[place];
                const float threshold = thresholds == nullptr ? 0.0f : thresholds[call];
                for (int r = 0; r < rows; r++) {
                    const float z = bias == nullptr ? v[r][t] : v[r][t] + bias[n + r];
                    // Written in any case and kept by counting: a branch would often be guessed wrongly.
                    c.found_neurons[place * kBlockRows + found] = (int32_t)(n + r);
                    c.found_values[place * kBlockRows + found] = z;
                    found += !(std::fabs(z) < threshold); // NaN goes on to the result
                }
            }
        }
    }
    if (signal.function == FLOE_PLAIN) return;
    for (int64_t i = first; i < last; i++) apply(c, c.order[i], c.order[i] * c.blocks + block);
}

} // namespace
} // namespace floe

using namespace floe;

int64_t floe_signal_gemv(const float *x, int64_t tokens, const floe_signal *signal, const floe_calls *calls, int digits,
                         int threads, int64_t *offsets) {
    const int64_t neurons = signal->neurons, count = calls->count;
    const int64_t *const expert = calls->expert;
    if (code_bytes(signal->row) < 0 || !is_function(signal->function) || tokens < 0 || signal->experts < 0 ||
        neurons < 0 || count < 0 || neurons > INT32_MAX || digits < 1 || digits > 3 ||
        (count > 0 && calls->threshold == nullptr))
        return FLOE_BAD_SHAPE;
    if (!in_range(calls->token, count, tokens) || !in_range(expert, count, signal->experts)) return FLOE_BAD_INDEX;
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;

    const int64_t blocks = (neurons + kBlockRows - 1) / kBlockRows, places = count * blocks;
    Found &result = found();
    result.total = -1; // until all is done
    const int64_t scratch_bytes = aligned(signal->row.n + kChunk);
    uint8_t *memory =
        result.memory.take(2 * aligned(4 * places * kBlockRows) + aligned(4 * places) + 2 * aligned(8 * (count + 1)) +
                           tokens_bytes(signal->row, tokens) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;

    Context c = {};
    c.signal = signal;
    c.calls = calls;
    c.blocks = blocks;
    c.found_neurons = carve<int32_t>(memory, places * kBlockRows);
    c.found_values = carve<float>(memory, places * kBlockRows);
    c.counts = carve<int32_t>(memory, places);
    int64_t *order = carve<int64_t>(memory, count + 1), *first_call = carve<int64_t>(memory, count + 1);
    c.tokens = prepare_tokens(signal->row, x, tokens, digits, threads, memory);
    c.scratch = memory;
    c.scratch_bytes = scratch_bytes;

    // Calls of the same expert stand together; few calls, so looking through all of them is quick. Those that are left
    // out are in no place, and have found nothing.
    int64_t placed = 0, unique = 0;
    const auto left_out = [&](int64_t p) { return calls->threshold[p] == INFINITY; };
    for (int64_t p = 0; p < count; p++) {
        if (left_out(p)) {
            for (int64_t b = 0; b < blocks; b++) c.counts[p * blocks + b] = 0;
            continue;
        }
        bool known = false;
        for (int64_t earlier = 0; earlier < p; earlier++) known |= expert[earlier] == expert[p] && !left_out(earlier);
        if (known) continue;
        first_call[unique++] = placed;
        for (int64_t later = p; later < count; later++)
            if (expert[later] == expert[p] && !left_out(later)) order[placed++] = later;
    }
    first_call[unique] = placed;
    c.order = order;
    c.first_call = first_call;
    parallel_for(threads, unique * blocks, compute_block, &c);

    int64_t total = 0;
    for (int64_t p = 0; p < count; p++) {
        offsets[p] = total;
        for (int64_t b = 0; b < blocks; b++) total += c.counts[p * blocks + b];
    }
    offsets[count] = total;
    result.neurons = c.found_neurons;
    result.values = c.found_values;
    result.counts = c.counts;
    result.places = places;
    result.total = total;
    return total;
}

int floe_signal_take(int64_t count, int32_t *neurons, float *values) {
    const Found &result = found();
    if (count != result.total) return FLOE_BAD_SHAPE;
    for (int64_t place = 0; place < result.places; place++) {
        const int64_t here = result.counts[place];
        if (here == 0) continue; // perhaps nothing at all was found, and there is no buffer
        memcpy(neurons, result.neurons + place * kBlockRows, (size_t)here * sizeof(int32_t));
        memcpy(values, result.values + place * kBlockRows, (size_t)here * sizeof(float));
        neurons += here;
        values += here;
    }
    return FLOE_OK;
}
