// The pool of rows: where neurons lie, who gives way, how much each is used. `kernels/pool.py` defines all of it.
//
// Lists are compacted without branches: what is there and what is not alternates in a way that no processor foresees.
#include "buffers.h"
#include "eviction.h"
#include "floe.h"
#include "marks.h"

#include <string.h>

#include <algorithm>

namespace floe {
namespace {

int64_t expert_width(const floe_pool &p) { return p.experts * p.neurons; }

bool rise(const int64_t *offsets, int64_t calls) {
    for (int64_t c = 0; c < calls; c++)
        if (offsets[c + 1] < offsets[c]) return false;
    return offsets[0] == 0;
}

bool within(const int64_t *index, int64_t count, int64_t end) {
    int64_t signs = 0; // one of n and end - 1 - n is negative where n is outside, but for sums that overflow
    for (int64_t i = 0; i < count; i++) signs |= index[i] | (int64_t)((uint64_t)end - 1 - (uint64_t)index[i]);
    return signs >= 0;
}

// Counts the calls of experts: g of `Means`. False if one is called twice, by several tokens.
bool called(const floe_pool &p, int64_t layer, int64_t width, int64_t calls, const int64_t *experts,
            const int64_t *offsets, uint8_t *seen) {
    const int64_t parts = p.neurons / width; // of an expert
    bool once = true;
    memset(seen, 0, (size_t)(p.experts * (parts + 1)));
    uint8_t *part_seen = seen + p.experts;
    for (int64_t c = 0; c < calls; c++) {
        if (offsets[c] == offsets[c + 1]) continue;
        once &= !part_seen[experts[c]];
        part_seen[experts[c]] = 1;
        const int64_t expert = experts[c] / parts;
        if (!seen[expert]) p.growth[layer * p.experts + expert] /= 1 - p.use_rate;
        seen[expert] = 1;
    }
    return once;
}

// What its active neurons get for it, see `Means`.
float use_of(const floe_pool &p, int64_t layer, int64_t width, int64_t expert) {
    return (float)(p.use_rate * p.growth[layer * p.experts + expert * width / p.neurons]);
}

// The means of rows in slots are kept there too.
void keep(const floe_pool &p, int64_t slot, float mean) { p.cells[slot < 0 ? p.capacity : slot].mean = mean; }

// Where an expert is called twice: in two passes, so that a neuron that several tokens name is counted once.
void note_twice(const floe_pool &p, int64_t layer, int64_t width, int64_t calls, const int64_t *experts,
                const int64_t *offsets, const int64_t *neurons, float *added) {
    float *raw = p.raw + layer * expert_width(p);
    for (int64_t c = 0; c < calls; c++) {
        const float use = use_of(p, layer, width, experts[c]);
        for (int64_t i = offsets[c]; i < offsets[c + 1]; i++) added[i] = raw[experts[c] * width + neurons[i]] + use;
    }
    for (int64_t c = 0; c < calls; c++)
        for (int64_t i = offsets[c]; i < offsets[c + 1]; i++) {
            const int64_t key = experts[c] * width + neurons[i];
            raw[key] = added[i];
            keep(p, p.slots[layer * expert_width(p) + key], added[i]);
        }
}

void shrink(const floe_pool &p, int64_t layer) {
    for (int64_t e = layer * p.experts; e < (layer + 1) * p.experts; e++) {
        if (!(p.growth[e] > p.largest_growth)) continue;
        const float by = (float)p.growth[e];
        for (int64_t n = e * p.neurons; n < (e + 1) * p.neurons; n++) keep(p, p.slots[n], p.raw[n] /= by);
        p.growth[e] = 1.0;
    }
}

// One call's part of `floe_pool_locate`: the next places of its six lists.
struct Lists {
    int64_t *ready_at, *ready, *coming_at, *coming, *absent_at, *absent;
};

void locate_call(const floe_pool &p, int64_t layer, int64_t first, int64_t start, int64_t end, const int64_t *neurons,
                 float use, Lists &lists) {
    const int32_t *__restrict table = p.slots + layer * expert_width(p) + first;
    float *__restrict raw = p.raw + layer * expert_width(p) + first;
    floe_cell *__restrict cells = p.cells;
    const int64_t nobody = p.capacity;
    const int32_t used = stamp(p);
    Lists at = lists;
    for (int64_t i = start; i < end; i++) {
        const int64_t neuron = neurons[i], slot = table[neuron];
        floe_cell &cell = cells[slot < 0 ? nobody : slot];
        const int32_t state = cell.word & 3;
        cell.word = used | state;
        cell.mean = raw[neuron] += use;
        *at.ready_at = *at.absent_at = i;
        *at.ready = slot;
        *at.absent = first + neuron;
        const int64_t ready = state == READY, absent = slot < 0;
        at.ready_at += ready;
        at.ready += ready;
        at.absent_at += absent;
        at.absent += absent;
        if (state == FILLING) { // seldom, or many in a row
            *at.coming_at++ = i;
            *at.coming++ = slot;
        }
    }
    lists = at;
}

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

int floe_pool_locate(const floe_pool *pool, int64_t layer, int64_t width, int64_t calls, const int64_t *experts,
                     const int64_t *offsets, const int64_t *neurons, int64_t *parts, int64_t *lists) {
    const floe_pool &p = *pool;
    if (calls < 0 || width < 1 || p.neurons % width || layer < 0 || layer >= p.layers) return FLOE_BAD_SHAPE;
    if (!within(experts, calls, expert_width(p) / width) || !rise(offsets, calls)) return FLOE_BAD_INDEX;
    const int64_t total = offsets[calls];
    if (!within(neurons, total, width)) return FLOE_BAD_INDEX;
    thread_local Buffer buffer;
    const int64_t seen = aligned(p.experts * (1 + p.neurons / width));
    uint8_t *memory = buffer.take(seen + aligned(4 * total));
    if (memory == nullptr) return FLOE_NO_MEMORY;

    p.counters[FLOE_POOL_FINDS]++;
    p.counters[FLOE_POOL_LAYER] = layer;
    const bool once = called(p, layer, width, calls, experts, offsets, memory);
    Lists at;
    int64_t **heads[] = {&at.ready_at, &at.ready, &at.coming_at, &at.coming, &at.absent_at, &at.absent};
    for (int64_t i = 0; i < 6; i++) *heads[i] = lists + i * total;
    const Lists begin = at;
    int64_t *ends[] = {parts, parts + calls + 1, parts + 2 * (calls + 1)};
    for (int64_t c = 0; c <= calls; c++) {
        ends[0][c] = at.ready - begin.ready;
        ends[1][c] = at.coming - begin.coming;
        ends[2][c] = at.absent - begin.absent;
        if (c == calls) break;
        const float use = once ? use_of(p, layer, width, experts[c]) : 0.0f;
        locate_call(p, layer, experts[c] * width, offsets[c], offsets[c + 1], neurons, use, at);
    }
    if (p.marks_use) {
        const int32_t mark = low(p.counters[FLOE_POOL_FINDS] + p.counters[FLOE_POOL_BROUGHT]);
        for (const int64_t *slot = begin.ready; slot != at.ready; slot++) p.cells[*slot].mark = mark;
        for (const int64_t *slot = begin.coming; slot != at.coming; slot++) p.cells[*slot].mark = mark;
    }
    if (!once) note_twice(p, layer, width, calls, experts, offsets, neurons, (float *)(memory + seen));
    shrink(p, layer);
    return FLOE_OK;
}

int64_t floe_pool_reserve(const floe_pool *pool, int64_t layer, int64_t count, const int64_t *keys, int urgent,
                          int32_t *slots) {
    const floe_pool &p = *pool;
    if (count < 0 || layer < 0 || layer >= p.layers) return FLOE_BAD_SHAPE;
    if (!within(keys, count, expert_width(p))) return FLOE_BAD_INDEX;
    int32_t *table = p.slots + layer * expert_width(p);
    int64_t &free_count = p.counters[FLOE_POOL_FREE], &spare = p.counters[FLOE_POOL_SPARE];
    int64_t taken = std::min(urgent ? free_count : free_count - spare, count);
    Candidates found;
    float *factors = nullptr;
    if (taken < count && !make_room(p, found, factors)) return FLOE_NO_MEMORY;
    if (const int error = claim(table, count, keys)) return error;
    for (int64_t i = 0; i < taken; i++) slots[i] = p.free_slots[--free_count];
    spare = std::min(spare, free_count);
    if (taken < count) taken += evict(p, count - taken, urgent != 0, slots + taken, found, factors);
    const int64_t brought = ++p.counters[FLOE_POOL_BROUGHT], finds = p.counters[FLOE_POOL_FINDS];
    const int32_t word = (urgent ? stamp(p) : 0) + FILLING;
    const int64_t turns = (layer - p.counters[FLOE_POOL_LAYER] - 1 + p.layers) % p.layers;
    const int32_t mark = low(!p.by_score ? finds + brought : urgent ? finds : finds + 1 + turns);
    const int64_t first = layer * expert_width(p);
    for (int64_t i = 0; i < taken; i++) {
        table[keys[i]] = slots[i];
        p.cells[slots[i]] = {word, (int32_t)(first + keys[i]), mark, p.raw[first + keys[i]]};
    }
    for (int64_t i = taken; i < count; i++) table[keys[i]] = -1;
    return taken;
}

int floe_pool_spare(const floe_pool *pool, int64_t wanted) {
    const floe_pool &p = *pool;
    int64_t &free_count = p.counters[FLOE_POOL_FREE];
    if (wanted < 0) return FLOE_BAD_SHAPE;
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

int floe_cut(int64_t calls, const int64_t *offsets, const int64_t *kept, const int64_t *at, const int64_t *places,
             int64_t *offsets_out, int64_t *at_out, int64_t *places_out) {
    if (!rise(offsets, calls)) return FLOE_BAD_INDEX;
    int64_t *firsts = offsets_out, *rests = offsets_out + calls + 1;
    firsts[0] = rests[0] = 0;
    for (int64_t c = 0; c < calls; c++) {
        const int64_t count = offsets[c + 1] - offsets[c];
        if (kept[c] < 0 || kept[c] > count) return FLOE_BAD_INDEX;
        firsts[c + 1] = firsts[c] + kept[c];
        rests[c + 1] = rests[c] + count - kept[c];
    }
    for (int64_t c = 0; c < calls; c++) {
        const int64_t start = offsets[c], middle = start + kept[c], end = offsets[c + 1];
        const int64_t first = firsts[c], rest = firsts[calls] + rests[c];
        std::copy(at + start, at + middle, at_out + first);
        std::copy(at + middle, at + end, at_out + rest);
        std::copy(places + start, places + middle, places_out + first);
        std::copy(places + middle, places + end, places_out + rest);
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
