// Links by the machine's clock: a thread packs chunks of the queue into lanes, sends them, and lands them in their
// slots. While one is on its way the next one is packed (FloE section 3.4.2).
#pragma once

#include "link/link.h"

#include <chrono>
#include <condition_variable>
#include <thread>

namespace floe {

// Chunks between packing and landing: one being packed, one on its way, and some slack for late wake-ups.
constexpr int kLanes = FLOE_LINK_LANES;

// A free one: chunks land in the order in which they are sent.
inline int lane_of(const Chunk &chunk) { return (int)(chunk.number % kLanes); }

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

class ThreadedLink : public Link {
  public:
    explicit ThreadedLink(const floe_link_config &config) : Link(config), gate_(config.gate) {}

    // Starts the thread, once the link is complete; throws std::system_error.
    void start();

    int64_t submit(std::unique_ptr<Transfer> transfer) override;
    int wait(int64_t number, const floe_stop *stop, double *seconds) override;
    int64_t finished(int64_t most, int64_t *numbers) override;
    int64_t drop(int64_t layer, int64_t most, int64_t *numbers) override;
    int64_t arrived(std::vector<int32_t> &slots) override;
    void give_up(int64_t layer, std::vector<int32_t> &slots) override;
    int64_t queued_bytes() override { return queue_.queued_bytes; }
    int drain() override;
    void close() override; // in the destructor of every kind, while its lanes are there

  protected:
    // The thread begins. This and the next three run without the lock; what they throw ends the link.
    virtual void enter() {}
    // Packs a chunk into its lane and starts to send it; knows `due` if that can be known. In the link's thread or in
    // one that waits for the chunk's transfer, one at a time.
    virtual void send(Chunk &chunk) = 0;
    // Whether `land` would not have to wait.
    virtual bool has_landed(const Chunk &chunk) = 0;
    // Waits until the rows are in their slots; the lane is free then.
    virtual void land(const Chunk &chunk) = 0;

    // Whether `wait` may return, and what remains to do then; the lock is held.
    virtual bool reached(const Transfer &transfer) const { return transfer.done; }
    virtual void settle(Transfer &transfer) { queue_.done(transfer); }

    // Ends the link for a reason that another thread than its own has found.
    void fail(const char *why);

  private:
    using Lock = std::unique_lock<std::mutex>; // of `mutex_`

    void run();
    bool step();
    // Sends the next chunk, during which the lock is not held.
    void put_out(Lock &lock);
    void take_in(Lock &lock);
    void pass_gate(const Chunk &chunk);
    void changed(); // the lock is held
    bool may_begin() const { return !closing_ && !sending_ && queue_.has_next() && (int)queue_.flying.size() < kLanes; }
    // Whether it was `reached` before the link ended, or before somebody raised `stop`; the lock is held.
    template <class Reached> int until(Lock &lock, const floe_stop *stop, bool sends, Reached reached);

    floe_link_gate *const gate_;
    std::condition_variable changed_;
    std::atomic<uint64_t> changes_{0};
    bool closing_ = false, ended_ = false, sending_ = false; // sending_: a thread is in `send`
    std::mutex joining_;
    std::thread thread_;
};

} // namespace floe
