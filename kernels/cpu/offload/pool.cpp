// The tables of the pool of rows: slots for rows, and rows that arrive. `kernels/offload/pool.py` defines all of it.
#include "src/buffers.h"
#include "floe.h"
#include "src/marks.h"
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

int64_t floe_pool_visit(const floe_pool *pool, int64_t wanted, int32_t *slots) {
    const floe_pool &p = *pool;
    Candidates found;
    float *factors = nullptr;
    if (wanted < 0) return FLOE_BAD_SHAPE;
    if (free_slots(p, true) < wanted && !make_room(p, found, factors)) return FLOE_NO_MEMORY;
    const int64_t taken = visit(p, wanted, slots, found, factors);
    lent(p, taken, slots);
    return taken;
}

int64_t floe_pool_keep(const floe_pool *pool, int64_t layer, int64_t count, const int64_t *keys, const int32_t *slots,
                       int64_t spared, int32_t *kept) {
    thread_local Buffer buffer;
    const floe_pool &p = *pool;
    if (count < 0 || layer < 0 || layer >= p.layers || spared < 1) return FLOE_BAD_SHAPE;
    if (!within(keys, count, expert_width(p))) return FLOE_BAD_INDEX;
    if (count > p.counters[FLOE_POOL_VISITING]) return FLOE_BAD_INDEX;
    if (!std::equal(slots, slots + count, p.visitors + p.counters[FLOE_POOL_VISITING] - count)) return FLOE_BAD_INDEX;
    int32_t *table = p.slots + layer * expert_width(p);
    Candidates found;
    float *factors = nullptr;
    uint8_t *memory = buffer.take(2 * aligned(4 * count));
    if (memory == nullptr || !make_room(p, found, factors)) return FLOE_NO_MEMORY;
    if (const int error = claim(table, count, keys)) return error;
    for (int64_t i = 0; i < count; i++) table[keys[i]] = -1;
    int32_t *stays = carve<int32_t>(memory, count);
    return keep(p, layer, count, keys, slots, spared, stays, (int32_t *)memory, kept, found, factors);
}

int floe_pool_settle(const floe_pool *pool, int64_t count, const int32_t *slots, int arrived) {
    const floe_pool &p = *pool;
    const ExpertOf expert_of(p);
    const int state = arrived ? READY : FREE;
    for (int64_t i = 0; i < count; i++) {
        if (i + 16 < count && slots[i + 16] >= 0 && slots[i + 16] < p.capacity) FLOE_PREFETCH(p.cells + slots[i + 16]);
        const bool fits = slots[i] >= 0 && slots[i] < p.capacity && p.cells[slots[i]].state == FILLING;
        if (fits) {
            p.cells[slots[i]].state = state; // one that is named twice is not filling the second time
            continue;
        }
        for (int64_t back = 0; back < i; back++) p.cells[slots[back]].state = FILLING;
        return FLOE_BAD_INDEX;
    }
    p.counters[FLOE_POOL_COMING] -= count;
    for (int64_t i = 0; i < count; i++) {
        const int32_t slot = slots[i], key = p.cells[slot].key;
        if (arrived) {
            p.residents[expert_of(key)]++;
        } else {
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
