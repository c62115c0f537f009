// A layer's step, begun and ended: what has arrived, what is placed, sent for and waited for.
// `engine/offload/scheduler.py` defines it.
#include "floe_offload.h"
#include "src/buffers.h"
#include "found.h"
#include "pool_slots.h"
#include "way.h"

#include <math.h>

#include <algorithm>

namespace floe {
namespace {

void observed(const floe_rates &r, double &rate, double latency, double bytes, double seconds, double cap) {
    const double took = seconds - latency, mean = 1 / rate;
    if (!(bytes > 0 && isfinite(bytes) && took > latency && isfinite(took) && cap > 0)) return;
    const double each = std::min(std::max(took / bytes * cap, mean / r.farthest), mean * r.farthest);
    rate = 1 / (mean + r.step * (each - mean));
}

floe_lanes lanes_of(const floe_offload &o, double queued_bytes) {
    const floe_rates &r = *o.rates;
    const double row = (double)o.row_bytes;
    return {r.cpu_latency_s,
            o.cpu_share > 0 ? row / (r.cpu_bytes_s * o.cpu_share) : INFINITY,
            queued_bytes / r.link_bytes_s + r.link_latency_s + r.launch_s,
            row / r.link_bytes_s + row / r.gpu_bytes_s,
            row / std::max(r.ram_bytes_s, r.cpu_bytes_s),
            row * r.touched / r.ram_bytes_s};
}

int collect(floe_offload &o, Link &link, bool others) {
    thread_local std::vector<int32_t> slots;
    slots.clear();
    if (link.arrived(slots) == 0 && !others) return FLOE_OK;
    int64_t moved;
    double busy;
    link.moved(&moved, &busy);
    floe_rates &r = *o.rates;
    observed(r, r.link_bytes_s, r.link_latency_s, (double)(moved - o.moved), busy - o.busy, 1.0);
    o.moved = moved;
    o.busy = busy;
    arrive(*o.pool, (int64_t)slots.size(), slots.data());
    return FLOE_OK;
}

// dropped: counts the rows.
int forget(const floe_offload &o, Link &link, int64_t layer, int64_t *dropped = nullptr) {
    thread_local std::vector<int32_t> slots;
    slots.clear();
    link.give_up(layer, slots);
    if (dropped != nullptr) *dropped = (int64_t)slots.size();
    return floe_pool_settle(o.pool, (int64_t)slots.size(), slots.data(), false);
}

// How many rows the next guess may ask for, by how many of the last one's were dropped: not many more than arrive.
void ask_for(const floe_pool &p, const floe_way &way, int64_t dropped) {
    int64_t &asked = p.counters[FLOE_POOL_ASKED], &most = p.counters[FLOE_POOL_MOST];
    const int64_t came = std::max((int64_t)0, asked - dropped);
    if (dropped > 0) most = std::max(way.piece, came + came / 2);
    else if (asked == most) most = std::min(expert_width(p), most + most / 2 + 1);
    asked = 0;
}

// Adds the seconds; a transfer that is not there any more has arrived.
int await(Link &link, int64_t transfer, const floe_stop *stop, double &waited) {
    double seconds = 0;
    const int code = link.wait(transfer, stop, &seconds);
    waited += seconds;
    return code == FLOE_BAD_INDEX ? FLOE_OK : code;
}

int await_all(floe_offload &o, Link &link) {
    double waited = 0;
    for (const int64_t number : link.under_way(-1, nullptr))
        if (const int error = await(link, number, nullptr, waited)) return error;
    return collect(o, link, false);
}

struct List {
    int64_t *offsets;
    int32_t *at, *places;
    List(const floe_places &d, int64_t calls, int64_t part)
        : offsets(d.offsets + part * (calls + 1)), at(d.at + part * d.room), places(d.places + part * d.room) {}
};

// The device has computed the last step. Visitors of one that was given up have to arrive before their slots are used.
int end_step(floe_offload &o, Link &link) {
    double waited = 0;
    if (o.visit != 0)
        if (const int error = await(link, o.visit, nullptr, waited)) return error;
    o.visit = 0;
    release(*o.pool);
    return FLOE_OK;
}

// Lets those of the last visitors stay that are worth it, while they are on their way.
int keep_some(floe_offload &o, Link &link, int64_t layer, const floe_places &d, floe_placed &placed) {
    thread_local Buffer buffer;
    Candidates candidates;
    float *factors = nullptr;
    const int64_t count = placed.reserved;
    if (count == 0) return FLOE_OK;
    uint8_t *memory = buffer.take(3 * aligned(4 * count));
    if (memory == nullptr || !make_room(*o.pool, candidates, factors)) return FLOE_NO_MEMORY;
    int32_t *stays = carve<int32_t>(memory, count);
    int32_t *kept_keys = carve<int32_t>(memory, count), *kept = carve<int32_t>(memory, count);
    const int64_t total = keep(*o.pool, layer, count, d.keys + std::max(placed.done, (int64_t)0), d.slots, o.spared,
                               stays, kept_keys, kept, candidates, factors);
    return link.stay(placed.transfer, total, kept);
}

// Waits for the transfers that bring rows of this list.
int await_coming(floe_offload &o, Link &link, const floe_found &f, const List &coming, uint8_t *marks,
                 const floe_stop *stop, double &waited) {
    const floe_pool &p = *o.pool;
    const int64_t first = f.layer * expert_width(p), count = coming.offsets[f.calls];
    if (count == 0) return FLOE_OK;
    for (int64_t i = 0; i < count; i++) marks[p.cells[coming.places[i]].key - first] = 1;
    const std::vector<int64_t> numbers = link.under_way(f.layer, marks);
    for (int64_t i = 0; i < count; i++) marks[p.cells[coming.places[i]].key - first] = 0;
    for (const int64_t number : numbers)
        if (const int error = await(link, number, stop, waited)) return error;
    return FLOE_OK;
}

// This load's copied rows, and with the first one those that were on their way, in the order of the active neurons.
void list_arrived(const floe_pool &p, const floe_found &f, const floe_places &d, const floe_placed &placed) {
    const List coming(d, f.calls, FLOE_PART_COMING), copied(d, f.calls, FLOE_PART_COPIED);
    const List arrived(d, f.calls, FLOE_PART_ARRIVED);
    const int32_t *const keys = d.keys + placed.done;
    const int64_t rows = copied.offsets[f.calls];
    const bool all = placed.reserved == placed.wanted;
    if (all && rows == placed.wanted && coming.offsets[f.calls] == 0 && std::equal(keys, keys + rows, copied.places)) {
        std::copy(copied.offsets, copied.offsets + f.calls + 1, arrived.offsets);
        std::copy(copied.at, copied.at + rows, arrived.at);
        std::copy(d.slots, d.slots + rows, arrived.places);
        return;
    }
    thread_local std::vector<int32_t> where; // slots by key, -1 between two calls
    if ((int64_t)where.size() < expert_width(p)) where.resize((size_t)expert_width(p), -1);
    for (int64_t i = 0; i < placed.reserved; i++) where[keys[i]] = d.slots[i];
    int64_t count = 0;
    arrived.offsets[0] = 0;
    for (int64_t c = 0; c < f.calls; c++) {
        int64_t came = placed.done == 0 ? coming.offsets[c] : coming.offsets[c + 1];
        const int64_t came_end = coming.offsets[c + 1];
        for (int64_t i = copied.offsets[c]; i < copied.offsets[c + 1]; i++) {
            const int32_t slot = where[copied.places[i]], at = copied.at[i];
            if (slot < 0) continue;
            for (; came < came_end && coming.at[came] < at; came++, count++) {
                arrived.at[count] = coming.at[came];
                arrived.places[count] = coming.places[came];
            }
            arrived.at[count] = at;
            arrived.places[count++] = slot;
        }
        for (; came < came_end; came++, count++) {
            arrived.at[count] = coming.at[came];
            arrived.places[count] = coming.places[came];
        }
        arrived.offsets[c + 1] = count;
    }
    for (int64_t i = 0; i < placed.reserved; i++) where[keys[i]] = -1;
}

// The next rows of a step that got no slot, in those of the loads before, which the device has computed. Where all
// others are on their way these are waited for, and the device has to be, before they give way.
int next_load(floe_offload &o, Link &link, const floe_found &f, const floe_way &way, const floe_places &d,
              floe_placed &placed) {
    const floe_pool &p = *o.pool;
    const int64_t wanted = placed.wanted - placed.done;
    Candidates candidates;
    float *factors = nullptr;
    placed.reserved = placed.transfer = 0;
    if (const int error = forget(o, link, -1)) return error;
    if (const int error = collect(o, link, false)) return error;
    if (const int error = end_step(o, link)) return error;
    if (free_slots(p, true) < wanted && !make_room(p, candidates, factors)) return FLOE_NO_MEMORY;
    const int64_t taken = visit(p, wanted, d.slots, candidates, factors);
    if (taken == 0) return await_all(o, link);
    const int64_t number = send(way, f.layer, d.keys + placed.done, d.slots, taken, true, 0.0, true);
    if (number < 0) {
        give_back(p, taken, d.slots);
        return (int)number;
    }
    lent(p, taken, d.slots);
    placed.reserved = taken;
    placed.transfer = o.visit = number;
    return keep_some(o, link, f.layer, d, placed);
}

int first_load(floe_offload &o, Link &link, const floe_found &f, uint8_t *marks, const floe_stop *stop,
               const floe_places &d, floe_placed &placed) {
    if (const int error = floe_offload_note(o.pool, &f, &d)) return error;
    if (const int error = keep_some(o, link, f.layer, d, placed)) return error;
    placed.done = 0;
    return await_coming(o, link, f, List(d, f.calls, FLOE_PART_COMING), marks, stop, placed.waited);
}

} // namespace
} // namespace floe

