// Who gives way in the pool of rows; `kernels/offload/pool.py` defines it.
#pragma once

#include "arch/row_ops.h"
#include "src/buffers.h"
#include "floe.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif
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

// The lower bits of a count, as marks keep them.
inline int32_t low(int64_t count) { return (int32_t)(uint32_t)count; }

// How much later than `before` a mark is, both the lower bits of what was counted.
inline int32_t between(int32_t before, int32_t mark) { return (int32_t)((uint32_t)mark - (uint32_t)before); }

// Numbers that are not negative are in the order of their bits.
inline uint32_t ordered(float worth) {
    uint32_t bits;
    memcpy(&bits, &worth, sizeof bits);
    return bits & INT32_MAX;
}

// How many worths there are of each size.
struct Histogram {
    static constexpr int kShift = 19; // 16 buckets for each doubling of a worth
    static constexpr int kBuckets = 1 << (32 - kShift);

    uint32_t of[kBuckets] = {};

    void add(uint32_t worth) { of[worth >> kShift]++; }

    // The bucket in which the smallest `wanted` end, of at least so many; `below`: how many are in those before.
    uint32_t reaches(int64_t wanted, int64_t &below) const {
        uint32_t bucket = 0;
        for (below = 0; below + of[bucket] < wanted; bucket++) below += of[bucket];
        return bucket;
    }
};

// What may go: slots and their worth, as numbers that are in the same order.
struct Candidates {
    static constexpr uint32_t kAny = 0x7f800000; // infinity: what is worth that never goes

    using Worth = std::pair<uint32_t, int32_t>; // and slot

    Worth *rows = nullptr, *border = nullptr; // room for all of them
    int64_t count = 0;

    // Moves those of the `wanted` smallest worths to the front of `rows`; returns how many there are.
    int64_t select(int64_t wanted) {
        if (wanted >= count) return count;
        Histogram histogram;
        for (int64_t i = 0; i < count; i++) histogram.add(rows[i].first);
        int64_t below;
        const uint32_t bucket = histogram.reaches(wanted, below);
        // Those of lower buckets go, and some of this one.
        int64_t taken = 0, on_border = 0;
        for (int64_t i = 0; i < count; i++) {
            const Worth row = rows[i];
            const uint32_t mine = row.first >> Histogram::kShift;
            rows[taken] = row; // never ahead of i
            taken += mine < bucket;
            border[on_border] = row;
            on_border += mine == bucket;
        }
        const int64_t rest = wanted - taken;
        if (rest < on_border) std::nth_element(border, border + rest, border + on_border);
        std::copy(border, border + rest, rows + taken);
        return wanted;
    }

    // The worth that this share of the rows are below.
    uint32_t quantile(double share) {
        const int64_t rank = (int64_t)(share * (double)count);
        std::copy(rows, rows + count, border);
        std::nth_element(border, border + rank, border + count);
        return border[rank].first;
    }

    void leave_out_from(uint32_t limit) {
        int64_t stays = 0;
        for (int64_t i = 0; i < count; i++) {
            rows[stays] = rows[i];
            stays += rows[i].first < limit;
        }
        count = stays;
    }
};

// What stored means of an expert are multiplied by: score, turn, growth.
inline float factor_of(const floe_pool &p, int64_t layer, int64_t expert) {
    const int64_t away = (layer - p.counters[FLOE_POOL_LAYER] - 1 + p.layers) % p.layers,
                  at = layer * p.experts + expert;
    const double turn = 1 - p.turn * (double)away / (double)p.layers;
    const float factor = (float)(p.recent[at] * turn / p.growth[at]);
    return factor > 0 ? factor : 0.0f;
}

// What the row in a slot is worth. factors: of all experts; below 0 where none of its rows may go.
struct Scores {
    const float *factors;
    float prefetch_worth;
    ExpertOf expert_of;
    int32_t finds;

    Scores(const floe_pool &p, const float *by_expert)
        : factors(by_expert), prefetch_worth(p.prefetch_worth), expert_of(p), finds(low(p.counters[FLOE_POOL_FINDS])) {}

    uint32_t operator()(const floe_cell &cell, float factor) const {
        const float worth = cell.mean * factor;
        return ordered(between(finds, cell.mark) > 0 ? std::max(worth, prefetch_worth) : worth);
    }
};

