// What the pool's operations have in common: taking slots and booking rows. `kernels/pool.py` defines it.
#pragma once

#include "eviction.h"

#include <algorithm>

namespace floe {
namespace {

inline int64_t expert_width(const floe_pool &p) { return p.experts * p.neurons; }

// Whether there is a slot for every row, so that none ever gives way.
inline bool holds_all(const floe_pool &p) { return p.capacity >= p.layers * expert_width(p); }

template <class Index> bool within(const Index *index, int64_t count, int64_t end) {
    int64_t signs = 0; // one of n and end - 1 - n is negative where n is outside, but for sums that overflow
    for (int64_t i = 0; i < count; i++) signs |= index[i] | (int64_t)((uint64_t)end - 1 - (uint64_t)index[i]);
    return signs >= 0;
}

inline bool rise(const int64_t *offsets, int64_t calls) {
    for (int64_t c = 0; c < calls; c++)
        if (offsets[c + 1] < offsets[c]) return false;
    return offsets[0] == 0;
}

inline int64_t free_slots(const floe_pool &p, bool urgent) {
    return p.counters[FLOE_POOL_FREE] - (urgent ? 0 : p.counters[FLOE_POOL_SPARE]);
}

// Free slots for the first of `count` rows; returns for how many.
inline int64_t take_free(const floe_pool &p, int64_t count, bool urgent, int32_t *slots) {
    int64_t &free_count = p.counters[FLOE_POOL_FREE], &spare = p.counters[FLOE_POOL_SPARE];
    const int64_t taken = std::min(free_slots(p, urgent), count);
    for (int64_t i = 0; i < taken; i++) slots[i] = p.free_slots[--free_count];
    spare = std::min(spare, free_count);
    return taken;
}

// Slots that were taken are free again.
inline void give_back(const floe_pool &p, int64_t count, const int32_t *slots) {
    for (int64_t i = count; i-- > 0;) p.free_slots[p.counters[FLOE_POOL_FREE]++] = slots[i];
}

// These rows are on their way into their slots from now on.
template <class Key>
void book(const floe_pool &p, int64_t layer, const Key *keys, int64_t count, bool urgent, const int32_t *slots) {
    int32_t *table = p.slots + layer * expert_width(p);
    const int64_t brought = ++p.counters[FLOE_POOL_BROUGHT], finds = p.counters[FLOE_POOL_FINDS];
    const int32_t word = (urgent ? stamp(p) : 0) + FILLING;
    const int64_t turns = (layer - p.counters[FLOE_POOL_LAYER] - 1 + p.layers) % p.layers;
    const int32_t mark = low(!p.by_score ? finds + brought : urgent ? finds : finds + 1 + turns);
    const int64_t first = layer * expert_width(p);
    for (int64_t i = 0; i < count; i++) {
        table[keys[i]] = slots[i];
        p.cells[slots[i]] = {word, (int32_t)(first + keys[i]), mark, p.raw[first + keys[i]]};
    }
}

// Rows that are on their way into these slots, each named once, have arrived.
inline void arrive(const floe_pool &p, int64_t count, const int32_t *slots) {
    const ExpertOf expert_of(p);
    for (int64_t i = 0; i < count; i++) {
        if (i + 24 < count) FLOE_PREFETCH(p.cells + slots[i + 24]);
        floe_cell &cell = p.cells[slots[i]];
        cell.word += READY - FILLING;
        p.residents[expert_of(cell.key)]++;
    }
}

} // namespace
} // namespace floe