using namespace floe;

int floe_offload_start(floe_offload *offload, const floe_found *found, const floe_way *way, const floe_beside *beside,
                       const floe_places *places, floe_placed *placed) {
    floe_offload &o = *offload;
    const std::shared_ptr<Link> link = link_of(way->link);
    if (link == nullptr || !way->pooled) return FLOE_BAD_SHAPE;
    if (const int error = end_step(o, *link)) return error;
    if (const int error = collect(o, *link, false)) return error;
    int64_t dropped;
    if (const int error = forget(o, *link, found->layer, &dropped)) return error;
    ask_for(*o.pool, *way, dropped);
    const floe_lanes lanes = lanes_of(o, (double)link->queued_bytes());
    if (const int error = floe_offload_place(o.pool, found, &lanes, way, places, placed)) return error;
    o.visit = placed->transfer;
    if (places->offsets[FLOE_PART_BESIDE * (found->calls + 1) + found->calls] > 0)
        return beside == nullptr ? FLOE_OK : floe_share_start(beside, found, places);
    if (placed->wanted > 0 && o.cpu_share > 0) o.rates->cpu_bytes_s *= o.rates->hope;
    return FLOE_OK;
}

int floe_offload_finish(floe_offload *offload, const floe_found *found, const floe_way *way, uint8_t *marks,
                        const floe_stop *stop, const floe_places *places, floe_placed *placed) {
    floe_offload &o = *offload;
    const floe_found &f = *found;
    const std::shared_ptr<Link> link = link_of(way->link);
    if (link == nullptr || !way->pooled || placed->done > placed->wanted) return FLOE_BAD_SHAPE;
    const int error = placed->done < 0 ? first_load(o, *link, f, marks, stop, *places, *placed)
                                       : next_load(o, *link, f, *way, *places, *placed);
    if (error) return error;
    if (placed->transfer > 0)
        if (const int code = await(*link, placed->transfer, stop, placed->waited)) return code;
    o.visit = 0;
    if (const int code = collect(o, *link, false)) return code;
    list_arrived(*o.pool, f, *places, *placed);
    placed->done += placed->reserved;
    return placed->done < placed->wanted ? FLOE_MORE : FLOE_OK;
}

