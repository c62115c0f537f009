// Choice of the instruction set, layouts, and the operations that only move bytes.
#include "arch/cpu_features.h"
#include "buffers.h"
#include "expert_ops.h"
#include "marks.h"
#include "thread_pool.h"

#include <atomic>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace floe {
namespace {

Choice &chosen() {
    static Choice choice = choose_ops(nullptr);
    return choice;
}

int64_t plane(int64_t n, int bits) { return n / kChunk * (8 * bits) + (n % kChunk * bits + 7) / 8; }

constexpr int64_t kReadBlock = 256 * 1024;

// Rows that are named one by one, some at a time: scattered ones arrive sooner side by side than one after the other.
struct Batch {
    const uint8_t *rows[kBatch], *ahead[kBatch]; // ahead: those that come next
    int count;
};

struct Listed {
    const uint8_t *rows;
    const int64_t *index;
    int64_t row_bytes, wanted, per_item;

    Listed(const uint8_t *rows, const int64_t *index, int64_t row_bytes, int64_t wanted, int threads)
        : rows(rows), index(index), row_bytes(row_bytes), wanted(wanted), per_item(1 + kReadBlock / row_bytes) {
        const int64_t share = threads > 1 ? (wanted + threads - 1) / threads : wanted;
        if (share < per_item) per_item = share > kBatch ? share : kBatch;
    }

    int64_t items() const { return (wanted + per_item - 1) / per_item; }

    // use(first, batch) for all of an item.
    template <class Use> void each_batch(int64_t item, Use use) const {
        const int64_t end = (item + 1) * per_item < wanted ? (item + 1) * per_item : wanted;
        for (int64_t first = item * per_item; first < end; first += kBatch) {
            Batch batch;
            batch.count = (int)(end - first < kBatch ? end - first : kBatch);
            for (int r = 0; r < batch.count; r++) {
                const int64_t next = first + r + kBatch < end ? first + r + kBatch : first + r;
                batch.rows[r] = rows + index[first + r] * row_bytes;
                batch.ahead[r] = rows + index[next] * row_bytes;
            }
            use(first, batch);
        }
    }
};

} // namespace

const RowOps &row_ops() { return *chosen().ops; }

const PoolOps *pool_ops() { return chosen().ops == avx512_ops() ? avx512_pool() : nullptr; }

int64_t code_bytes(const floe_vector &v) {
    if (v.n < 1) return FLOE_BAD_SHAPE;
    if (v.bits == 16) return 2 * v.n;
    if (v.group < 1 || v.n % v.group || v.scale_bytes != 2 && (v.scale_bytes != 1 || v.bits > 4)) return FLOE_BAD_SHAPE;
    if (v.bits == 3) return v.n / 256 * 96 + plane(v.n % 256, 2) + plane(v.n % 256, 1);
    return v.bits == 2 || v.bits == 4 || v.bits == 8 ? plane(v.n, v.bits) : (int64_t)FLOE_BAD_SHAPE;
}

namespace {

// Of chunks: whole registers of digits (four chunks at most), whole vectors of 16 scales and sums.
int64_t digit_places(const floe_vector &v) { return 3 * (v.n + 4 * kChunk); }
int64_t scale_places(const floe_vector &v) { return v.n / kChunk + 16; }
int64_t sum_places(const floe_vector &v) { return v.n / kChunk + groups_of(v) + 16; }

} // namespace

int64_t token_bytes(const floe_vector &v) {
    return aligned(digit_places(v)) + aligned(4 * scale_places(v)) + aligned(4 * sum_places(v));
}

Token prepare_token(const floe_vector &v, const float *x, int digits, uint8_t *&memory) {
    Token token;
    token.x = x;
    token.digits = carve<int8_t>(memory, digit_places(v));
    token.scale = carve<float>(memory, scale_places(v));
    token.sums = carve<float>(memory, sum_places(v));
    token.digit_count = digits;
    row_ops().prepare(v, token);
    return token;
}

int64_t tokens_bytes(const floe_vector &v, int64_t count) {
    return aligned((int64_t)sizeof(Token) * count) + count * token_bytes(v);
}

Token *prepare_tokens(const floe_vector &v, const float *x, int64_t count, int digits, int threads, uint8_t *&memory) {
    struct Context {
        const floe_vector &v;
        const float *x;
        int digits;
        Token *tokens;
        uint8_t *memory;
    } context = {v, x, digits, carve<Token>(memory, count), memory};
    memory += count * token_bytes(v);
    const auto work = [](void *opaque, int64_t item, int) {
        const Context &c = *(const Context *)opaque;
        uint8_t *at = c.memory + item * token_bytes(c.v);
        c.tokens[item] = prepare_token(c.v, c.x + item * c.v.n, c.digits, at);
    };
    parallel_for(threads, count, work, &context);
    return context.tokens;
}

void matrix_rows(const floe_vector &v, const uint8_t *q, const uint8_t *scale, const uint8_t *zero, int64_t start,
                 int count, Stored *rows, Ahead *ahead) {
    const int64_t bytes = code_bytes(v), scale_bytes = v.scale_bytes * groups_of(v);
    // Beyond the two rows that are multiplied at once, and so far that a busy memory has brought it by then: half of it
    // is late (Zen 4), twice of it reads what another thread works on.
    const int64_t ahead_bytes = 2 * bytes > 8192 ? 2 * bytes : 8192;
    for (int r = 0; r < count; r++) {
        const int64_t at = start + r;
        rows[r] = {scale + at * scale_bytes, zero + at * scale_bytes, q + at * bytes};
        ahead[r] = {rows[r].codes + ahead_bytes, bytes / 64};
    }
    // Their scales lie elsewhere, and are too few for the processor to see that they are read in order.
    for (int64_t i = 0; i < count * scale_bytes; i += 64) {
        FLOE_PREFETCH(scale + (start + count) * scale_bytes + i);
        FLOE_PREFETCH(zero + (start + count) * scale_bytes + i);
    }
}

} // namespace floe

