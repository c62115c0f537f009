// Logits of a token. A head in two planes is read whole only where tokens can be drawn: the first plane tells about how
// likely each is, and of those that may be likely enough the second one is added.
#include "buffers.h"
#include "expert_ops.h"
#include "thread_pool.h"

#include <algorithm>
#include <cmath>

namespace floe {
namespace {

// Standard deviations that a first plane may be wrong by. Products of thousands of weights are spread normally.
constexpr float kSure = 8;

struct Rest {
    const floe_matrix &plane;
    const Token *token;
    const int32_t *rows;
    int64_t count;
    uint8_t *scratch;
    int64_t scratch_bytes;
    float *logits;
};

// logits[row] += plane[row] · x, for a few of the rows.
void add_rows(void *opaque, int64_t item, int worker) {
    const Rest &r = *(const Rest *)opaque;
    const floe_matrix &m = r.plane;
    const int32_t *const rows = r.rows + item * kBatch;
    const int count = (int)std::min<int64_t>(r.count - item * kBatch, kBatch);
    Stored w[kBatch];
    Ahead ahead[kBatch];
    float out[kBatch][kBatch];
    for (int i = 0; i < count; i++) {
        matrix_rows(m.row, m.q, m.scale, m.zero, rows[i], 1, w + i, ahead + i);
        ahead[i].lines = 0; // what lies behind it is not wanted
        FLOE_PREFETCH(w[i].scale);
        FLOE_PREFETCH(w[i].zero);
        for (int64_t at = 0; at < code_bytes(m.row); at += 64) FLOE_PREFETCH(w[i].codes + at);
    }
    row_ops().dot(m.row, w, count, &r.token, 1, nullptr, out, r.scratch + worker * r.scratch_bytes, ahead);
    for (int i = 0; i < count; i++) r.logits[rows[i]] += out[i][0];
}

// The standard deviation of what the second plane adds.
float deviation(const floe_vector &v, const float *spread, const float *x) {
    double total = 0;
    for (int64_t g = 0; g < v.n / v.group; g++) {
        double squares = 0;
        for (int64_t i = g * v.group; i < (g + 1) * v.group; i++) squares += (double)x[i] * x[i];
        total += squares * spread[g];
    }
    return (float)std::sqrt(total);
}

// Where the first plane is largest; NaN is larger than any number.
int32_t likeliest(const float *logits, int64_t count) {
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++)
        if (!(logits[i] <= logits[best]) && !std::isnan(logits[best])) best = i;
    return (int32_t)best;
}

// Adds the second plane where the sum may be no further than `reach` below the largest.
int add_rest(const floe_ends &e, const float *x, float reach, int digits, int threads, float *logits) {
    thread_local Buffer buffer;
    const floe_matrix &plane = *e.rest;
    const int64_t scratch_bytes = aligned(plane.row.n + kChunk);
    uint8_t *memory = buffer.take(aligned(4 * e.vocabulary) + tokens_bytes(plane.row, 1) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    int32_t *rows = carve<int32_t>(memory, e.vocabulary);
    const Token *token = prepare_tokens(plane.row, x, 1, digits, 1, memory);
    const int32_t best = likeliest(logits, e.vocabulary);
    Rest rest = {plane, token, &best, 1, memory, scratch_bytes, logits};
    add_rows(&rest, 0, 0);
    const float least = logits[best] - reach - kSure * deviation(plane.row, e.spread, x);
    int64_t found = 0;
    for (int64_t i = 0; i < e.vocabulary; i++) {
        rows[found] = (int32_t)i;
        found += !(logits[i] < least) && i != best;
    }
    rest.rows = rows;
    rest.count = found;
    parallel_for(found * code_bytes(plane.row) < kSmall ? 1 : threads, (found + kBatch - 1) / kBatch, add_rows, &rest);
    return FLOE_OK;
}

int add_whole(const floe_ends &e, const float *x, int digits, int threads, float *logits) {
    thread_local Buffer buffer;
    uint8_t *memory = buffer.take(aligned(4 * e.vocabulary));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *more = carve<float>(memory, e.vocabulary);
    const int code = multiply(*e.rest, x, digits, threads, more);
    for (int64_t i = 0; code == FLOE_OK && i < e.vocabulary; i++) logits[i] += more[i];
    return code;
}

} // namespace
} // namespace floe

using namespace floe;

int floe_head(const floe_ends *ends, const float *x, float reach, int digits, int threads, float *logits) {
    thread_local Buffer buffer;
    const floe_ends &e = *ends;
    if (e.hidden < 1 || e.vocabulary < 1 || e.vocabulary > INT32_MAX || !is_shape(e.head, e.vocabulary, e.hidden) ||
        (e.rest != nullptr && (!is_shape(*e.rest, e.vocabulary, e.hidden) || e.rest->row.bits > 8)))
        return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(aligned(4 * e.hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *normed = carve<float>(memory, e.hidden);
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    normalize(x, e.norm, e.hidden, e.eps, normed);
    const int code = multiply(e.head, normed, digits, threads, logits);
    if (code != FLOE_OK || e.rest == nullptr) return code;
    if (e.spread == nullptr || !(reach < INFINITY)) return add_whole(e, normed, digits, threads, logits);
    return add_rest(e, normed, reach, digits, threads, logits);
}
