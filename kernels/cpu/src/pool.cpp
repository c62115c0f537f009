// The tables of the pool of rows: slots for rows, and rows that arrive. `kernels/pool.py` defines all of it.
#include "buffers.h"
#include "floe.h"
#include "marks.h"
#include "pool_slots.h"

#include <algorithm>

namespace floe {
namespace {

// FLOE_OK if these keys are absent and each is named once; they are marked as wanted (-2) then.
int claim(int32_t *table, int64_t count, const int64_t *keys) {
    int64_t claimed = 0;
    while (claimed < count && table[keys[claimed]] == -1) table[keys[claimed++]] = -2;
    if (claimed == count) return FLOE_OK;
    for (int64_t i = 0; i < claimed; i++) table[keys[i]] = -1;
    return FLOE_REPEATED;
}

} // namespace
} // namespace floe

using namespace floe;

int64_t floe_pool_reserve(const floe_pool *pool, int64_t layer, int64_t count, const int64_t *keys, int urgent,
                          int32_t *slots) {
    const floe_pool &p = *pool;
    if (count < 0 || layer < 0 || layer >= p.layers) return FLOE_BAD_SHAPE;
    if (!within(keys, count, expert_width(p))) return FLOE_BAD_INDEX;
    int32_t *table = p.slots + layer * expert_width(p);
    Candidates found;
    float *factors = nullptr;
    if (free_slots(p, urgent != 0) < count && !make_room(p, found, factors)) return FLOE_NO_MEMORY;
    if (const int error = claim(table, count, keys)) return error;
    int64_t taken = take_free(p, count, urgent != 0, slots);
    if (taken < count) taken += evict(p, count - taken, urgent != 0, slots + taken, found, factors);
    book(p, layer, keys, taken, urgent != 0, slots);
    for (int64_t i = taken; i < count; i++) table[keys[i]] = -1;
    return taken;
}

int floe_pool_spare(const floe_pool *pool, int64_t wanted) {
    const floe_pool &p = *pool;
    int64_t &free_count = p.counters[FLOE_POOL_FREE];
    if (wanted < 0) return FLOE_BAD_SHAPE;
    if (holds_all(p)) return FLOE_OK;
    wanted = std::min(wanted, p.capacity); // so that no product of it is too large
    if (free_count < wanted) {
        Candidates found;
        float *factors = nullptr;
        if (!make_room(p, found, factors)) return FLOE_NO_MEMORY;
        free_count += evict(p, wanted - free_count, true, p.free_slots + free_count, found, factors);
    }
    p.counters[FLOE_POOL_SPARE] = std::min(wanted, free_count);
    return FLOE_OK;
}

int floe_pool_settle(const floe_pool *pool, int64_t count, const int32_t *slots, int arrived) {
    const floe_pool &p = *pool;
    const ExpertOf expert_of(p);
    const int state = arrived ? READY : FREE;
    for (int64_t i = 0; i < count; i++) {
        if (i + 16 < count && slots[i + 16] >= 0 && slots[i + 16] < p.capacity) FLOE_PREFETCH(p.cells + slots[i + 16]);
        const bool fits = slots[i] >= 0 && slots[i] < p.capacity && (p.cells[slots[i]].word & 3) == FILLING;
        if (fits) {
            p.cells[slots[i]].word += state - FILLING; // one that is named twice is not filling the second time
            continue;
        }
        for (int64_t back = 0; back < i; back++) p.cells[slots[back]].word -= state - FILLING;
        return FLOE_BAD_INDEX;
    }
    for (int64_t i = 0; i < count; i++) {
        const int32_t slot = slots[i], key = p.cells[slot].key;
        if (arrived) {
            p.residents[expert_of(key)]++;
        } else {
            p.cells[slot].word = FREE;
            p.slots[key] = -1;
            p.free_slots[p.counters[FLOE_POOL_FREE]++] = slot;
        }
    }
    return FLOE_OK;
}

int floe_landing(int64_t count, const int64_t *index, const int32_t *slots, int64_t rows, int64_t capacity,
                 int64_t *places) {
    thread_local Marks marks;
    if (count < 0 || rows < 0 || capacity < 0) return FLOE_BAD_SHAPE;
    if (!within(index, count, rows)) return FLOE_BAD_INDEX;
    int64_t end = 0; // no slot lies beyond, however many there are
    for (int64_t i = 0; i < count; i++) {
        if (slots[i] < 0 || slots[i] >= capacity) return FLOE_BAD_INDEX;
        places[i] = slots[i];
        end = std::max<int64_t>(end, slots[i] + (int64_t)1);
    }
    return marks.once(slots, count, end);
}
