// The queue of a link: which rows go next, in which chunks, and which have landed. It has no thread and no clock.
// Its definition is engine/offload/links/link_queue.py.
#pragma once

#include "floe_offload.h"

#include <atomic>
#include <deque>
#include <limits>
#include <memory>
#include <unordered_map>
#include <vector>

namespace floe {

// Rows of a source that go to slots of a target. source NULL: bytes have no content.
struct Transfer {
    const uint8_t *source = nullptr;
    uint8_t *target = nullptr;
    std::vector<int32_t> index, slots, stay; // stay: the slots that `arrived` is to name, of a pool's
    bool urgent = false;
    double score = 0;
    int64_t layer = 0;
    bool pooled = false; // to slots of a pool: `arrived` and `give_up` name it then, not `finished` and `drop`

    // The queue's own.
    int64_t number = 0;
    double asked_at = 0;
    int64_t begun = 0, sent = 0;                     // rows
    bool done = false, landed = false, told = false; // told: `finished` has named it

    int64_t total() const { return (int64_t)index.size(); }
};

// Rows first..last-1 of a transfer. number: of the link's chunks, in the order in which they begin and land.
struct Chunk {
    Transfer *transfer;
    int64_t first, last, number;
    double begun_at, due;

    int64_t total() const { return last - first; }
    bool is_last() const { return last == transfer->total(); }
};

// Urgent transfers in order, then prefetches, highest score first. A transfer stays until it has landed and `finished`
// has named it, or until it is dropped.
class LinkQueue {
  public:
    const int64_t row_bytes, chunk;
    std::deque<Chunk> flying;             // in the order in which they land
    std::atomic<int64_t> queued_bytes{0}; // of rows that were put and have not landed
    int64_t bytes_moved = 0;              // of rows that have
    double busy_s = 0;                    // in which rows were on their way or being packed

    LinkQueue(int64_t row_bytes, int64_t chunk) : row_bytes(row_bytes), chunk(chunk) {}

    bool has_urgent() const { return !urgent_.empty(); }
    bool has_next() const { return !urgent_.empty() || !prefetch_.empty(); }
    bool landed_all() const { return under_way_ == 0; }
    double asked_at() const { return (urgent_.empty() ? prefetch_ : urgent_).front()->asked_at; }

    // The transfer's number; one without rows is done at once.
    int64_t put(std::unique_ptr<Transfer> given, double now);
    // nullptr if there is none of that number.
    Transfer *find(int64_t number) const;
    void urge(Transfer &transfer);
    // Prefetches of a layer (-1: of all) that have not begun, `most` of them at most.
    int64_t drop(int64_t layer, int64_t most, int64_t *numbers);
    void give_up(int64_t layer, std::vector<int32_t> &slots);

    // The next chunk, which begins now; it is on its way once it is `sent`.
    Chunk begin(double now);
    void sent(const Chunk &chunk);
    // The oldest chunk on its way has landed; a transfer is done with its last one.
    void landed(double now);
    void done(Transfer &transfer);
    // The transfers done since the last call, `most` of them at most.
    int64_t finished(int64_t most, int64_t *numbers);
    // Adds the slots of rows that have arrived since the last call, and that stay; returns how many transfers it was.
    int64_t arrived(std::vector<int32_t> &slots);
    // Adds the numbers of transfers to a layer's slots (-1: to all layers') that are not known to have arrived, the
    // oldest first; with marks, only of those that bring one of the marked rows.
    void under_way(int64_t layer, const uint8_t *marks, std::vector<int64_t> &numbers) const;

  private:
    template <class Taken> void drop_some(int64_t layer, bool pooled, Taken taken);
    void forget(const Transfer &transfer);

    std::unordered_map<int64_t, std::unique_ptr<Transfer>> transfers_;
    std::deque<Transfer *> urgent_, prefetch_; // with chunks that have not begun
    std::deque<int64_t> finished_, arrived_;
    int64_t last_ = 0, begun_ = 0, under_way_ = 0; // under_way_: put, not landed
    double landed_at_ = -std::numeric_limits<double>::infinity();
};

} // namespace floe
