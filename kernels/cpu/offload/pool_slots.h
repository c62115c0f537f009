// What the pool's operations have in common: taking slots and booking rows. `kernels/offload/pool.py` defines it.
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

// Prefetches leave as many as the next step's visitors need.
inline int64_t free_slots(const floe_pool &p, bool urgent) {
    const int64_t all = p.counters[FLOE_POOL_FREE];
    if (urgent) return all;
    return std::max((int64_t)0, std::min(all, all + p.counters[FLOE_POOL_VISITING] - p.counters[FLOE_POOL_SPARE]));
}

// Free slots for the first of `count` rows; returns for how many.
inline int64_t take_free(const floe_pool &p, int64_t count, bool urgent, int32_t *slots) {
    int64_t &free_count = p.counters[FLOE_POOL_FREE];
    const int64_t taken = std::min(free_slots(p, urgent), count);
    for (int64_t i = 0; i < taken; i++) slots[i] = p.free_slots[--free_count];
    return taken;
}

// Slots that were taken are free again.
inline void give_back(const floe_pool &p, int64_t count, const int32_t *slots) {
    for (int64_t i = count; i-- > 0;) p.free_slots[p.counters[FLOE_POOL_FREE]++] = slots[i];
}

// No row of this expert is evicted until the step is over.
inline void hold(const floe_pool &p, int64_t layer, int64_t expert) { p.busy[layer * p.experts + expert] = 1; }

// The step is over: visitors leave.
inline void release(const floe_pool &p) {
    memset(p.busy, 0, (size_t)(p.layers * p.experts));
    int64_t &visiting = p.counters[FLOE_POOL_VISITING], &free_count = p.counters[FLOE_POOL_FREE];
    std::copy(p.visitors, p.visitors + visiting, p.free_slots + free_count);
    free_count += visiting;
    visiting = 0;
}

// These rows are on their way into their slots from now on.
template <class Key>
void book(const floe_pool &p, int64_t layer, const Key *keys, int64_t count, bool urgent, const int32_t *slots) {
    int32_t *table = p.slots + layer * expert_width(p);
    const int64_t brought = ++p.counters[FLOE_POOL_BROUGHT], finds = p.counters[FLOE_POOL_FINDS];
    const int64_t turns = (layer - p.counters[FLOE_POOL_LAYER] - 1 + p.layers) % p.layers;
    const int32_t mark = low(!p.by_score ? finds + brought : urgent ? finds : finds + 1 + turns);
    const int64_t first = layer * expert_width(p);
    const ExpertOf expert_of(p);
    p.counters[FLOE_POOL_COMING] += count;
    for (int64_t i = 0; i < count; i++) {
        if (i + 16 < count) FLOE_PREFETCH(p.cells + slots[i + 16]);
        const int32_t key = (int32_t)(first + keys[i]);
        table[keys[i]] = slots[i];
        p.cells[slots[i]] = {FILLING, key, mark, p.raw[key]};
        if (urgent) p.busy[expert_of(key)] = 1;
    }
}

// Slots for visitors, free ones first; returns for how many. They are visitors once they are `lent`.
inline int64_t visit(const floe_pool &p, int64_t wanted, int32_t *slots, Candidates &found, float *factors) {
    const int64_t taken = take_free(p, wanted, true, slots);
    return taken == wanted ? taken : taken + evict(p, wanted - taken, true, slots + taken, found, factors);
}

inline void lent(const floe_pool &p, int64_t count, const int32_t *slots) {
    std::copy(slots, slots + count, p.visitors + p.counters[FLOE_POOL_VISITING]);
    p.counters[FLOE_POOL_VISITING] += count;
}

constexpr int64_t kExamined = 2048, kFewer = 512; // `EXAMINED`, `FEWER`

// Which of the last visitors stay, as positions in their order: the first ones for which there is room in any case, and
// of some of the others those that are worth more than the bar. Returns how many.
template <class Key>
int64_t worthy(const floe_pool &p, int64_t layer, int64_t count, const Key *keys, int64_t surplus, int32_t *stays) {
    const int64_t sure = p.by_score ? std::min(surplus, count) : count, rest = count - sure;
    for (int64_t i = 0; i < sure; i++) stays[i] = (int32_t)i;
    if (rest == 0) return count;
    const float *raw = p.raw + layer * expert_width(p), bar = *p.bar;
    const int64_t start = p.counters[FLOE_POOL_BROUGHT] * kExamined % rest, most = std::min(kExamined, rest);
    int64_t total = sure, first = -p.neurons;
    float factor = 0;
    const auto examine = [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t key = keys[i];
            if ((uint64_t)(key - first) >= (uint64_t)p.neurons) {
                first = key / p.neurons * p.neurons;
                factor = factor_of(p, layer, key / p.neurons);
            }
            stays[total] = (int32_t)i;
            total += raw[key] * factor > bar;
        }
    };
    const int64_t beyond = std::max((int64_t)0, start + most - rest); // these come round to the front
    examine(sure, sure + beyond);
    examine(sure + start, sure + start + most - beyond);
    return total;
}

// As `floe_pool_keep`, once arguments are checked. stays, kept_keys: room for `count`.
template <class Key>
int64_t keep(const floe_pool &p, int64_t layer, int64_t count, const Key *keys, const int32_t *slots, int64_t spared,
             int32_t *stays, int32_t *kept_keys, int32_t *kept, Candidates &found, float *factors) {
    int64_t &spare = p.counters[FLOE_POOL_SPARE], &visiting = p.counters[FLOE_POOL_VISITING];
    spare = std::min(std::max(count, spare - spare / kFewer), p.capacity / spared);
    if (holds_all(p) || !p.by_score) spare = 0;
    const int64_t surplus = std::max((int64_t)0, p.counters[FLOE_POOL_FREE] + visiting - spare);
    const int64_t total = worthy(p, layer, count, keys, surplus, stays);
    int32_t *leaving = p.visitors + visiting - count;
    for (int64_t i = total; i-- > 0;) {
        kept[i] = slots[stays[i]];
        kept_keys[i] = (int32_t)keys[stays[i]];
        leaving[stays[i]] = p.visitors[--visiting]; // the last one moves to the place of one that stays
    }
    book(p, layer, kept_keys, total, true, kept);
    if (count == 0 || holds_all(p)) return total;
    int64_t &free_count = p.counters[FLOE_POOL_FREE];
    const int64_t missing = std::max((int64_t)0, spare - free_count - visiting);
    free_count += evict(p, missing, true, p.free_slots + free_count, found, factors);
    return total;
}

// Rows that are on their way into these slots, each named once, have arrived.
inline void arrive(const floe_pool &p, int64_t count, const int32_t *slots) {
    const ExpertOf expert_of(p);
    p.counters[FLOE_POOL_COMING] -= count;
    for (int64_t i = 0; i < count; i++) {
        if (i + 24 < count) FLOE_PREFETCH(p.cells + slots[i + 24]);
        floe_cell &cell = p.cells[slots[i]];
        cell.state = READY;
        p.residents[expert_of(cell.key)]++;
    }
}

} // namespace
} // namespace floe