int64_t floe_offload_fetch(floe_offload *offload, int64_t layer, const floe_way *way, int64_t count,
                           const int64_t *keys, int urgent, double score) {
    thread_local Buffer buffer;
    const floe_pool &p = *offload->pool;
    if (count < 0 || isnan(score) || !leads(p, *way) || !way->pooled) return FLOE_BAD_SHAPE;
    auto *slots = (int32_t *)buffer.take(8 * count);
    if (slots == nullptr) return FLOE_NO_MEMORY;
    const int64_t taken = floe_pool_reserve(&p, layer, count, keys, urgent, slots);
    if (taken <= 0) return taken;
    int32_t *narrow = slots + count;
    std::copy(keys, keys + taken, narrow);
    const int64_t piece = urgent ? taken : std::max(way->piece, (taken + way->pieces - 1) / way->pieces);
    for (int64_t start = 0; start < taken; start += piece) {
        const int64_t rows = std::min(piece, taken - start);
        const int64_t number = send(*way, layer, narrow + start, slots + start, rows, urgent != 0, score, false);
        if (number >= 0) continue;
        floe_pool_settle(&p, taken - start, slots + start, false);
        return number;
    }
    return taken;
}

int floe_offload_collect(floe_offload *offload, int others) {
    const std::shared_ptr<Link> link = link_of(offload->link);
    return link == nullptr ? FLOE_BAD_INDEX : collect(*offload, *link, others != 0);
}

