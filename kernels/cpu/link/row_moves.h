// Copies of rows between RAM, staging buffers and slots.
#pragma once

#include "src/expert_ops.h"
#include "src/thread_pool.h"

namespace floe {

// to[slots[i]] = from[index[i]] for `count` rows; index or slots NULL: in order. No slot is named twice.
struct RowMoves {
    const uint8_t *from;
    const int32_t *index;
    uint8_t *to;
    const int32_t *slots;
    int64_t count, row_bytes;

    void run(int threads) const {
        constexpr int64_t kBlock = 256 * 1024; // bytes of an item, as far as every thread gets some
        int64_t rows = 1 + kBlock / row_bytes;
        if (count < rows * threads) rows = (count + threads - 1) / threads;
        if (rows < kBatch) rows = kBatch;
        struct Context {
            const RowMoves &moves;
            int64_t rows;
        } context = {*this, rows};
        const auto work = [](void *opaque, int64_t item, int) {
            const Context &c = *(const Context *)opaque;
            const int64_t first = item * c.rows, last = first + c.rows;
            c.moves.run(first, last < c.moves.count ? last : c.moves.count);
        };
        parallel_for(threads, (count + rows - 1) / rows, work, &context);
    }

  private:
    const uint8_t *source(int64_t i) const { return from + (index == nullptr ? i : index[i]) * row_bytes; }
    uint8_t *target(int64_t i) const { return to + (slots == nullptr ? i : slots[i]) * row_bytes; }

    void run(int64_t first, int64_t last) const {
        for (; first < last; first += kBatch) {
            const int rows = (int)(last - first < kBatch ? last - first : kBatch);
            const uint8_t *read[kBatch], *ahead[kBatch];
            uint8_t *written[kBatch];
            for (int r = 0; r < rows; r++) {
                const int64_t i = first + r;
                read[r] = source(i);
                ahead[r] = source(i + kBatch < last ? i + kBatch : i);
                written[r] = target(i);
            }
            row_ops().copy(written, read, ahead, rows, row_bytes);
        }
    }
};

} // namespace floe
