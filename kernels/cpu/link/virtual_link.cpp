// Links whose bytes arrive at once: in virtual time, counted by a clock, or in none.
// The definition is tests/engine/plain_link.py, to the last read of the clock.
#include "link/clock.h"
#include "link/link.h"
#include "link/row_moves.h"

#include <optional>

namespace floe {
namespace {

class VirtualLink : public Link {
  public:
    explicit VirtualLink(const floe_link_config &config)
        : Link(config), at_once_(config.kind == FLOE_LINK_NONE),
          rate_(at_once_ ? std::numeric_limits<double>::infinity() : config.rate),
          latency_(at_once_ ? 0.0 : config.latency), clock_(at_once_ ? still_ : *config.clock) {}

    int64_t submit(std::unique_ptr<Transfer> given) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (closed_) return FLOE_LINK_FAILED;
        const Transfer &transfer = *given;
        catch_up();
        const double now = virtual_now(clock_);
        const Aside aside(clock_);
        if (transfer.source != nullptr && transfer.total()) moves_of(transfer).run(pack_threads_);
        const int64_t number = queue_.put(std::move(given), now);
        while (at_once_ && queue_.has_next()) begin_chunk();
        if (at_once_) land(now);
        return number;
    }

    int wait(int64_t number, const floe_stop *, double *seconds) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        *seconds = 0;
        Transfer *const transfer = queue_.find(number);
        if (transfer == nullptr) return FLOE_BAD_INDEX;
        if (!transfer->done) catch_up();
        if (transfer->done) return FLOE_OK;
        queue_.urge(*transfer);
        double begun_at, due;
        {
            const Aside aside(clock_);
            while (transfer->begun < transfer->total()) begin_chunk(); // nothing that comes later can overtake it
            const Chunk &last = last_of(transfer);
            begun_at = last.begun_at;
            due = last.due;
            land(due);
        }
        *seconds = wait_lane(clock_, kGpuLane, due);
        wait_lane(clock_, kHostLane, begun_at); // as a real link returns once the last chunk is on its way
        return FLOE_OK;
    }

    int64_t finished(int64_t most, int64_t *numbers) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        catch_up();
        return queue_.finished(most, numbers);
    }

    int64_t drop(int64_t layer, int64_t most, int64_t *numbers) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        catch_up();
        return queue_.drop(layer, most, numbers);
    }

    int64_t arrived(std::vector<int32_t> &slots) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        catch_up();
        return queue_.arrived(slots);
    }

    void give_up(int64_t layer, std::vector<int32_t> &slots) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        catch_up();
        queue_.give_up(layer, slots);
    }

    int64_t queued_bytes() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        catch_up();
        return queue_.queued_bytes;
    }

    int drain() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        catch_up();
        if (closed_ && queue_.has_next()) return FLOE_LINK_FAILED;
        double due = 0;
        {
            const Aside aside(clock_);
            while (queue_.has_next()) begin_chunk();
            if (!queue_.flying.empty()) due = queue_.flying.back().due;
            land(due);
        }
        wait_lane(clock_, kHostLane, due);
        return FLOE_OK;
    }

    void close() override {
        const std::lock_guard<std::mutex> lock(mutex_);
        closed_ = true;
    }

  private:
    RowMoves moves_of(const Transfer &t) const {
        return {t.source, t.index.data(), t.target, t.slots.data(), t.total(), queue_.row_bytes};
    }

    // Begins the chunks that begin before now, and lands those that end by now.
    void catch_up() {
        const double now = virtual_now(clock_);
        const Aside aside(clock_); // on a real link its own thread does this
        while (queue_.has_next() && !closed_ && begins() < now) begin_chunk();
        land(now);
    }

    double begins() const { return std::max(clock_.link, queue_.asked_at()); }

    void begin_chunk() {
        Chunk chunk = queue_.begin(begins());
        const double seconds = latency_ + (double)(chunk.total() * queue_.row_bytes) / rate_;
        chunk.due = run_lane(clock_, kLinkLane, seconds, chunk.begun_at);
        queue_.sent(chunk);
    }

    void land(double until) {
        while (!queue_.flying.empty() && queue_.flying.front().due <= until) queue_.landed(queue_.flying.front().due);
    }

    const Chunk &last_of(const Transfer *transfer) const {
        for (const Chunk &chunk : queue_.flying)
            if (chunk.transfer == transfer && chunk.is_last()) return chunk;
        return queue_.flying.back(); // its last chunk has begun and has not landed
    }

    const bool at_once_;
    const double rate_, latency_;
    floe_clock still_{}; // stands still
    floe_clock &clock_;
    bool closed_ = false;
};

} // namespace

std::shared_ptr<Link> make_virtual_link(const floe_link_config &config) {
    return std::make_shared<VirtualLink>(config);
}

} // namespace floe
