// The link to a GPU (FloE section 3.4.2): the CPU packs a chunk into pinned memory, one copy takes it across with a
// head that says where its rows belong, and a graph with one kernel puts them there. In place: only the head is copied,
// and the kernel reads rows in pinned memory by itself.
//
// `wait` returns when all copies of a transfer are under way, with the compute stream behind them. No call here needs
// CUDA's headers: the driver's functions come as addresses. The compute stream's handle may be 0, which is the default
// stream of whichever context is current: where other threads call, that may be another card's.
#include "link/row_moves.h"
#include "link/threaded_link.h"

#include <stdexcept>
#include <string.h>

namespace floe {
namespace {

constexpr int kNotReady = 600;    // CUDA_ERROR_NOT_READY
constexpr int kDevicePointer = 3; // CU_POINTER_ATTRIBUTE_DEVICE_POINTER

template <class Function> Function *function_at(int64_t address) { return (Function *)(intptr_t)address; }

// The driver's functions by their types; handles and device addresses are numbers.
class Driver {
  public:
    explicit Driver(const floe_driver &d) : d_(d) {}

    void enter() const { check(function_at<int(int64_t)>(d_.set_context)(d_.context)); }
    void push() const { check(function_at<int(int64_t)>(d_.push)(d_.context)); }
    void pop() const {
        int64_t context;
        function_at<int(int64_t *)>(d_.pop)(&context);
    }
    void copy(int64_t there, const void *here, int64_t bytes, int64_t stream) const {
        check(function_at<int(int64_t, const void *, size_t, int64_t)>(d_.copy)(there, here, (size_t)bytes, stream));
    }
    void launch(int64_t graph, int64_t stream) const { check(two(d_.launch)(graph, stream)); }
    void record(int64_t event, int64_t stream) const { check(two(d_.record)(event, stream)); }
    void synchronize(int64_t event) const { check(function_at<int(int64_t)>(d_.synchronize)(event)); }
    void wait(int64_t stream, int64_t event) const {
        check(function_at<int(int64_t, int64_t, unsigned)>(d_.wait)(stream, event, 0));
    }
    bool passed(int64_t event) const {
        const int code = function_at<int(int64_t)>(d_.query)(event);
        if (code != kNotReady) check(code);
        return code != kNotReady;
    }
    double seconds(int64_t before, int64_t after) const {
        float milliseconds = 0;
        check(function_at<int(float *, int64_t, int64_t)>(d_.elapsed)(&milliseconds, before, after));
        return 1e-3 * milliseconds;
    }
    // The address by which the device reads pinned memory; 0 if it cannot.
    int64_t address(const void *pinned) const {
        int64_t found = 0;
        const auto call = function_at<int(int64_t *, int, const void *)>(d_.address);
        return call(&found, kDevicePointer, pinned) == 0 ? found : 0;
    }

  private:
    using Two = int(int64_t, int64_t);
    static Two *two(int64_t address) { return function_at<Two>(address); }

    void check(int code) const {
        if (code == 0) return;
        const char *text = nullptr;
        function_at<int(int, const char **)>(d_.text)(code, &text);
        throw std::runtime_error(std::string("the GPU's driver: ") + (text != nullptr ? text : "unknown error"));
    }

    const floe_driver d_;
};

// The link's context is the calling thread's meanwhile.
class Inside {
  public:
    explicit Inside(const Driver &driver) : driver_(driver) { driver_.push(); }
    ~Inside() { driver_.pop(); }
    Inside(const Inside &) = delete;

  private:
    const Driver &driver_;
};

class CudaLink : public ThreadedLink {
  public:
    explicit CudaLink(const floe_link_config &config)
        : ThreadedLink(config), driver_(*config.driver), compute_(config.compute), in_place_(config.in_place != 0),
          head_(config.head) {
        for (int i = 0; i < kLanes; i++) lanes_[i] = config.lanes[i];
        for (int64_t i = 0; i < config.stall_count; i++)
            spare_.push_back({config.stalls[2 * i], config.stalls[2 * i + 1]});
    }
    ~CudaLink() override { close(); }

