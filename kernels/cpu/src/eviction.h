// Who gives way in the pool of rows; `kernels/pool.py` defines it.
#pragma once

#include "arch/row_ops.h"
#include "buffers.h"
#include "floe.h"

#include <string.h>

#include <algorithm>
#include <utility>

namespace floe {
namespace {

enum { FREE, FILLING, READY }; // a slot's state, see `RowTable`

// The expert of a flat key, by a product instead of a division: exact for keys below 2^31 (Granlund and Montgomery
// 1994, theorem 4.2: the factor exceeds 2^shift / neurons by less than 2^(shift - 31) / neurons).
struct ExpertOf {
    int shift = 31;
    uint64_t factor;
    explicit ExpertOf(const floe_pool &p) {
        while (((int64_t)1 << (shift - 31)) < p.neurons) shift++;
        factor = (((uint64_t)1 << shift) + (uint64_t)p.neurons - 1) / (uint64_t)p.neurons;
    }
    int64_t operator()(int32_t key) const { return (int64_t)(((uint64_t)(uint32_t)key * factor) >> shift); }
};

// The word of a free slot that this step uses.
inline int32_t stamp(const floe_pool &p) { return (int32_t)(4 * (p.counters[FLOE_POOL_STEP] & ((1 << 28) - 1))); }

// The lower bits of a count, as marks keep them.
inline int32_t low(int64_t count) { return (int32_t)(uint32_t)count; }

// How much later than `before` a mark is, both the lower bits of what was counted.
inline int32_t between(int32_t before, int32_t mark) { return (int32_t)((uint32_t)mark - (uint32_t)before); }

// What may go: slots and their worth, as numbers that are in the same order.
struct Candidates {
    static constexpr int kShift = 19; // 16 buckets for each doubling of a worth
    static constexpr int kBuckets = 1 << (32 - kShift);

    using Worth = std::pair<uint32_t, int32_t>; // and slot

    int32_t *slots = nullptr;
    uint32_t *worths = nullptr;
    Worth *border = nullptr; // room for all of them
    int64_t count = 0;
    uint32_t histogram[kBuckets] = {};

