#include "link/threaded_link.h"
#include "src/expert_ops.h"
#include "src/spin.h"

#include <stdexcept>

namespace floe {
namespace {

// Before a thread that waits sleeps: about what it takes to wake it again.
constexpr std::chrono::microseconds kSpin{50};

std::chrono::steady_clock::time_point moment(double seconds) {
    using Clock = std::chrono::steady_clock;
    return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

} // namespace

void ThreadedLink::start() {
    thread_ = std::thread([this] { run(); });
}

int64_t ThreadedLink::submit(std::unique_ptr<Transfer> transfer) {
    const Lock lock(mutex_);
    if (ended_ || closing_) return FLOE_LINK_FAILED;
    const int64_t number = queue_.put(std::move(transfer), seconds_now());
    changed();
    return number;
}

int ThreadedLink::wait(int64_t number, const floe_stop *stop, double *seconds) {
    const double begun = seconds_now();
    Lock lock(mutex_);
    *seconds = 0;
    Transfer *const transfer = queue_.find(number);
    if (transfer == nullptr) return FLOE_BAD_INDEX;
    if (transfer->done) return FLOE_OK;
    queue_.urge(*transfer);
    if (gate_ != nullptr) shared(gate_->waiting)++;
    const int code = until(lock, stop, gate_ == nullptr, [&] {
        const Transfer *const still = queue_.find(number); // another thread may ask what has finished
        return still == nullptr || reached(*still);
    });
    if (code == FLOE_OK && queue_.find(number) != nullptr) settle(*transfer);
    *seconds = seconds_now() - begun;
    return code;
}

int64_t ThreadedLink::finished(int64_t most, int64_t *numbers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_.finished(most, numbers);
}

int64_t ThreadedLink::drop(int64_t layer, int64_t most, int64_t *numbers) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_.drop(layer, most, numbers);
}

int64_t ThreadedLink::arrived(std::vector<int32_t> &slots) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return queue_.arrived(slots);
}

void ThreadedLink::give_up(int64_t layer, std::vector<int32_t> &slots) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.give_up(layer, slots);
}

int ThreadedLink::drain() {
    Lock lock(mutex_);
    return until(lock, nullptr, false, [&] { return queue_.landed_all(); });
}

void ThreadedLink::close() {
    {
        const Lock lock(mutex_);
        closing_ = true;
        changed();
    }
    const std::lock_guard<std::mutex> lock(joining_);
    if (thread_.joinable()) thread_.join();
}

// Who waits for a transfer sends by itself what comes first: the link's thread may have to wake up, or wait for a chunk
// to land. Then it spins for a moment before it sleeps.
template <class Reached> int ThreadedLink::until(Lock &lock, const floe_stop *stop, bool sends, Reached reached) {
    for (bool spins = true; !reached() && !ended_ && failure_.empty();) {
        if (stop != nullptr && is_raised(*stop)) return FLOE_STOPPED;
        if (sends && queue_.has_urgent() && may_begin()) {
            try {
                put_out(lock);
            } catch (const std::exception &error) {
                lock.unlock();
                fail(error.what());
                return FLOE_LINK_FAILED;
            }
            continue;
        }
        const uint64_t seen = changes_;
        const auto is_new = [&] { return changes_ != seen; };
        if (spins) {
            lock.unlock();
            spin_until(kSpin, is_new);
            lock.lock();
            spins = false;
        }
        if (stop == nullptr) changed_.wait(lock, is_new);
        else changed_.wait_for(lock, std::chrono::milliseconds(1), is_new);
    }
    return reached() ? FLOE_OK : FLOE_LINK_FAILED;
}

void ThreadedLink::changed() {
    changes_++;
    changed_.notify_all();
}

void ThreadedLink::fail(const char *why) {
    const Lock lock(mutex_);
    if (failure_.empty()) failure_ = why;
    closing_ = true;
    changed();
}

void ThreadedLink::run() {
    std::string failure;
    try {
        enter();
        while (step()) {}
    } catch (const std::exception &error) {
        failure = error.what();
    }
    const Lock lock(mutex_);
    if (failure_.empty()) failure_ = std::move(failure);
    ended_ = true;
    changed();
}

// Lands what has arrived, then sends one chunk, else waits for one that is on its way; false at the end.
bool ThreadedLink::step() {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return !queue_.flying.empty() || may_begin() || (closing_ && !sending_); });
    while (!queue_.flying.empty()) {
        const Chunk first = queue_.flying.front();
        lock.unlock();
        const bool there = has_landed(first);
        lock.lock();
        if (!there) break;
        take_in(lock);
    }
    if (may_begin()) {
        put_out(lock);
        return true;
    }
    if (queue_.flying.empty()) return !closing_ || sending_;
    const double due = queue_.flying.front().due;
    if (due > 0) changed_.wait_until(lock, moment(due), [&] { return may_begin(); });
    else take_in(lock);
    return true;
}

void ThreadedLink::put_out(Lock &lock) {
    Chunk chunk = queue_.begin(seconds_now());
    sending_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
        if (gate_ != nullptr) pass_gate(chunk);
        send(chunk);
    } catch (...) {
        failure = std::current_exception();
    }
    lock.lock();
    sending_ = false;
    if (failure == nullptr) queue_.sent(chunk);
    changed();
    if (failure != nullptr) std::rethrow_exception(failure);
}

void ThreadedLink::take_in(Lock &lock) {
    const Chunk chunk = queue_.flying.front(); // only this thread takes it out
    const bool last = chunk.is_last();         // the transfer may be gone once it has landed
    lock.unlock();
    land(chunk);
    lock.lock();
    queue_.landed(seconds_now());
    if (last) changed();
}

void ThreadedLink::pass_gate(const Chunk &chunk) {
    const int64_t at = chunk.number - 1;
    if (at < gate_->capacity) {
        int64_t *const place = gate_->chunks + 3 * at;
        place[0] = chunk.transfer->number;
        place[1] = chunk.first;
        place[2] = chunk.last;
        shared(gate_->count) = chunk.number;
    }
    while (shared(gate_->begins) < chunk.number) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (gate_->fails_at >= 0 && at >= gate_->fails_at) throw std::runtime_error("the gate is broken");
}

} // namespace floe