    int64_t submit(std::unique_ptr<Transfer> transfer) override {
        if (transfer->total() && transfer->source == nullptr) return FLOE_BAD_SHAPE;
        if (in_place_ && transfer->total()) {
            const uint8_t *there = nullptr;
            const int code = guarded([&] {
                there = (const uint8_t *)(intptr_t)driver_.address(transfer->source);
                return (int)(there == nullptr ? FLOE_DEVICE_FAILED : FLOE_OK);
            });
            if (code != FLOE_OK) return code;
            transfer->source = there;
        }
        return ThreadedLink::submit(std::move(transfer));
    }

    int wait(int64_t number, const floe_stop *stop, double *seconds) override {
        return guarded([&] {
            const int code = ThreadedLink::wait(number, stop, seconds);
            if (code == FLOE_OK) *seconds += stalled();
            return code;
        });
    }

    int follow() override {
        return guarded([&] {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const floe_lane &lane : lanes_) {
                driver_.record(lane.fence, compute_);
                driver_.wait(lane.stream, lane.fence);
            }
            return (int)FLOE_OK;
        });
    }

  protected:
    void enter() override { driver_.enter(); }

    void send(Chunk &chunk) override {
        const Transfer &t = *chunk.transfer;
        const floe_lane &lane = lanes_[lane_of(chunk)];
        const int64_t count = chunk.total();
        const int64_t words[4] = {count, (int64_t)(intptr_t)t.target, (int64_t)(intptr_t)t.source, 0};
        memcpy(lane.here, words, sizeof words);
        memcpy(lane.here + sizeof words, t.slots.data() + chunk.first, (size_t)(4 * count));
        memcpy(lane.here + sizeof words + 4 * queue_.chunk, t.index.data() + chunk.first, (size_t)(4 * count));
        if (!in_place_)
            RowMoves{t.source, t.index.data() + chunk.first, lane.here + head_, nullptr, count, row_bytes()}.run(
                pack_threads_);
        driver_.copy(lane.there, lane.here, head_ + (in_place_ ? 0 : count * row_bytes()), lane.stream);
        driver_.launch(lane.scatter, lane.stream);
        driver_.record(lane.event, lane.stream);
    }

    bool has_landed(const Chunk &chunk) override { return driver_.passed(lanes_[lane_of(chunk)].event); }
    void land(const Chunk &chunk) override { driver_.synchronize(lanes_[lane_of(chunk)].event); }
    bool reached(const Transfer &transfer) const override { return transfer.sent == transfer.total(); }

    // The compute stream goes on once the rows are there; how long it stands still is known later.
    void settle(Transfer &transfer) override {
        bool flies = false;
        for (const Chunk &chunk : queue_.flying) flies |= chunk.transfer == &transfer;
        if (flies) {
            const bool timed = !spare_.empty();
            if (timed) driver_.record(spare_.back().before, compute_);
            for (const Chunk &chunk : queue_.flying)
                if (chunk.transfer == &transfer) driver_.wait(compute_, lanes_[lane_of(chunk)].event);
            if (timed) {
                driver_.record(spare_.back().after, compute_);
                stalls_.push_back(spare_.back());
                spare_.pop_back();
            }
        }
        ThreadedLink::settle(transfer);
    }

  private:
    struct Stall {
        int64_t before, after; // events of the compute stream around a wait for copies
    };

    // Seconds that the compute stream stood still for copies, for the waits that it has passed.
    double stalled() {
        double seconds = 0;
        while (!stalls_.empty() && driver_.passed(stalls_.front().after)) {
            seconds += driver_.seconds(stalls_.front().before, stalls_.front().after);
            spare_.push_back(stalls_.front());
            stalls_.pop_front();
        }
        return seconds;
    }

    template <class Use> int guarded(Use use) {
        try {
            const Inside inside(driver_);
            return use();
        } catch (const std::runtime_error &error) {
            fail(error.what());
            return FLOE_LINK_FAILED;
        }
    }

    const Driver driver_;
    const int64_t compute_;
    const bool in_place_;
    const int64_t head_;
    floe_lane lanes_[kLanes];
    std::deque<Stall> stalls_;
    std::vector<Stall> spare_;
};

} // namespace

std::shared_ptr<Link> make_cuda_link(const floe_link_config &config) {
    auto link = std::make_shared<CudaLink>(config);
    link->start();
    return link;
}

} // namespace floe