using namespace floe;

const char *floe_isa(void) { return chosen().ops->name; }

const char *floe_isa_reason(void) { return chosen().reason; }

int floe_select_isa(const char *name) {
    const Choice choice = choose_ops(name);
    if (choice.ops == nullptr) return FLOE_UNSUPPORTED;
    chosen() = choice;
    return FLOE_OK;
}

int floe_gather_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *index, int64_t wanted,
                     int threads, uint8_t *out) {
    if (row_bytes < 1 || count < 0 || wanted < 0) return FLOE_BAD_SHAPE;
    if (!in_range(index, wanted, count)) return FLOE_BAD_INDEX;
    struct Context {
        Listed listed;
        uint8_t *out;
    } context = {Listed(rows, index, row_bytes, wanted, threads), out};
    const auto work = [](void *opaque, int64_t item, int) {
        const Context &c = *(const Context *)opaque;
        c.listed.each_batch(item, [&](int64_t first, const Batch &batch) {
            uint8_t *to[kBatch];
            for (int r = 0; r < batch.count; r++) to[r] = c.out + (first + r) * c.listed.row_bytes;
            row_ops().copy(to, batch.rows, batch.ahead, batch.count, c.listed.row_bytes);
        });
    };
    parallel_for(threads, context.listed.items(), work, &context);
    return FLOE_OK;
}

int floe_pool_scatter(uint8_t *pool, int64_t slots, int64_t row_bytes, const int64_t *slot, int64_t count, int threads,
                      const uint8_t *records) {
    if (row_bytes < 1 || slots < 0 || count < 0) return FLOE_BAD_SHAPE;
    if (!in_range(slot, count, slots)) return FLOE_BAD_INDEX;
    thread_local Marks marks; // two threads would write a slot that is named twice
    if (const int error = marks.once(slot, count, slots)) return error;
    struct Context {
        uint8_t *pool;
        const int64_t *slot;
        int64_t row_bytes, count, per_item;
        const uint8_t *records;
    } context = {pool, slot, row_bytes, count, 1 + kReadBlock / row_bytes, records};
    const auto work = [](void *opaque, int64_t item, int) {
        const Context &c = *(const Context *)opaque;
        const int64_t end = (item + 1) * c.per_item < c.count ? (item + 1) * c.per_item : c.count;
        for (int64_t i = item * c.per_item; i < end; i++) {
            uint8_t *const to = c.pool + c.slot[i] * c.row_bytes;
            const uint8_t *const from = c.records + i * c.row_bytes, *const next = from + c.row_bytes;
            row_ops().copy(&to, &from, &next, 1, c.row_bytes);
        }
    };
    parallel_for(threads, (count + context.per_item - 1) / context.per_item, work, &context);
    return FLOE_OK;
}

int floe_advise_hugepages(void *data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 4096, start = ((uintptr_t)data + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)data + (uintptr_t)bytes) & ~(page - 1);
    if (bytes < 0 || end <= start) return FLOE_BAD_SHAPE;
    return madvise((void *)start, end - start, MADV_HUGEPAGE) == 0 ? FLOE_OK : FLOE_UNSUPPORTED;
#else
    (void)data;
    (void)bytes;
    return FLOE_UNSUPPORTED;
#endif
}

int floe_read(const uint8_t *data, int64_t bytes, int threads, uint64_t *checksum) {
    if (bytes < 0) return FLOE_BAD_SHAPE;
    struct Context {
        const uint8_t *data;
        int64_t bytes;
        std::atomic<uint64_t> sum{0};
    } context;
    context.data = data;
    context.bytes = bytes;
    const auto work = [](void *opaque, int64_t item, int) {
        Context &c = *(Context *)opaque;
        const int64_t start = item * kReadBlock;
        const int64_t count = c.bytes - start < kReadBlock ? c.bytes - start : kReadBlock;
        const uint8_t *const from = c.data + start, *const ahead = from + 2048;
        c.sum.fetch_xor(row_ops().read(&from, &ahead, 1, count));
    };
    parallel_for(threads, (bytes + kReadBlock - 1) / kReadBlock, work, &context);
    *checksum = context.sum;
    return FLOE_OK;
}

int floe_read_rows(const uint8_t *rows, int64_t count, int64_t row_bytes, const int64_t *index, int64_t wanted,
                   int threads, uint64_t *checksum) {
    if (row_bytes < 1 || count < 0 || wanted < 0) return FLOE_BAD_SHAPE;
    if (!in_range(index, wanted, count)) return FLOE_BAD_INDEX;
    struct Context {
        Listed listed;
        std::atomic<uint64_t> sum{0};
    } context = {Listed(rows, index, row_bytes, wanted, threads)};
    const auto work = [](void *opaque, int64_t item, int) {
        Context &c = *(Context *)opaque;
        uint64_t sum = 0;
        c.listed.each_batch(item, [&](int64_t, const Batch &batch) {
            sum ^= row_ops().read(batch.rows, batch.ahead, batch.count, c.listed.row_bytes);
        });
        c.sum.fetch_xor(sum);
    };
    parallel_for(threads, context.listed.items(), work, &context);
    *checksum = context.sum;
    return FLOE_OK;
}
