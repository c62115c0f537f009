// Where the rows of a step are, who computes absent ones, and which slots they get. `kernels/offload/placing.py`
// defines it.
//
// What delays the transfer of absent rows comes first: whether a neuron is present is all that has to be known for
// asking. Lists are compacted without branches: what is there and what is not alternates in a way that no processor
// foresees.
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

struct Part {
    int64_t *offsets;
    int32_t *at, *places;
    Part(const floe_places &d, int64_t calls, int64_t part)
        : offsets(d.offsets + part * (calls + 1)), at(d.at + part * d.room), places(d.places + part * d.room) {
        offsets[0] = 0;
    }
};

// The present neurons with their slots, the absent ones with their keys.
void classify(const floe_pool &p, const floe_found &f, const Part &present, const Part &absent) {
    int64_t here = 0, gone = 0;
    for (int64_t c = 0; c < f.calls; c++) {
        const int32_t first = (int32_t)(f.experts[c] * f.width);
        const int32_t *__restrict table = p.slots + f.layer * expert_width(p) + first;
        const int32_t *__restrict neurons = f.neurons;
        int32_t *__restrict here_at = present.at, *__restrict slots = present.places;
        int32_t *__restrict gone_at = absent.at, *__restrict keys = absent.places;
        int64_t i = f.offsets[c];
        if (const PoolOps *ops = pool_ops())
            i = ops->classify(table, neurons, i, f.offsets[c + 1], first, {here_at, slots, gone_at, keys}, &here,
                              &gone);
        for (; i < f.offsets[c + 1]; i++) {
            const int32_t neuron = neurons[i], slot = table[neuron];
            here_at[here] = gone_at[gone] = (int32_t)i;
            slots[here] = slot;
            keys[gone] = first + neuron;
            const int64_t missing = slot < 0;
            here += 1 - missing;
            gone += missing;
        }
        present.offsets[c + 1] = here;
        absent.offsets[c + 1] = gone;
    }
}

bool weak(const floe_found &f, int64_t call, int64_t at) { // not where the value is not a number: it is to be noticed
    return fabsf(number_at(f.values, f.kind, at)) < f.late[call];
}

// Takes what the step does without out of a part.
void leave_out(const floe_found &f, const Part &part) {
    if (f.late == nullptr) return;
    int64_t stays = 0, start = 0;
    for (int64_t c = 0; c < f.calls; c++) {
        const int64_t end = part.offsets[c + 1];
        for (int64_t i = start; i < end; i++) {
            const int32_t at = part.at[i], place = part.places[i];
            part.at[stays] = at;
            part.places[stays] = place;
            stays += !weak(f, c, at);
        }
        start = end;
        part.offsets[c + 1] = stays;
    }
}

double split_end(const floe_lanes &l, double rows, double total) {
    const double cpu = rows > 0 ? l.cpu_start + l.cpu_row * rows : 0.0;
    const double copy = rows < total ? l.copy_start + l.copy_row * (total - rows) : 0.0;
    return std::max(std::max(cpu, copy), l.memory_copy * total - (l.memory_copy - l.memory_cpu) * rows);
}

// How many of `total` rows the CPU computes so that it, the link and RAM end soonest.
int64_t cpu_rows(const floe_lanes &l, int64_t total) {
    if (!(l.cpu_row < INFINITY) || total == 0) return 0;
    const double all = (double)total;
    int64_t best = 0;
    double best_end = split_end(l, 0, all);
    const auto look = [&](int64_t rows) {
        const double end = split_end(l, (double)rows, all);
        if (end > best_end || (end == best_end && rows >= best)) return;
        best = rows;
        best_end = end;
    };
    const auto look_beside = [&](double crossing) {
        const int64_t below = crossing > 1 ? (crossing < all - 1 ? (int64_t)crossing : total - 1) : 1;
        look(below);
        look(std::min(below + 1, total - 1));
    };
    if (total > 1) {
        look_beside((l.copy_start - l.cpu_start + l.copy_row * all) / (l.copy_row + l.cpu_row));
        if (l.memory_cpu != 0 || l.memory_copy != 0) {
            const double saved = l.memory_copy - l.memory_cpu;
            if (l.cpu_row + saved > 0) look_beside((l.memory_copy * all - l.cpu_start) / (l.cpu_row + saved));
            if (saved <= 0) look_beside((l.copy_start + (l.copy_row - l.memory_copy) * all) / (l.copy_row - saved));
        }
    }
    look(total);
    return best;
}

