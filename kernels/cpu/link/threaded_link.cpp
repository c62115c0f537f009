#include "link/threaded_link.h"
#include "src/expert_ops.h"

#include <stdexcept>

namespace floe {
namespace {

std::chrono::steady_clock::time_point moment(double seconds) {
    using Clock = std::chrono::steady_clock;
    return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

} // namespace

void ThreadedLink::start() {
    thread_ = std::thread([this] { run(); });
}

int64_t ThreadedLink::submit(std::unique_ptr<Transfer> transfer) {
    int64_t number;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (ended_ || closing_) return FLOE_LINK_FAILED;
        number = queue_.put(std::move(transfer), seconds_now());
    }
    changed_.notify_all();
    return number;
}

int ThreadedLink::wait(int64_t number, const floe_stop *stop, double *seconds) {
    const double begun = seconds_now();
    std::unique_lock<std::mutex> lock(mutex_);
    *seconds = 0;
    Transfer *const transfer = queue_.find(number);
    if (transfer == nullptr) return FLOE_BAD_INDEX;
    if (transfer->done) return FLOE_OK;
    queue_.urge(*transfer);
    if (gate_ != nullptr) shared(gate_->waiting)++;
    const int code = until(lock, stop, [&] {
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
    std::unique_lock<std::mutex> lock(mutex_);
    return until(lock, nullptr, [&] { return queue_.landed_all(); });
}

void ThreadedLink::close() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
    }
    changed_.notify_all();
    const std::lock_guard<std::mutex> lock(joining_);
    if (thread_.joinable()) thread_.join();
}

template <class Reached>
int ThreadedLink::until(std::unique_lock<std::mutex> &lock, const floe_stop *stop, Reached reached) {
    const auto over = [&] { return reached() || ended_; };
    if (stop == nullptr) changed_.wait(lock, over);
    while (!over()) {
        if (is_raised(*stop)) return FLOE_STOPPED;
        changed_.wait_for(lock, std::chrono::milliseconds(1), over);
    }
    return reached() ? FLOE_OK : FLOE_LINK_FAILED;
}

void ThreadedLink::fail(const char *why) {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failure_.empty()) failure_ = why;
        closing_ = true;
    }
    changed_.notify_all();
}

void ThreadedLink::run() {
    std::string failure;
    try {
        enter();
        while (step()) {}
    } catch (const std::exception &error) {
        failure = error.what();
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failure_.empty()) failure_ = std::move(failure);
        ended_ = true;
    }
    changed_.notify_all();
}

// Lands what has arrived, then sends one chunk, else waits for one that is on its way; false at the end.
bool ThreadedLink::step() {
    while (!queue_.flying.empty() && has_landed(queue_.flying.front())) take_in();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return !queue_.flying.empty() || queue_.has_next() || closing_; });
    if (may_begin()) {
        const Chunk chunk = queue_.begin(seconds_now());
        lock.unlock();
        put_out(chunk);
        return true;
    }
    if (queue_.flying.empty()) return false;
    const double due = queue_.flying.front().due;
    if (due > 0) {
        changed_.wait_until(lock, moment(due), [&] { return may_begin(); });
        return true;
    }
    lock.unlock();
    take_in();
    return true;
}

void ThreadedLink::put_out(Chunk chunk) {
    if (gate_ != nullptr) pass_gate(chunk);
    send(chunk);
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.sent(chunk);
    }
    if (chunk.is_last()) changed_.notify_all();
}

void ThreadedLink::take_in() {
    const Chunk chunk = queue_.flying.front();
    const bool last = chunk.is_last(); // the transfer may be gone once it has landed
    land(chunk);
    const double now = seconds_now();
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.landed(now);
    }
    if (last) changed_.notify_all();
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
