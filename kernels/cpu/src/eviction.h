// Who gives way in the pool of rows; `kernels/pool.py` defines it.
#pragma once

#include "arch/row_ops.h"
#include "buffers.h"
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

// The word of a free slot that this step uses.
inline int32_t stamp(const floe_pool &p) { return (int32_t)(4 * (p.counters[FLOE_POOL_STEP] & ((1 << 28) - 1))); }

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

    void add(uint32_t worth, bool counts = true) { of[worth >> kShift] += counts; }

    // The bucket in which the smallest `wanted` end, of at least so many; `below`: how many are in those before.
    uint32_t reaches(int64_t wanted, int64_t &below) const {
        uint32_t bucket = 0;
        for (below = 0; below + of[bucket] < wanted; bucket++) below += of[bucket];
        return bucket;
    }
};

// What may go: slots and their worth, as numbers that are in the same order.
struct Candidates {
    static constexpr uint32_t kAny = INT32_MAX;

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
};

// What the row in a slot is worth.
struct Scores {
    const float *factors;
    float prefetch_worth;
    ExpertOf expert_of;
    int32_t in_use, finds;

    Scores(const floe_pool &p, const float *by_expert)
        : factors(by_expert), prefetch_worth(p.prefetch_worth), expert_of(p), in_use(stamp(p) + READY),
          finds(low(p.counters[FLOE_POOL_FINDS])) {}

    bool loose(const floe_cell &cell) const { return ((cell.word & 3) == READY) & (cell.word != in_use); }

    uint32_t operator()(const floe_cell &cell) const {
        const float worth = cell.mean * factors[expert_of(cell.key)];
        return ordered(between(finds, cell.mark) > 0 ? std::max(worth, prefetch_worth) : worth);
    }
};

// A worth below which a window probably has `wanted` rows and not many more, by a look at some of its slots; `limit`
// where that cannot be told. To choose among few is cheaper than among all.
inline uint32_t narrowed(const floe_pool &p, const Scores &score, int64_t start, int64_t window, int64_t wanted,
                         uint32_t limit) {
    constexpr int64_t kSide = 4, kLooks = 256; // cells of a line of memory, and lines
    const int64_t stride = window / kLooks;
    if (stride < 4 * kSide) return limit;
    Histogram histogram;
    int64_t found = 0;
    for (int64_t look = 0, slot = start; look < kLooks; look++, slot += stride) {
        if (slot + kSide > p.capacity) slot %= p.capacity - kSide;
        for (int64_t i = slot; i < slot + kSide; i++) {
            const uint32_t worth = score(p.cells[i]);
            const bool fits = score.loose(p.cells[i]) & (worth < limit);
            histogram.add(worth, fits);
            found += fits;
        }
    }
    const int64_t goal = 1 + wanted * (kLooks * kSide) * 4 / (3 * window);
    int64_t below;
    return goal > found ? limit : std::min(limit, (histogram.reaches(goal, below) + 1) << Histogram::kShift);
}