int floe_offload_forget(floe_offload *offload, int64_t layer) {
    const std::shared_ptr<Link> link = link_of(offload->link);
    return link == nullptr ? FLOE_BAD_INDEX : forget(*offload, *link, layer);
}

int floe_offload_await(floe_offload *offload) {
    const std::shared_ptr<Link> link = link_of(offload->link);
    return link == nullptr ? FLOE_BAD_INDEX : await_all(*offload, *link);
}

int floe_step_start(floe_offload *offload, const floe_step *step) {
    step->placed->done = -1;
    step->placed->waited = 0;
    return floe_offload_start(offload, step->found, step->way, step->beside, step->places, step->placed);
}

int floe_step_end(floe_offload *offload, floe_step *step) {
    const floe_found &f = *step->found;
    const floe_beside &beside = *step->beside;
    const int64_t *ends = step->places->offsets + f.calls;
    const int64_t shared = ends[FLOE_PART_BESIDE * (f.calls + 1)];
    const int code = floe_offload_finish(offload, &f, step->way, step->marks, nullptr, step->places, step->placed);
    if (code == FLOE_MORE || shared == 0) {
        std::fill_n(beside.y, step->hidden, 0.0f);
    } else {
        double seconds = 0; // also after an error: the share's memory is the next step's
        if (const int error = floe_share_join(&beside, &seconds)) return error;
        floe_rates &r = *offload->rates;
        observed(r, r.cpu_bytes_s, r.cpu_latency_s, (double)(shared * offload->row_bytes), seconds, offload->cpu_share);
    }
    step->late = ends[FLOE_PART_ARRIVED * (f.calls + 1)] > 0 || shared > 0;
    return code;
}

int floe_step_guess(floe_offload *offload, floe_guess *guess) {
    const floe_found &f = *guess->found;
    guess->asked = -1;
    if (f.calls < 0 || f.calls > f.room) return FLOE_BAD_SHAPE;
    for (int64_t c = 0; c < f.calls; c++)
        if (!isfinite(f.weights[c])) return FLOE_OK;
    const int64_t taken = floe_offload_ahead(offload->pool, &f, guess->way, guess->guessed, guess->keys, guess->slots,
                                             guess->runs, guess->sent);
    if (taken < 0) return (int)taken;
    guess->asked = f.offsets[f.calls];
    guess->taken = taken;
    return FLOE_OK;
}

int floe_step_compare(const floe_offload *offload, const floe_step *step, floe_guess *guess) {
    const floe_pool &p = *offload->pool;
    const floe_found &f = *step->found;
    if (guess->asked < 0) return FLOE_OK;
    if (f.layer != guess->found->layer) return FLOE_BAD_SHAPE;
    const int32_t *table = p.slots + f.layer * expert_width(p);
    // The others were dropped.
    const auto end =
        std::partition(guess->keys, guess->keys + guess->taken, [table](int32_t key) { return table[key] >= 0; });
    const int64_t *chosen = f.chosen, *chosen_end = f.chosen + f.tokens * f.top_k;
    for (int64_t n = 0; n < guess->experts; n++)
        guess->experts_right += std::find(chosen, chosen_end, guess->named[n]) != chosen_end;
    guess->guesses++;
    guess->predicted += guess->asked;
    guess->needed += f.offsets[f.calls];
    guess->right += right_of(f, guess->asked, guess->guessed, step->marks);
    guess->unused += (end - guess->keys) - right_of(f, end - guess->keys, guess->keys, step->marks);
    guess->asked = -1;
    return FLOE_OK;
}
