// moe_step: signal_gemv, then sparse_swiglu of what it found, in one call: between the two nothing leaves the library.
#include "buffers.h"
#include "expert_ops.h"

using namespace floe;

int floe_moe_step(const float *x, int64_t tokens, const floe_signal *signal, const floe_rows *rows,
                  const floe_calls *calls, int digits, int threads, float *y, int64_t *counts) {
    thread_local Buffer ends, lists;
    const int64_t count = calls->count;
    if (count < 0 || !complete(*signal, *rows) || signal->row.n != rows->other.n || signal->experts != rows->experts ||
        signal->neurons != rows->neurons)
        return FLOE_BAD_SHAPE;
    uint8_t *memory = ends.take(aligned(8 * (count + 1)) + aligned(8 * count));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    int64_t *offsets = carve<int64_t>(memory, count + 1), *kept = carve<int64_t>(memory, count);
    const int64_t total = floe_signal_gemv(x, tokens, signal, calls, digits, threads, offsets);
    if (total < 0) return (int)total;
    memory = lists.take(2 * aligned(4 * total));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    int32_t *neurons = carve<int32_t>(memory, total);
    float *values = carve<float>(memory, total);
    const floe_active active = {offsets, neurons, values};
    int error = floe_signal_take(total, neurons, values);
    if (!error) error = floe_sparse_swiglu(x, tokens, rows, calls, &active, digits, threads, y, kept);
    if (error) return error;
    for (int64_t p = 0; p < count; p++) {
        counts[2 * p] = offsets[p + 1] - offsets[p];
        counts[2 * p + 1] = kept[p];
    }
    return FLOE_OK;
}
