// Active neurons of a step, as the pool's operations take them.
#pragma once

#include "arch/numbers.inl"
#include "floe_offload.h"
#include "pool_slots.h"

#include <string.h>

namespace floe {
namespace {

inline int64_t seen_bytes(const floe_pool &p, const floe_found &f) {
    return f.width < 1 ? 0 : aligned(p.experts * (1 + p.neurons / f.width));
}

inline int64_t total_of(const floe_found &f) { return f.offsets[f.calls]; }

// A number of the caller's kind, which is checked.
inline float number_at(const void *numbers, int64_t kind, int64_t at) {
    if (kind == FLOE_FLOAT32) return ((const float *)numbers)[at];
    const uint16_t bits = ((const uint16_t *)numbers)[at];
    return kind == FLOE_FLOAT16 ? half_to_float(bits) : bits_to_float((uint32_t)bits << 16);
}

inline bool ascend(const int32_t *neurons, int64_t count) {
    int32_t falls = 0;
    for (int64_t i = 1; i < count; i++) falls |= neurons[i] <= neurons[i - 1];
    return !falls;
}

// How many of a step's neurons are among the keys (count). marks: as in floe_offload_right.
inline int64_t right_of(const floe_found &f, int64_t count, const int32_t *keys, uint8_t *marks) {
    int64_t right = 0;
    for (int64_t i = 0; i < count; i++) marks[keys[i]] = 1;
    for (int64_t c = 0; c < f.calls; c++) {
        const uint8_t *own = marks + f.experts[c] * f.width;
        for (int64_t i = f.offsets[c]; i < f.offsets[c + 1]; i++) right += own[f.neurons[i]];
    }
    for (int64_t i = 0; i < count; i++) marks[keys[i]] = 0;
    return right;
}

// Whether all of it may be indexed; `once`, if true before, becomes false where a neuron may be named twice.
inline int check_found(const floe_pool &p, const floe_found &f, uint8_t *seen, bool &once) {
    if (f.calls < 0 || f.tokens < 0 || f.top_k < 0 || f.width < 1 || p.neurons % f.width || f.layer < 0 ||
        f.layer >= p.layers || f.kind < FLOE_FLOAT32 || f.kind > FLOE_BFLOAT16)
        return FLOE_BAD_SHAPE;
    const int64_t parts = expert_width(p) / f.width;
    if (!within(f.experts, f.calls, parts) || !within(f.chosen, f.tokens * f.top_k, p.experts)) return FLOE_BAD_INDEX;
    if (!rise(f.offsets, f.calls) || total_of(f) > f.room) return FLOE_BAD_INDEX;
    memset(seen, 0, (size_t)parts);
    for (int64_t c = 0; c < f.calls; c++) {
        const int32_t *neurons = f.neurons + f.offsets[c];
        const int64_t count = f.offsets[c + 1] - f.offsets[c];
        if (count == 0) continue;
        once &= !seen[f.experts[c]];
        seen[f.experts[c]] = 1;
        const bool rising = ascend(neurons, count);
        if (rising ? neurons[0] < 0 || neurons[count - 1] >= f.width : !within(neurons, count, f.width))
            return FLOE_BAD_INDEX;
        once &= rising;
    }
    return FLOE_OK;
}

} // namespace
} // namespace floe
