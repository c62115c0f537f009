// moe_step: up_gemv, then sparse_swiglu of what it found, in one call: between the two nothing leaves the library.
#include "buffers.h"
#include "floe.h"

using namespace floe;

int floe_moe_step(const float *x, int64_t tokens, const floe_vector *up, const uint8_t *q, const uint8_t *scale,
                  const uint8_t *zero, const floe_vector *gate, const floe_vector *down, const uint8_t *rows,
                  int64_t experts, int64_t neurons, int64_t row_bytes, const int32_t *slots, int64_t slot_count,
                  int64_t calls, const int64_t *call_token, const int64_t *call_expert, const float *weights,
                  const float *thresholds, const float *down_thresholds, int digits, int threads, float *y,
                  int64_t *counts) {
    thread_local Buffer ends, lists;
    if (calls < 0) return FLOE_BAD_SHAPE;
    uint8_t *memory = ends.take(aligned(8 * (calls + 1)) + aligned(8 * calls));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    int64_t *offsets = carve<int64_t>(memory, calls + 1), *kept = carve<int64_t>(memory, calls);
    const int64_t total = floe_up_gemv(x, tokens, up, q, scale, zero, experts, neurons, calls, call_token, call_expert,
                                       thresholds, digits, threads, offsets);
    if (total < 0) return (int)total;
    memory = lists.take(aligned(8 * total) + aligned(4 * total));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    int64_t *active = carve<int64_t>(memory, total);
    float *values = carve<float>(memory, total);
    int error = floe_up_take(total, active, values);
    if (!error)
        error = floe_sparse_swiglu(x, tokens, gate, down, rows, experts, neurons, row_bytes, slots, slot_count, calls,
                                   call_token, call_expert, weights, offsets, active, values, down_thresholds, digits,
                                   threads, y, kept);
    if (error) return error;
    for (int64_t p = 0; p < calls; p++) {
        counts[2 * p] = offsets[p + 1] - offsets[p];
        counts[2 * p + 1] = kept[p];
    }
    return FLOE_OK;
}