#if defined(__SSE2__)
// `look_by_score`, four slots at a time, as far as there are four; moves `slot` behind them.
inline int64_t look_by_fours(const floe_pool &p, const Scores &score, int64_t &slot, int64_t end, uint32_t limit,
                             Candidates &found) {
    const Scores by = score;
    const floe_cell *__restrict cells = p.cells;
    Candidates::Worth *__restrict rows = found.rows;
    int64_t count = found.count;
    const __m128i finds = _mm_set1_epi32(by.finds), zero = _mm_setzero_si128();
    const __m128i is_ready = _mm_set1_epi32(READY), below = _mm_set1_epi32((int)limit);
    const __m128i positive = _mm_set1_epi32(INT32_MAX), four = _mm_set1_epi32(4);
    const __m128 least = _mm_set1_ps(by.prefetch_worth);
    __m128i seen = zero, places = _mm_add_epi32(_mm_set1_epi32((int)slot), _mm_set_epi32(3, 2, 1, 0));
    for (; slot + 4 <= end; slot += 4) {
        const floe_cell *c = cells + slot;
        const __m128i a = _mm_loadu_si128((const __m128i *)c), b = _mm_loadu_si128((const __m128i *)(c + 1));
        const __m128i d = _mm_loadu_si128((const __m128i *)(c + 2)), e = _mm_loadu_si128((const __m128i *)(c + 3));
        const __m128i ab = _mm_unpackhi_epi32(a, b), de = _mm_unpackhi_epi32(d, e);
        const __m128i state = _mm_unpacklo_epi64(_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(d, e));
        const __m128i mark = _mm_unpacklo_epi64(ab, de);
        const __m128 mean = _mm_castsi128_ps(_mm_unpackhi_epi64(ab, de));
        const __m128 factor = _mm_setr_ps(by.factors[by.expert_of(c[0].key)], by.factors[by.expert_of(c[1].key)],
                                          by.factors[by.expert_of(c[2].key)], by.factors[by.expert_of(c[3].key)]);
        const __m128i promised = _mm_cmpgt_epi32(_mm_sub_epi32(mark, finds), zero);
        const __m128 worth = _mm_max_ps(_mm_and_ps(_mm_castsi128_ps(promised), least), _mm_mul_ps(mean, factor));
        const __m128i order = _mm_and_si128(_mm_castps_si128(worth), positive);
        const __m128i held = _mm_cmpgt_epi32(zero, _mm_castps_si128(factor));
        const __m128i loose = _mm_andnot_si128(held, _mm_cmpeq_epi32(state, is_ready));
        seen = _mm_sub_epi32(seen, loose);
        const int fits = _mm_movemask_ps(_mm_castsi128_ps(_mm_and_si128(loose, _mm_cmpgt_epi32(below, order))));
        const __m128i first = _mm_unpacklo_epi32(order, places), second = _mm_unpackhi_epi32(order, places);
        _mm_storel_epi64((__m128i *)(rows + count), first);
        count += fits & 1;
        _mm_storel_epi64((__m128i *)(rows + count), _mm_unpackhi_epi64(first, first));
        count += fits >> 1 & 1;
        _mm_storel_epi64((__m128i *)(rows + count), second);
        count += fits >> 2 & 1;
        _mm_storel_epi64((__m128i *)(rows + count), _mm_unpackhi_epi64(second, second));
        count += fits >> 3;
        places = _mm_add_epi32(places, four);
    }
    alignas(16) int32_t sums[4];
    _mm_store_si128((__m128i *)sums, seen);
    found.count = count;
    return (int64_t)sums[0] + sums[1] + sums[2] + sums[3];
}
#endif

// Lists the rows of a window that nobody uses now and that are worth less than `limit`; returns how many nobody uses.
inline int64_t look_by_score(const floe_pool &p, const Scores &score, int64_t slot, int64_t end, uint32_t limit,
                             Candidates &found) {
    int64_t ready = 0;
    if (const PoolOps *ops = pool_ops()) {
        static_assert(sizeof(Candidates::Worth) == 8, "a worth in front of its slot");
        const Worths by = {
            score.factors, score.expert_of.factor, score.expert_of.shift, score.finds, READY, score.prefetch_worth,
            limit};
        slot = ops->look(p.cells, by, slot, end, (uint64_t *)found.rows, &found.count, &ready);
    }
#if defined(__SSE2__)
    ready += look_by_fours(p, score, slot, end, limit, found);
#endif
    for (; slot < end; slot++) {
        const floe_cell cell = p.cells[slot];
        const float factor = score.factors[score.expert_of(cell.key)];
        const uint32_t worth = score(cell, factor);
        const bool loose = (cell.state == READY) & (factor >= 0);
        found.rows[found.count] = {worth, (int32_t)slot};
        found.count += loose & (worth < limit);
        ready += loose;
    }
    return ready;
}

