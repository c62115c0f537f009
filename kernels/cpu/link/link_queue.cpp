#include "link/link_queue.h"

#include <algorithm>

namespace floe {

int64_t LinkQueue::put(std::unique_ptr<Transfer> given, double now) {
    Transfer &transfer = *(transfers_[last_ + 1] = std::move(given));
    transfer.number = ++last_;
    transfer.asked_at = now;
    if (transfer.total() == 0) {
        transfer.landed = true;
        done(transfer);
        return last_;
    }
    under_way_++;
    queued_bytes += transfer.total() * row_bytes;
    if (transfer.urgent) urgent_.push_back(&transfer);
    else {
        const auto higher = [](double score, const Transfer *other) { return score > other->score; };
        prefetch_.insert(std::upper_bound(prefetch_.begin(), prefetch_.end(), transfer.score, higher), &transfer);
    }
    return last_;
}

Transfer *LinkQueue::find(int64_t number) const {
    const auto found = transfers_.find(number);
    return found == transfers_.end() ? nullptr : found->second.get();
}

void LinkQueue::urge(Transfer &transfer) {
    transfer.urgent = true;
    const auto found = std::find(prefetch_.begin(), prefetch_.end(), &transfer);
    if (found == prefetch_.end()) return;
    prefetch_.erase(found);
    urgent_.push_back(&transfer);
}

// taken: whether to take this one out, which ends there.
template <class Taken> void LinkQueue::drop_some(int64_t layer, bool pooled, Taken taken) {
    for (auto at = prefetch_.begin(); at != prefetch_.end();) {
        const Transfer &transfer = **at;
        const bool stays = transfer.begun || transfer.pooled != pooled || (layer >= 0 && transfer.layer != layer);
        if (stays || !taken(transfer)) {
            ++at;
            continue;
        }
        at = prefetch_.erase(at);
        under_way_--;
        queued_bytes -= transfer.total() * row_bytes;
        transfers_.erase(transfer.number);
    }
}

int64_t LinkQueue::drop(int64_t layer, int64_t most, int64_t *numbers) {
    int64_t count = 0;
    drop_some(layer, false, [&](const Transfer &transfer) {
        if (count == most) return false;
        numbers[count++] = transfer.number;
        return true;
    });
    return count;
}

void LinkQueue::give_up(int64_t layer, std::vector<int32_t> &slots) {
    drop_some(layer, true, [&](const Transfer &transfer) {
        slots.insert(slots.end(), transfer.slots.begin(), transfer.slots.end());
        return true;
    });
}

Chunk LinkQueue::begin(double now) {
    std::deque<Transfer *> &queue = urgent_.empty() ? prefetch_ : urgent_;
    Transfer &transfer = *queue.front();
    const int64_t first = transfer.begun;
    transfer.begun = std::min(first + chunk, transfer.total());
    if (transfer.begun == transfer.total()) queue.pop_front();
    return {&transfer, first, transfer.begun, ++begun_, now, 0.0};
}

void LinkQueue::sent(const Chunk &chunk) {
    flying.push_back(chunk);
    chunk.transfer->sent = chunk.last;
}

void LinkQueue::landed(double now) {
    const Chunk chunk = flying.front();
    flying.pop_front();
    queued_bytes -= chunk.total() * row_bytes;
    bytes_moved += chunk.total() * row_bytes;
    busy_s += now - std::max(chunk.begun_at, landed_at_);
    landed_at_ = now;
    if (!chunk.is_last()) return;
    under_way_--;
    chunk.transfer->landed = true;
    done(*chunk.transfer);
    forget(*chunk.transfer);
}

void LinkQueue::done(Transfer &transfer) {
    if (transfer.done) return;
    transfer.done = true;
    (transfer.pooled ? arrived_ : finished_).push_back(transfer.number);
}

int64_t LinkQueue::finished(int64_t most, int64_t *numbers) {
    int64_t count = 0;
    for (; count < most && !finished_.empty(); finished_.pop_front()) {
        Transfer &transfer = *transfers_.at(finished_.front());
        numbers[count++] = transfer.number;
        transfer.told = true;
        forget(transfer);
    }
    return count;
}

int64_t LinkQueue::arrived(std::vector<int32_t> &slots) {
    const int64_t count = (int64_t)arrived_.size();
    for (; !arrived_.empty(); arrived_.pop_front()) {
        Transfer &transfer = *transfers_.at(arrived_.front());
        slots.insert(slots.end(), transfer.stay.begin(), transfer.stay.end());
        transfer.told = true;
        forget(transfer);
    }
    return count;
}

void LinkQueue::under_way(int64_t layer, const uint8_t *marks, std::vector<int64_t> &numbers) const {
    for (const auto &[number, transfer] : transfers_) {
        if (!transfer->pooled || transfer->told || (layer >= 0 && transfer->layer != layer)) continue;
        const auto wanted = [&](int32_t row) { return marks[row] != 0; };
        if (marks == nullptr || std::any_of(transfer->index.begin(), transfer->index.end(), wanted))
            numbers.push_back(number);
    }
    std::sort(numbers.begin(), numbers.end());
}

void LinkQueue::forget(const Transfer &transfer) {
    if (transfer.landed && transfer.told) transfers_.erase(transfer.number);
}

} // namespace floe
