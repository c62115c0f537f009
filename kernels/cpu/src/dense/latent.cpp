#include "latent.h"
#include "src/buffers.h"
#include "src/thread_pool.h"

#include <algorithm>
#include <cmath>

namespace floe {
namespace {

// Numbers of all queries.
int64_t queries_of(const floe_dense_layer &layer, const floe_latent &l) { return layer.heads * (l.still + l.turned); }

// Of what the first projection gives for them.
int64_t projected(const floe_dense_layer &layer, const floe_latent &l) {
    return l.asked == nullptr ? queries_of(layer, l) : l.asked->row.n;
}

// y (n) += a[0] · row `first` + a[1] · the next ...
void add_rows(const floe_matrix &m, int64_t first, int64_t count, const float *a, int digits, uint8_t *scratch,
              float *y) {
    const int64_t n = m.row.n;
    if (m.row.bits == 32) {
        const float *w = (const float *)m.q + first * n;
        for (int64_t r = 0; r < count; r++, w += n)
            for (int64_t i = 0; i < n; i++) y[i] += a[r] * w[i];
        return;
    }
    const int64_t sums = n / kChunk + groups_of(m.row);
    float *bias = carve<float>(scratch, sums);
    std::fill_n(bias, sums, 0.0f);
    for (int64_t r = 0; r < count; r += kBatch) {
        const int rows = (int)std::min<int64_t>(kBatch, count - r);
        Stored w[kBatch];
        Ahead ahead[kBatch];
        matrix_rows(m.row, m.q, m.scale, m.zero, first + r, rows, w, ahead);
        row_ops().axpy(m.row, w, a + r, rows, digits, y, bias, scratch, ahead);
    }
    row_ops().finish(m.row, y, bias);
}

// Bytes of scratch for it.
int64_t add_bytes(const floe_matrix &m) {
    return m.row.bits == 32 ? 0 : aligned(4 * (m.row.n / kChunk + groups_of(m.row))) + aligned(m.row.n + kChunk);
}

} // namespace

bool is_latent(const floe_dense_layer &layer, const floe_latent &l) {
    if (l.rank < 1 || l.still < 1 || l.turned < 2 || l.turned % 2 || l.value < 1) return false;
    if (layer.kv_heads != 1 || layer.dim != l.rank + l.turned || layer.stored == FLOE_KEPT_CODES) return false;
    if (layer.q_norm != nullptr || layer.sinks != nullptr || layer.clip < INFINITY) return false;
    if (l.made.bias != nullptr || !is_shape(l.made, layer.heads * (l.still + l.value), l.rank)) return false;
    const int64_t queries = queries_of(layer, l);
    if ((l.asked == nullptr) != (l.asked_norm == nullptr)) return false;
    if (l.asked != nullptr && !is_shape(*l.asked, queries, l.asked->row.n)) return false;
    return is_shape(layer.first, projected(layer, l) + layer.dim, layer.hidden) &&
           is_shape(layer.out, layer.hidden, layer.heads * l.value);
}

int64_t Latent::bytes(const floe_dense_layer &layer, int threads) {
    const floe_latent &l = *layer.latent;
    return aligned(4 * queries_of(layer, l)) + aligned(4 * layer.heads * layer.dim) +
           aligned(4 * layer.heads * l.value) + threads * add_bytes(l.made);
}

Latent::Latent(const floe_dense_layer &layer, const float *rope, int digits, int threads, float *joined,
               uint8_t *memory)
    : layer_(layer), l_(*layer.latent), rope_(rope), digits_(digits), threads_(threads), joined_(joined) {
    vector = joined + projected(layer, l_);
    float *const room = carve<float>(memory, queries_of(layer, l_));
    asked_ = l_.asked == nullptr ? joined : room;
    queries = carve<float>(memory, layer.heads * layer.dim);
    out = carve<float>(memory, layer.heads * l_.value);
    scratch_ = memory;
}

int Latent::prepare() {
    normalize(vector, l_.norm, l_.rank, l_.eps, vector);
    turn(vector + l_.rank, rope_, l_.turned);
    if (l_.asked != nullptr) {
        normalize(joined_, l_.asked_norm, l_.asked->row.n, l_.eps, joined_);
        const int code = multiply(*l_.asked, joined_, 1, digits_, threads_, asked_);
        if (code != FLOE_OK) return code;
    }
    parallel_for(threads_, layer_.heads, absorb, this);
    return FLOE_OK;
}

int Latent::release(const float *seen) {
    seen_ = seen;
    parallel_for(threads_, layer_.heads, make_values, this);
    return failed_;
}

void Latent::absorb(void *opaque, int64_t head, int worker) {
    const Latent &a = *(const Latent *)opaque;
    const floe_latent &l = a.l_;
    float *const asked = a.asked_ + head * (l.still + l.turned), *const query = a.queries + head * a.layer_.dim;
    turn(asked + l.still, a.rope_, l.turned);
    std::fill_n(query, l.rank, 0.0f);
    add_rows(l.made, a.made_at(head), l.still, asked, a.digits_, a.scratch_ + worker * add_bytes(l.made), query);
    std::copy_n(asked + l.still, l.turned, query + l.rank);
    for (int64_t i = 0; i < a.layer_.dim; i++) query[i] *= a.layer_.scale;
}

void Latent::make_values(void *opaque, int64_t head, int) {
    const Latent &a = *(const Latent *)opaque;
    floe_matrix own = a.l_.made;
    const int64_t first = a.made_at(head) + a.l_.still;
    own.rows = a.l_.value, own.q += first * row_bytes(own);
    if (own.row.bits != 32) {
        const int64_t skipped = own.row.scale_bytes * first * groups_of(own.row);
        own.scale += skipped, own.zero += skipped;
    }
    const int code = multiply(own, a.seen_ + head * a.l_.rank, 1, a.digits_, 1, a.out + head * a.l_.value);
    if (code != FLOE_OK) shared(a.failed_).store(code, std::memory_order_relaxed);
}

} // namespace floe