inline int64_t look_by_mark(const floe_pool &p, int64_t start, int64_t end, Candidates &found) {
    const ExpertOf expert_of(p);
    const int32_t now = low(p.counters[FLOE_POOL_FINDS] + p.counters[FLOE_POOL_BROUGHT]);
    const int64_t before = found.count;
    for (int64_t slot = start; slot < end; slot++) {
        const floe_cell cell = p.cells[slot];
        if (cell.state != READY || p.busy[expert_of(cell.key)]) continue;
        found.rows[found.count++] = {~(uint32_t)between(cell.mark, now), (int32_t)slot};
    }
    return found.count - before;
}

// Of all experts, for `Scores`.
inline void fill_factors(const floe_pool &p, float *factors) {
    for (int64_t l = 0; l < p.layers; l++)
        for (int64_t e = 0, at = l * p.experts; e < p.experts; e++, at++)
            factors[at] = p.busy[at] ? -1.0f : factor_of(p, l, e);
}

constexpr int64_t kBarSlots = 1024; // `BAR_SLOTS`

// Lists what may go, in one window, or more of them if much is in use and one has too few to choose from, at most once
// round. Moves `hand` behind. by_bar: the first slots set the bar, and of the others only what is worth less is listed.
inline void look(const floe_pool &p, const Scores &score, int64_t wanted, uint32_t limit, bool by_bar, int64_t &hand,
                 Candidates &found) {
    const int64_t target = std::max(p.sample * wanted, p.smallest_window);
    const int64_t enough = std::max(target / 2, wanted);
    int64_t left = wanted ? p.capacity : std::min(target, p.capacity), ready = 0, seen = 0;
    found.count = 0;
    while (left > 0 && ready < enough) {
        const int64_t end = std::min(hand + std::min(target, left), p.capacity);
        left -= end - hand;
        while (hand < end) {
            const bool first = by_bar && seen < kBarSlots;
            const int64_t until = first ? std::min(end, hand + kBarSlots - seen) : end;
            ready +=
                p.by_score ? look_by_score(p, score, hand, until, limit, found) : look_by_mark(p, hand, until, found);
            seen += until - hand;
            hand = until;
            if (!first || seen < kBarSlots || found.count == 0) continue;
            limit = found.quantile(p.bar_share);
            memcpy(p.bar, &limit, sizeof limit);
            found.leave_out_from(limit);
        }
        hand %= p.capacity;
    }
    if (!by_bar || seen >= kBarSlots || found.count == 0) return;
    const uint32_t bar = found.quantile(p.bar_share);
    memcpy(p.bar, &bar, sizeof bar);
}

// Evict up to `wanted` rows that are ready and not in use, and set the bar anew. Fills slots with theirs, returns how
// many.
inline int64_t evict(const floe_pool &p, int64_t wanted, bool urgent, int32_t *slots, Candidates &found,
                     float *factors) {
    const Scores score(p, factors);
    if (p.by_score) fill_factors(p, factors);
    const uint32_t limit = urgent ? Candidates::kAny : std::min(Candidates::kAny, ordered(p.prefetch_worth));
    int64_t &hand = p.counters[FLOE_POOL_HAND];
    const int64_t start = hand;
    const bool by_bar = urgent && p.by_score;
    look(p, score, wanted, limit, by_bar, hand, found);
    if (by_bar && found.count < wanted) look(p, score, wanted, limit, false, hand = start, found);
    const int64_t taken = found.select(wanted);
    for (int64_t i = 0; i < taken; i++) {
        if (i + 16 < taken) FLOE_PREFETCH(p.slots + p.cells[found.rows[i + 16].second].key);
        const int32_t slot = slots[i] = found.rows[i].second, key = p.cells[slot].key;
        p.slots[key] = -1;
        p.cells[slot].state = FREE;
        p.residents[score.expert_of(key)]--;
    }
    p.counters[FLOE_POOL_EVICTED] += taken;
    return taken;
}

// Room for `evict`. The place behind the last is written to, but does not count. False if there is no memory.
inline bool make_room(const floe_pool &p, Candidates &found, float *&factors) {
    thread_local Buffer buffer;
    const int64_t places = p.capacity + 1, experts = p.layers * p.experts;
    uint8_t *memory = buffer.take(2 * aligned(8 * places) + aligned(4 * experts));
    if (memory == nullptr) return false;
    found.rows = carve<Candidates::Worth>(memory, places);
    found.border = carve<Candidates::Worth>(memory, places);
    factors = carve<float>(memory, experts);
    return true;
}

} // namespace
} // namespace floe