    // Moves those of the `wanted` smallest worths to the front of `slots`; returns how many there are.
    int64_t select(int64_t wanted) {
        if (wanted >= count) return count;
        int64_t below = 0;
        uint32_t bucket = 0;
        while (below + histogram[bucket] < wanted) below += histogram[bucket++];
        // Those of lower buckets go, and some of this one.
        int64_t taken = 0, on_border = 0;
        for (int64_t i = 0; i < count; i++) {
            const int32_t slot = slots[i];
            const uint32_t worth = worths[i], mine = worth >> kShift;
            slots[taken] = slot; // never ahead of i
            taken += mine < bucket;
            border[on_border] = {worth, slot};
            on_border += mine == bucket;
        }
        const int64_t rest = wanted - taken;
        if (rest < on_border) std::nth_element(border, border + rest, border + on_border);
        for (int64_t i = 0; i < rest; i++) slots[taken + i] = border[i].second;
        return wanted;
    }
};

// Numbers that are not negative are in the order of their bits.
inline uint32_t ordered(float worth) {
    uint32_t bits;
    memcpy(&bits, &worth, sizeof bits);
    return bits;
}

// A window of slots; returns how many of them hold rows that nobody uses now.
inline int64_t look_by_score(const floe_pool &p, int64_t start, int64_t end, bool urgent, const float *factors,
                             Candidates &found) {
    const ExpertOf expert_of(p);
    const int32_t in_use = stamp(p) + READY, finds = low(p.counters[FLOE_POOL_FINDS]);
    int64_t ready = 0, count = found.count;
    for (int64_t slot = start; slot < end; slot++) {
        const floe_cell cell = p.cells[slot];
        const bool loose = ((cell.word & 3) == READY) & (cell.word != in_use);
        float worth = cell.mean * factors[expert_of(cell.key)];
        worth = between(finds, cell.mark) > 0 ? std::max(worth, p.prefetch_worth) : worth;
        const bool fits = loose & (urgent | (worth < p.prefetch_worth));
        const uint32_t order = ordered(worth);
        found.slots[count] = (int32_t)slot;
        found.worths[count] = order;
        found.histogram[order >> Candidates::kShift] += fits;
        count += fits;
        ready += loose;
    }
    found.count = count;
    return ready;
}

inline int64_t look_by_mark(const floe_pool &p, int64_t start, int64_t end, Candidates &found) {
    const int32_t in_use = stamp(p) + READY;
    const int32_t now = low(p.counters[FLOE_POOL_FINDS] + p.counters[FLOE_POOL_BROUGHT]);
    const int64_t before = found.count;
    for (int64_t slot = start; slot < end; slot++) {
        const floe_cell cell = p.cells[slot];
        if ((cell.word & 3) != READY || cell.word == in_use) continue;
        const uint32_t order = ~(uint32_t)between(cell.mark, now);
        found.slots[found.count] = (int32_t)slot;
        found.worths[found.count++] = order;
        found.histogram[order >> Candidates::kShift]++;
    }
    return found.count - before;
}

// Factors of a row's worth by (layer, expert): score, turn, and what the stored means are multiplied by.
inline void fill_factors(const floe_pool &p, float *factors) {
    for (int64_t l = 0; l < p.layers; l++) {
        const int64_t away = (l - p.counters[FLOE_POOL_LAYER] - 1 + p.layers) % p.layers;
        const double turn = 1 - p.turn * (double)away / (double)p.layers;
        for (int64_t e = l * p.experts; e < (l + 1) * p.experts; e++)
            factors[e] = (float)(p.recent[e] * turn / p.growth[e]);
    }
}

// Evict up to `wanted` rows that are ready and not in use. Fills slots with theirs, returns how many.
inline int64_t evict(const floe_pool &p, int64_t wanted, bool urgent, int32_t *slots, Candidates &found,
                     float *factors) {
    const int64_t target = std::max(p.sample * wanted, p.smallest_window);
    const int64_t enough = std::max(target / 2, wanted);
    if (p.by_score) fill_factors(p, factors);
    int64_t &hand = p.counters[FLOE_POOL_HAND];
    // If much is in use, a window has too few to choose from, and the hand continues, at most once round.
    for (int64_t left = p.capacity, ready = 0; left > 0 && ready < enough;) {
        const int64_t end = std::min(hand + std::min(target, left), p.capacity);
        ready += p.by_score ? look_by_score(p, hand, end, urgent, factors, found) : look_by_mark(p, hand, end, found);
        left -= end - hand;
        hand = end % p.capacity;
    }
    const int64_t taken = found.select(wanted);
    const ExpertOf expert_of(p);
    for (int64_t i = 0; i < taken; i++) {
        if (i + 16 < taken) FLOE_PREFETCH(p.slots + p.cells[found.slots[i + 16]].key);
        const int32_t slot = slots[i] = found.slots[i], key = p.cells[slot].key;
        p.slots[key] = -1;
        p.cells[slot].word = FREE;
        p.residents[expert_of(key)]--;
    }
    return taken;
}

// Room for `evict`. The place behind the last is written to, but does not count. False if there is no memory.
inline bool make_room(const floe_pool &p, Candidates &found, float *&factors) {
    thread_local Buffer buffer;
    const int64_t places = p.capacity + 1, experts = p.layers * p.experts;
    uint8_t *memory = buffer.take(2 * aligned(4 * places) + aligned(8 * places) + aligned(4 * experts));
    if (memory == nullptr) return false;
    found.slots = carve<int32_t>(memory, places);
    found.worths = carve<uint32_t>(memory, places);
    found.border = carve<Candidates::Worth>(memory, places);
    factors = carve<float>(memory, experts);
    return true;
}

} // namespace
} // namespace floe