#if defined(__SSE2__)
// `look_by_score`, four slots at a time, as far as there are four; moves `slot` behind them.
inline int64_t look_by_fours(const floe_pool &p, const Scores &score, int64_t &slot, int64_t end, uint32_t limit,
                             Candidates &found) {
    const Scores by = score;
    const floe_cell *__restrict cells = p.cells;
    Candidates::Worth *__restrict rows = found.rows;
    int64_t count = found.count;
    const __m128i in_use = _mm_set1_epi32(by.in_use), finds = _mm_set1_epi32(by.finds), zero = _mm_setzero_si128();
    const __m128i three = _mm_set1_epi32(3), is_ready = _mm_set1_epi32(READY), below = _mm_set1_epi32((int)limit);
    const __m128i positive = _mm_set1_epi32(INT32_MAX), four = _mm_set1_epi32(4);
    const __m128 least = _mm_set1_ps(by.prefetch_worth);
    __m128i seen = zero, places = _mm_add_epi32(_mm_set1_epi32((int)slot), _mm_set_epi32(3, 2, 1, 0));
    for (; slot + 4 <= end; slot += 4) {
        const floe_cell *c = cells + slot;
        const __m128i a = _mm_loadu_si128((const __m128i *)c), b = _mm_loadu_si128((const __m128i *)(c + 1));
        const __m128i d = _mm_loadu_si128((const __m128i *)(c + 2)), e = _mm_loadu_si128((const __m128i *)(c + 3));
        const __m128i ab = _mm_unpackhi_epi32(a, b), de = _mm_unpackhi_epi32(d, e);
        const __m128i word = _mm_unpacklo_epi64(_mm_unpacklo_epi32(a, b), _mm_unpacklo_epi32(d, e));
        const __m128i mark = _mm_unpacklo_epi64(ab, de);
        const __m128 mean = _mm_castsi128_ps(_mm_unpackhi_epi64(ab, de));
        const __m128 factor = _mm_setr_ps(by.factors[by.expert_of(c[0].key)], by.factors[by.expert_of(c[1].key)],
                                          by.factors[by.expert_of(c[2].key)], by.factors[by.expert_of(c[3].key)]);
        const __m128i promised = _mm_cmpgt_epi32(_mm_sub_epi32(mark, finds), zero);
        const __m128 worth = _mm_max_ps(_mm_and_ps(_mm_castsi128_ps(promised), least), _mm_mul_ps(mean, factor));
        const __m128i order = _mm_and_si128(_mm_castps_si128(worth), positive);
        const __m128i loose =
            _mm_andnot_si128(_mm_cmpeq_epi32(word, in_use), _mm_cmpeq_epi32(_mm_and_si128(word, three), is_ready));
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
        const Worths by = {score.factors,         score.expert_of.factor,
                           score.expert_of.shift, score.in_use,
                           score.finds,           READY,
                           score.prefetch_worth,  limit};
        slot = ops->look(p.cells, by, slot, end, (uint64_t *)found.rows, &found.count, &ready);
    }
#if defined(__SSE2__)
    ready += look_by_fours(p, score, slot, end, limit, found);
#endif
    for (; slot < end; slot++) {
        const floe_cell cell = p.cells[slot];
        const uint32_t worth = score(cell);
        const bool loose = score.loose(cell);
        found.rows[found.count] = {worth, (int32_t)slot};
        found.count += loose & (worth < limit);
        ready += loose;
    }
    return ready;
}

inline int64_t look_by_mark(const floe_pool &p, int64_t start, int64_t end, Candidates &found) {
    const int32_t in_use = stamp(p) + READY;
    const int32_t now = low(p.counters[FLOE_POOL_FINDS] + p.counters[FLOE_POOL_BROUGHT]);
    const int64_t before = found.count;
    for (int64_t slot = start; slot < end; slot++) {
        const floe_cell cell = p.cells[slot];
        if ((cell.word & 3) != READY || cell.word == in_use) continue;
        found.rows[found.count++] = {~(uint32_t)between(cell.mark, now), (int32_t)slot};
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

// Lists what may go, in one window, or more of them if much is in use and one has too few to choose from, at most once
// round. Moves `hand` behind.
inline void look(const floe_pool &p, const Scores &score, int64_t wanted, uint32_t limit, int64_t &hand,
                 Candidates &found) {
    const int64_t target = std::max(p.sample * wanted, p.smallest_window);
    const int64_t enough = std::max(target / 2, wanted);
    found.count = 0;
    for (int64_t left = p.capacity, ready = 0; left > 0 && ready < enough;) {
        const int64_t end = std::min(hand + std::min(target, left), p.capacity);
        ready += p.by_score ? look_by_score(p, score, hand, end, limit, found) : look_by_mark(p, hand, end, found);
        left -= end - hand;
        hand = end % p.capacity;
    }
}

// Evict up to `wanted` rows that are ready and not in use. Fills slots with theirs, returns how many.
inline int64_t evict(const floe_pool &p, int64_t wanted, bool urgent, int32_t *slots, Candidates &found,
                     float *factors) {
    int64_t &hand = p.counters[FLOE_POOL_HAND];
    const int64_t start = hand, window = std::min(p.capacity, p.sample * wanted);
    const Scores score(p, factors);
    const uint32_t most = urgent ? Candidates::kAny : ordered(p.prefetch_worth);
    uint32_t limit = most;
    if (p.by_score) {
        fill_factors(p, factors);
        limit = narrowed(p, score, start, window, wanted, most);
    }
    look(p, score, wanted, limit, hand, found);
    if (found.count < wanted && limit != most) look(p, score, wanted, most, hand = start, found);
    const int64_t taken = found.select(wanted);
    for (int64_t i = 0; i < taken; i++) {
        if (i + 16 < taken) FLOE_PREFETCH(p.slots + p.cells[found.rows[i + 16].second].key);
        const int32_t slot = slots[i] = found.rows[i].second, key = p.cells[slot].key;
        p.slots[key] = -1;
        p.cells[slot].word = FREE;
        p.residents[score.expert_of(key)]--;
    }
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