// Moves the CPU's share from one part to the other: of the calls that weigh least, the last neurons of each.
void share(const floe_found &f, const floe_lanes &lanes, const Part &from, const Part &to, uint8_t *memory) {
    using Weighed = std::pair<float, int64_t>;
    int64_t rows = cpu_rows(lanes, from.offsets[f.calls]);
    Weighed *order = carve<Weighed>(memory, f.calls);
    int64_t *taken = carve<int64_t>(memory, f.calls);
    for (int64_t c = 0; c < f.calls; c++) order[c] = {isnan(f.weights[c]) ? INFINITY : f.weights[c], c};
    std::sort(order, order + f.calls);
    for (int64_t i = 0; i < f.calls; i++) {
        const int64_t c = order[i].second;
        taken[c] = std::min(rows, from.offsets[c + 1] - from.offsets[c]);
        rows -= taken[c];
    }
    int64_t stays = 0, goes = 0, start = 0;
    for (int64_t c = 0; c < f.calls; c++) {
        const int64_t end = from.offsets[c + 1], middle = end - taken[c];
        std::copy(from.at + middle, from.at + end, to.at + goes);
        std::copy(from.places + middle, from.places + end, to.places + goes);
        if (stays != start) { // downwards: what is read has not been written yet
            std::copy(from.at + start, from.at + middle, from.at + stays);
            std::copy(from.places + start, from.places + middle, from.places + stays);
        }
        stays += middle - start;
        goes += end - middle;
        start = end;
        from.offsets[c + 1] = stays;
        to.offsets[c + 1] = goes;
    }
}

// Moves the rows that are on their way, and marks all as used, if the policy asks for that.
void split(const floe_pool &p, const floe_found &f, const Part &ready, const Part &coming) {
    const int32_t mark = low(p.counters[FLOE_POOL_FINDS] + p.counters[FLOE_POOL_BROUGHT]);
    const int64_t total = ready.offsets[f.calls];
    int64_t here = 0, moving = 0, start = 0;
    for (int64_t c = 0; c < f.calls; c++) {
        const int64_t end = ready.offsets[c + 1];
        for (int64_t i = start; i < end; i++) {
            if (i + 24 < total) FLOE_PREFETCH(p.cells + ready.places[i + 24]);
            const int32_t at = ready.at[i], slot = ready.places[i];
            floe_cell &cell = p.cells[slot];
            if (p.marks_use) cell.mark = mark;
            ready.at[here] = at;
            ready.places[here] = slot;
            here += cell.state == READY;
            if (cell.state != FILLING) continue; // seldom, or many in a row
            coming.at[moving] = at;
            coming.places[moving++] = slot;
        }
        start = end;
        ready.offsets[c + 1] = here;
        coming.offsets[c + 1] = moving;
    }
}

// The router's scores, the mean over the tokens; not where one is not finite: means would never recover.
void hear(const floe_pool &p, const floe_found &f, double *heard) {
    std::fill(heard, heard + p.experts, 0.0);
    if (f.heard != nullptr)
        for (int64_t i = 0; i < f.tokens * p.experts; i++)
            heard[i % p.experts] += (double)f.heard[i] / (double)f.tokens;
    else
        for (int64_t i = 0; i < f.tokens * f.top_k; i++) heard[f.chosen[i]] += (double)f.scores[i] / (double)f.tokens;
    double sum = 0;
    for (int64_t e = 0; e < p.experts; e++) sum += heard[e];
    if (!isfinite(sum)) return;
    double *recent = p.recent + f.layer * p.experts, *habit = p.habit + f.layer * p.experts;
    for (int64_t e = 0; e < p.experts; e++) {
        recent[e] += p.score_rate * (heard[e] - recent[e]);
        habit[e] += p.habit_rate * (heard[e] - habit[e]);
    }
}

