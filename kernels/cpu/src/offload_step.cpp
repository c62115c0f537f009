// A layer's step, begun and ended: what has arrived, what is placed, sent for and waited for.
// `engine/offload/scheduler.py` defines it.
#include "floe_offload.h"
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
    return {r.cpu_latency_s, o.cpu_share > 0 ? row / (r.cpu_bytes_s * o.cpu_share) : INFINITY,
            queued_bytes / r.link_bytes_s + r.link_latency_s + r.launch_s, row / r.link_bytes_s + row / r.gpu_bytes_s};
}

int collect(floe_offload &o, Link &link, bool others) {
    thread_local std::vector<int32_t> slots;
    slots.clear();
    link.arrived(slots);
    if (slots.empty() && !others) return FLOE_OK;
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

int forget(const floe_offload &o, Link &link, int64_t layer) {
    thread_local std::vector<int32_t> slots;
    slots.clear();
    link.give_up(layer, slots);
    return floe_pool_settle(o.pool, (int64_t)slots.size(), slots.data(), false);
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

// The first load's rows that were on their way, and those copied that it brings, in the order of the active neurons.
// first, last: of the `wanted` keys.
void list_arrived(const floe_pool &p, const floe_found &f, const floe_places &d, int64_t first, int64_t last,
                  int64_t wanted, uint8_t *marks) {
    const List coming(d, f.calls, FLOE_PART_COMING), copied(d, f.calls, FLOE_PART_COPIED);
    const List arrived(d, f.calls, FLOE_PART_ARRIVED);
    const int32_t *table = p.slots + f.layer * expert_width(p);
    const bool all = first == 0 && last == wanted;
    const int64_t rows = copied.offsets[f.calls];
    if (all && rows == wanted && coming.offsets[f.calls] == 0 && std::equal(d.keys, d.keys + rows, copied.places)) {
        std::copy(copied.offsets, copied.offsets + f.calls + 1, arrived.offsets);
        std::copy(copied.at, copied.at + rows, arrived.at);
        std::copy(d.slots, d.slots + rows, arrived.places);
        return;
    }
    int64_t count = 0;
    arrived.offsets[0] = 0;
    for (int64_t i = first; i < last && !all; i++) marks[d.keys[i]] = 1;
    for (int64_t c = 0; c < f.calls; c++) {
        int64_t came = first == 0 ? coming.offsets[c] : coming.offsets[c + 1];
        const int64_t came_end = coming.offsets[c + 1];
        for (int64_t i = copied.offsets[c]; i < copied.offsets[c + 1]; i++) {
            const int32_t key = copied.places[i], at = copied.at[i];
            if (!all && !marks[key]) continue;
            for (; came < came_end && coming.at[came] < at; came++, count++) {
                arrived.at[count] = coming.at[came];
                arrived.places[count] = coming.places[came];
            }
            arrived.at[count] = at;
            arrived.places[count++] = all && i < last && d.keys[i] == key ? d.slots[i] : table[key];
        }
        for (; came < came_end; came++, count++) {
            arrived.at[count] = coming.at[came];
            arrived.places[count] = coming.places[came];
        }
        arrived.offsets[c + 1] = count;
    }
    for (int64_t i = first; i < last && !all; i++) marks[d.keys[i]] = 0;
}

// Slots for keys that are absent and named once each, and a transfer of them; returns for how many.
template <class Key>
int64_t fetch_urgent(floe_offload &o, int64_t layer, const floe_way &way, int64_t count, const Key *keys,
                     int32_t *slots, int64_t &transfer) {
    const floe_pool &p = *o.pool;
    Candidates candidates;
    float *factors = nullptr;
    if (free_slots(p, true) < count && !make_room(p, candidates, factors)) return FLOE_NO_MEMORY;
    int64_t taken = take_free(p, count, true, slots);
    if (taken < count) taken += evict(p, count - taken, true, slots + taken, candidates, factors);
    if (taken == 0) return 0;
    transfer = send(way, layer, keys, slots, taken, true, 0.0);
    if (transfer < 0) {
        give_back(p, taken, slots);
        return transfer;
    }
    book(p, layer, keys, taken, true, slots);
    return taken;
}

// The next rows of a step that got no slot: those of the loads before may give way, the device has computed them. Where
// all others are on their way these are waited for, and the device has to be, before they give way.
int next_load(floe_offload &o, Link &link, const floe_found &f, const floe_way &way, const floe_places &d,
              floe_placed &placed) {
    if (const int error = forget(o, link, -1)) return error;
    if (const int error = collect(o, link, false)) return error;
    o.pool->counters[FLOE_POOL_STEP]++;
    placed.transfer = 0;
    const int64_t taken =
        fetch_urgent(o, f.layer, way, placed.wanted - placed.done, d.keys + placed.done, d.slots, placed.transfer);
    placed.reserved = std::max(taken, (int64_t)0);
    return taken > 0 ? FLOE_OK : taken < 0 ? (int)taken : await_all(o, link);
}

int first_load(floe_offload &o, Link &link, const floe_found &f, uint8_t *marks, const floe_stop *stop,
               const floe_places &d, floe_placed &placed) {
    const floe_pool &p = *o.pool;
    if (const int error = floe_offload_note(&p, &f)) return error;
    placed.done = 0;
    if (placed.reserved > 0 && placed.reserved <= p.capacity / o.spared)
        if (const int error = floe_pool_spare(&p, placed.reserved)) return error;
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
    o.pool->counters[FLOE_POOL_STEP]++;
    if (const int error = collect(o, *link, false)) return error;
    if (const int error = forget(o, *link, found->layer)) return error;
    const floe_lanes lanes = lanes_of(o, (double)link->queued_bytes());
    if (const int error = floe_offload_place(o.pool, found, &lanes, way, places, placed)) return error;
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
    if (const int code = collect(o, *link, false)) return code;
    list_arrived(*o.pool, f, *places, placed->done, placed->done + placed->reserved, placed->wanted, marks);
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
        const int64_t number = send(*way, layer, narrow + start, slots + start, rows, urgent != 0, score);
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
