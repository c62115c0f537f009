// What a step notes once its transfers are under way: how much each neuron is used, what was guessed right, and what to
// fetch ahead. `kernels/offload/placing.py` defines it.
#include "src/buffers.h"
#include "floe_offload.h"
#include "found.h"
#include "pool_slots.h"
#include "way.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <utility>

namespace floe {
namespace {

// Counts the calls of experts: g of `Means`.
void called(const floe_pool &p, const floe_found &f, uint8_t *seen) {
    memset(seen, 0, (size_t)p.experts);
    for (int64_t c = 0; c < f.calls; c++) {
        if (f.offsets[c] == f.offsets[c + 1]) continue;
        const int64_t expert = f.experts[c] * f.width / p.neurons;
        if (!seen[expert]) p.growth[f.layer * p.experts + expert] /= 1 - p.use_rate;
        seen[expert] = 1;
    }
}

// What its active neurons get for it, see `Means`.
float use_of(const floe_pool &p, const floe_found &f, int64_t call) {
    return (float)(p.use_rate * p.growth[f.layer * p.experts + f.experts[call] * f.width / p.neurons]);
}

void note_call(const floe_pool &p, const floe_found &f, int64_t call) {
    float *__restrict raw = p.raw + f.layer * expert_width(p) + f.experts[call] * f.width;
    const float use = use_of(p, f, call);
    for (int64_t i = f.offsets[call]; i < f.offsets[call + 1]; i++) raw[f.neurons[i]] += use;
}

// The means of rows in slots are copied into their cells, which eviction looks at: of each `REMEMBERED` of a step one,
// another one in each of the next steps.
constexpr int64_t kRemembered = 8;

int64_t turn_of(const floe_pool &p) { return p.counters[FLOE_POOL_FINDS] / p.layers % kRemembered; }

void remember(const floe_pool &p, int64_t slot) { p.cells[slot].mean = p.raw[p.cells[slot].key]; }

// Of these slots.
void remember_some(const floe_pool &p, int64_t count, const int32_t *slots) {
    for (int64_t i = turn_of(p); i < count; i += kRemembered) {
        if (i + 4 * kRemembered < count) FLOE_PREFETCH(p.cells + slots[i + 4 * kRemembered]);
        remember(p, slots[i]);
    }
}

// Of all neurons of a step that have slots.
void remember_some(const floe_pool &p, const floe_found &f) {
    const int64_t turn = turn_of(p);
    int64_t there = 0;
    for (int64_t c = 0; c < f.calls; c++) {
        const int32_t *table = p.slots + f.layer * expert_width(p) + f.experts[c] * f.width;
        for (int64_t i = f.offsets[c]; i < f.offsets[c + 1]; i++) {
            const int32_t slot = table[f.neurons[i]];
            if (slot >= 0 && there++ % kRemembered == turn) remember(p, slot);
        }
    }
}

// Where a neuron may be named twice: in two passes, so that it is counted once.
void note_twice(const floe_pool &p, const floe_found &f, float *added) {
    float *raw = p.raw + f.layer * expert_width(p);
    for (int64_t c = 0; c < f.calls; c++) {
        const float use = use_of(p, f, c);
        for (int64_t i = f.offsets[c]; i < f.offsets[c + 1]; i++)
            added[i] = raw[f.experts[c] * f.width + f.neurons[i]] + use;
    }
    for (int64_t c = 0; c < f.calls; c++)
        for (int64_t i = f.offsets[c]; i < f.offsets[c + 1]; i++) raw[f.experts[c] * f.width + f.neurons[i]] = added[i];
}

void shrink(const floe_pool &p, int64_t layer) {
    for (int64_t e = layer * p.experts; e < (layer + 1) * p.experts; e++) {
        if (!(p.growth[e] > p.largest_growth)) continue;
        const float by = (float)p.growth[e];
        for (int64_t n = e * p.neurons; n < (e + 1) * p.neurons; n++) {
            p.raw[n] /= by;
            if (!holds_all(p) && p.slots[n] >= 0) remember(p, p.slots[n]);
        }
        p.growth[e] = 1.0;
    }
}

// Calls that weigh most first.
void order_calls(const floe_found &f, std::pair<float, int64_t> *order) {
    for (int64_t c = 0; c < f.calls; c++) order[c] = {-f.weights[c], c};
    std::sort(order, order + f.calls);
}

// Sends for what a guess got slots for, call by call, in pieces that are sent or dropped as a whole.
int send_pieces(const floe_way &way, const floe_found &f, const int32_t *keys, const int32_t *slots, int64_t taken,
                const int64_t *runs, int64_t *sent) {
    std::fill(sent, sent + 2 * f.calls * way.pieces, (int64_t)0);
    for (int64_t n = 0, start = 0, end = 0; n < f.calls; n++) {
        end = std::min(end + runs[2 * n + 1], taken);
        const int64_t piece = std::max(way.piece, (end - start + way.pieces - 1) / way.pieces);
        for (; start < end; start = sent[1], sent += 2) {
            sent[1] = std::min(start + piece, end);
            sent[0] =
                send(way, f.layer, keys + start, slots + start, sent[1] - start, false, f.weights[runs[2 * n]], false);
            if (sent[0] < 0) return (int)sent[0];
        }
    }
    return FLOE_OK;
}

} // namespace
} // namespace floe

