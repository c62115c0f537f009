// A test link: RAM to RAM, slow on purpose, with real threads, lanes and bytes.
#include "link/row_moves.h"
#include "link/threaded_link.h"
#include "src/buffers.h"

#include <algorithm>

namespace floe {
namespace {

// A chunk takes at least latency + bytes / rate. Packing is hidden behind the chunk before, as on a real link.
class ThrottledLink : public ThreadedLink {
  public:
    explicit ThrottledLink(const floe_link_config &config)
        : ThreadedLink(config), rate_(config.rate), latency_(config.latency),
          staging_(memory_.take(kLanes * config.chunk * config.row_bytes)) {
        if (staging_ == nullptr) throw std::bad_alloc();
    }
    ~ThrottledLink() override { close(); }

  protected:
    void send(Chunk &chunk) override {
        const Transfer &t = *chunk.transfer;
        if (t.source != nullptr)
            RowMoves{t.source, t.index.data() + chunk.first, lane(chunk), nullptr, chunk.total(), row_bytes()}.run(
                pack_threads_);
        const double seconds = latency_ + (double)(chunk.total() * row_bytes()) / rate_;
        free_at_ = chunk.due = std::max(free_at_, seconds_now()) + seconds;
    }

    bool has_landed(const Chunk &chunk) override { return seconds_now() >= chunk.due; }

    void land(const Chunk &chunk) override {
        const Transfer &t = *chunk.transfer;
        if (t.source != nullptr)
            RowMoves{lane(chunk), nullptr, t.target, t.slots.data() + chunk.first, chunk.total(), row_bytes()}.run(
                pack_threads_);
    }

  private:
    uint8_t *lane(const Chunk &chunk) const { return staging_ + lane_of(chunk) * queue_.chunk * row_bytes(); }

    const double rate_, latency_;
    Buffer memory_; // aligned, or rows would not be copied past the caches
    uint8_t *const staging_;
    double free_at_ = 0;
};

} // namespace

std::shared_ptr<Link> make_throttled_link(const floe_link_config &config) {
    auto link = std::make_shared<ThrottledLink>(config);
    link->start();
    return link;
}

} // namespace floe