// The keys to copy, each once: as they are listed, or ascending where one may be named twice.
int64_t to_copy(const Part &copied, int64_t calls, bool once, int32_t *keys) {
    const int64_t count = copied.offsets[calls];
    std::copy(copied.places, copied.places + count, keys);
    if (once) return count;
    std::sort(keys, keys + count);
    return std::unique(keys, keys + count) - keys;
}

void count_calls(const floe_found &f, const Part &absent, floe_placed &placed) {
    for (int64_t c = 0; c < f.calls; c++) {
        const int64_t wanted = f.offsets[c + 1] - f.offsets[c], missing = absent.offsets[c + 1] - absent.offsets[c];
        placed.looked += wanted > 0;
        placed.hit += wanted > 0 && 2 * (wanted - missing) >= wanted;
    }
}

} // namespace
} // namespace floe

using namespace floe;

int floe_offload_place(const floe_pool *pool, const floe_found *found, const floe_lanes *lanes, const floe_way *way,
                       const floe_places *places, floe_placed *placed) {
    thread_local Buffer buffer;
    const floe_pool &p = *pool;
    const floe_found &f = *found;
    const floe_places &d = *places;
    bool once = f.tokens == 1;
    uint8_t *memory = buffer.take(aligned(8 * p.experts) + 2 * aligned(16 * f.calls) + seen_bytes(p, f));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    double *heard = carve<double>(memory, p.experts);
    if (const int error = check_found(p, f, memory, once)) return error;
    const bool blind = f.late != nullptr && f.values == nullptr && total_of(f) > 0;
    if (total_of(f) > d.room || blind) return FLOE_BAD_SHAPE;
    if (way != nullptr && !leads(p, *way)) return FLOE_BAD_SHAPE;

    const Part ready(d, f.calls, FLOE_PART_READY), coming(d, f.calls, FLOE_PART_COMING);
    const Part copied(d, f.calls, FLOE_PART_COPIED), beside(d, f.calls, FLOE_PART_BESIDE);
    classify(p, f, ready, copied);
    *placed = {};
    placed->done = -1;
    count_calls(f, copied, *placed);
    leave_out(f, copied);
    share(f, *lanes, copied, beside, memory);
    const int64_t wanted = placed->wanted = to_copy(copied, f.calls, once, d.keys);
    Candidates candidates;
    float *factors = nullptr;
    if (free_slots(p, true) < wanted && !make_room(p, candidates, factors)) return FLOE_NO_MEMORY;

    hear(p, f, heard);
    p.counters[FLOE_POOL_FINDS]++;
    p.counters[FLOE_POOL_LAYER] = f.layer;
    for (int64_t c = 0; c < f.calls; c++)
        if (f.offsets[c + 1] > f.offsets[c]) hold(p, f.layer, f.experts[c] * f.width / p.neurons);
    const int64_t taken = visit(p, wanted, d.slots, candidates, factors);
    placed->reserved = taken;
    if (way != nullptr && taken > 0) {
        placed->transfer = send(*way, f.layer, d.keys, d.slots, taken, true, 0.0, true);
        if (placed->transfer < 0) {
            give_back(p, taken, d.slots);
            return (int)placed->transfer;
        }
    }
    lent(p, taken, d.slots);
    if (p.counters[FLOE_POOL_COMING] || p.marks_use) split(p, f, ready, coming);
    else std::fill(coming.offsets, coming.offsets + f.calls + 1, (int64_t)0);
    leave_out(f, coming);
    return FLOE_OK;
}
