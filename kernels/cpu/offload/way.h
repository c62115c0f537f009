// Rows that a step or a guess sends over a link by itself.
#pragma once

#include "link/link.h"

#include <algorithm>
#include <new>

namespace floe {
namespace {

// Whether rows of this pool can go this way.
inline bool leads(const floe_pool &p, const floe_way &way) {
    const bool full = way.source != nullptr && way.target != nullptr;
    return way.rows == p.experts * p.neurons && way.capacity >= p.capacity && way.piece >= 1 && way.pieces >= 1 &&
           (full || (way.source == nullptr && way.target == nullptr)) && link_of(way.link) != nullptr;
}

// The transfer's number, or an error. Keys and slots are the pool's own, or visitors'.
inline int64_t send(const floe_way &way, int64_t layer, const int32_t *keys, const int32_t *slots, int64_t count,
                    bool urgent, double score, bool visiting) {
    const std::shared_ptr<Link> link = link_of(way.link);
    if (link == nullptr) return FLOE_BAD_INDEX;
    try {
        auto transfer = std::make_unique<Transfer>();
        transfer->source = way.source;
        transfer->target = way.target;
        transfer->index.assign(keys, keys + count);
        transfer->slots.assign(slots, slots + count);
        if (!visiting) transfer->stay = transfer->slots;
        transfer->urgent = urgent;
        transfer->score = score;
        transfer->layer = layer;
        transfer->pooled = way.pooled != 0;
        return link->submit(std::move(transfer));
    } catch (const std::bad_alloc &) {
        return FLOE_NO_MEMORY;
    }
}

} // namespace
} // namespace floe
