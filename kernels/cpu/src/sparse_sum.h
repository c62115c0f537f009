// sparse_swiglu in three parts, so that the middle one can run beside its caller.
#pragma once

#include "buffers.h"
#include "expert_ops.h"

namespace floe {

struct Slice {
    int64_t call, start, end; // of the active list
    int64_t kept;             // neurons that reached the second threshold
};

// One at a time.
class SparseSum {
  public:
    // Checks everything; `compute` can then be called for each slice, once, by as many threads. What records point to
    // must stay until the last one.
    int prepare(const float *x, int64_t tokens, const floe_rows &rows, const floe_calls &calls,
                const floe_active &active, int digits, int threads);
    void compute(int64_t item, int worker);
    // Adds the slices up, with threads of its own.
    void add(int threads, float *y, int64_t *kept) const;

    int64_t slice_count = 0, token_count = 0;

    // What `prepare` made.
    floe_rows rows{};
    floe_calls calls{};
    floe_active active{};
    int64_t down_at = 0, scratch_bytes = 0, bias_stride = 0;
    const Token *prepared = nullptr;
    Slice *slices = nullptr;
    int digits = 0;
    uint8_t *scratch = nullptr;
    float *sums = nullptr, *bias = nullptr; // (slices, H) and (slices, groups)

  private:
    Buffer buffer_, sizes_;
};

} // namespace floe