using namespace floe;

int floe_offload_note(const floe_pool *pool, const floe_found *found, const floe_places *places) {
    thread_local Buffer buffer;
    const floe_pool &p = *pool;
    const floe_found &f = *found;
    bool once = true;
    const int64_t added = f.room < 0 ? 0 : aligned(4 * f.room);
    uint8_t *memory = buffer.take(added + seen_bytes(p, f));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    if (const int error = check_found(p, f, memory + added, once)) return error;
    called(p, f, memory + added);
    if (once)
        for (int64_t c = 0; c < f.calls; c++) note_call(p, f, c);
    else note_twice(p, f, (float *)memory);
    // Where nothing is on its way, what has a slot was listed.
    const bool listed = places != nullptr && p.counters[FLOE_POOL_COMING] == 0;
    const int64_t ready = FLOE_PART_READY * (f.calls + 1) + f.calls;
    if (!holds_all(p)) listed ? remember_some(p, places->offsets[ready], places->places) : remember_some(p, f);
    shrink(p, f.layer);
    return FLOE_OK;
}

int64_t floe_offload_ahead(const floe_pool *pool, const floe_found *guess, const floe_way *way, int32_t *guessed,
                           int32_t *keys, int32_t *slots, int64_t *runs, int64_t *sent) {
    thread_local Buffer buffer;
    const floe_pool &p = *pool;
    const floe_found &f = *guess;
    bool once = false;
    const int64_t ordered = f.calls < 0 ? 0 : aligned(16 * f.calls);
    uint8_t *memory = buffer.take(ordered + seen_bytes(p, f));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    if (const int error = check_found(p, f, memory + ordered, once)) return error;
    if (way != nullptr && (sent == nullptr || !leads(p, *way))) return FLOE_BAD_SHAPE;
    for (int64_t c = 0; c < f.calls; c++)
        if (isnan(f.weights[c])) return FLOE_BAD_SHAPE; // no rank in a queue
    auto *order = (std::pair<float, int64_t> *)memory;
    order_calls(f, order);
    int32_t *table = p.slots + f.layer * expert_width(p);
    for (int64_t c = 0; c < f.calls; c++) {
        const int32_t first = (int32_t)(f.experts[c] * f.width);
        for (int64_t i = f.offsets[c]; i < f.offsets[c + 1]; i++) guessed[i] = first + f.neurons[i];
    }
    Candidates candidates;
    float *factors = nullptr;
    if (!make_room(p, candidates, factors)) return FLOE_NO_MEMORY;
    int64_t count = 0;
    const int64_t most = p.counters[FLOE_POOL_MOST];
    for (int64_t n = 0; n < f.calls; n++) {
        const int64_t c = order[n].second, before = count;
        for (int64_t i = f.offsets[c]; i < f.offsets[c + 1] && count < most; i++) {
            const int32_t key = guessed[i];
            keys[count] = key;
            const bool absent = table[key] == -1;
            if (absent) table[key] = -2; // listed: another call may name it too
            count += absent;
        }
        runs[2 * n] = c;
        runs[2 * n + 1] = count - before;
    }
    int64_t taken = take_free(p, count, false, slots);
    if (taken < count) taken += evict(p, count - taken, false, slots + taken, candidates, factors);
    for (int64_t i = taken; i < count; i++) table[keys[i]] = -1;
    p.counters[FLOE_POOL_ASKED] = taken;
    if (count > 0) book(p, f.layer, keys, taken, false, slots);
    if (way != nullptr)
        if (const int error = send_pieces(*way, f, keys, slots, taken, runs, sent)) return error;
    return taken;
}

int64_t floe_offload_right(const floe_pool *pool, const floe_found *found, int64_t count, const int32_t *guessed,
                           uint8_t *marks) {
    thread_local Buffer buffer;
    const floe_pool &p = *pool;
    const floe_found &f = *found;
    bool once = false;
    uint8_t *memory = buffer.take(seen_bytes(p, f));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    if (const int error = check_found(p, f, memory, once)) return error;
    if (count < 0 || !within(guessed, count, expert_width(p))) return FLOE_BAD_INDEX;
    return right_of(f, count, guessed, marks);
}
