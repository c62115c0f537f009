// Rows from a file into RAM, where memory does not hold all of them: many requests at once, each for neighbours.
#include "link/threaded_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/types.h>
#include <unistd.h>
#endif

namespace floe {
namespace {

#if defined(__unix__) || defined(__APPLE__)

constexpr int64_t kRequest = 256 << 10; // bytes of one read, unless a row has more
constexpr int kMostReaders = 256;

// Bytes from `address` on are at `offset` of a file.
struct Extent {
    int64_t address, bytes, file, offset;
};

// A request's rows: `first` to `last - 1` of the chunk's rows in the order of the file.
struct Request {
    Chunk chunk;
    int lane;
    int64_t first, last;
};

// Each lane counts the requests of its chunk. Readers take them in order, urgent ones before prefetches, read into
// buffers of their own and copy each row to its slot.
class DiskLink : public ThreadedLink {
  public:
    explicit DiskLink(const floe_link_config &config) : ThreadedLink(config), gap_(config.gap), sector_(config.sector) {
        const auto *extents = (const Extent *)config.extents;
        extents_.assign(extents, extents + config.extent_count);
        std::sort(extents_.begin(), extents_.end(),
                  [](const Extent &a, const Extent &b) { return a.address < b.address; });
        for (std::vector<int32_t> &order : orders_) order.reserve((size_t)config.chunk);
        const int count = std::min<int>(config.readers, kMostReaders);
        try {
            for (int i = 0; i < count; i++) readers_.emplace_back([this] { read(); });
        } catch (...) {
            end_readers();
            throw;
        }
    }
    ~DiskLink() override { close(); }

    void close() override {
        ThreadedLink::close();
        const std::lock_guard<std::mutex> lock(ending_readers_);
        end_readers();
    }

  protected:
    void send(Chunk &chunk) override {
        const int lane = lane_of(chunk);
        std::vector<int32_t> &order = orders_[lane];
        const Transfer &t = *chunk.transfer;
        order.clear();
        for (int64_t i = chunk.first; i < chunk.last; i++) order.push_back((int32_t)i);
        std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return t.index[a] < t.index[b]; });
        std::vector<Request> made;
        if (t.source != nullptr) {
            const int64_t most = std::max<int64_t>(1, kRequest / row_bytes());
            for (int64_t first = 0, i = 1; i <= (int64_t)order.size(); i++) {
                const bool joined = i < (int64_t)order.size() &&
                                    t.index[order[i]] - t.index[order[i - 1]] <= gap_ + 1 &&
                                    t.index[order[i]] - t.index[order[first]] < most;
                if (joined) continue;
                made.push_back({chunk, lane, first, i});
                first = i;
            }
        }
        left_[lane] = (int64_t)made.size();
        {
            const std::lock_guard<std::mutex> lock(requests_mutex_);
            std::deque<Request> &requests = t.urgent ? urgent_ : prefetch_;
            requests.insert(requests.end(), made.begin(), made.end());
        }
        wanted_.notify_all();
    }

    bool has_landed(const Chunk &chunk) override { return left_[lane_of(chunk)] == 0; }

    void land(const Chunk &chunk) override {
        std::unique_lock<std::mutex> lock(requests_mutex_);
        read_.wait(lock, [&] { return left_[lane_of(chunk)] == 0; });
        if (!broken_.empty()) throw std::runtime_error(broken_);
    }

  private:
    void end_readers() {
        {
            const std::lock_guard<std::mutex> lock(requests_mutex_);
            ending_ = true;
            urgent_.clear(); // there are some only if the link has failed
            prefetch_.clear();
        }
        wanted_.notify_all();
        for (std::thread &reader : readers_) reader.join();
        readers_.clear();
    }

    void read() {
        const int64_t room = std::max(kRequest, row_bytes()) + 2 * sector_;
        std::vector<uint8_t> memory; // without an exception out of a thread
        std::string failure;
        try {
            memory.resize((size_t)(room + sector_));
        } catch (const std::bad_alloc &) {
            failure = "there is no memory for reading";
        }
        auto *const buffer = (uint8_t *)(((uintptr_t)memory.data() + sector_ - 1) / sector_ * sector_);
        for (;;) {
            Request request;
            {
                std::unique_lock<std::mutex> lock(requests_mutex_);
                wanted_.wait(lock, [&] { return ending_ || !urgent_.empty() || !prefetch_.empty(); });
                if (ending_) return;
                std::deque<Request> &requests = urgent_.empty() ? prefetch_ : urgent_;
                request = requests.front();
                requests.pop_front();
            }
            const std::string wrong = failure.empty() ? done(request, buffer) : failure;
            const std::lock_guard<std::mutex> lock(requests_mutex_);
            if (broken_.empty()) broken_ = wrong;
            if (--left_[request.lane] == 0) read_.notify_all();
        }
    }

    // Reads a request's rows and puts them into their slots; returns what is wrong, "" if all is well.
    std::string done(const Request &request, uint8_t *buffer) const {
        const Transfer &t = *request.chunk.transfer;
        const std::vector<int32_t> &order = orders_[request.lane];
        const int64_t nbytes = row_bytes(), low = t.index[order[request.first]];
        const int64_t count = t.index[order[request.last - 1]] - low + 1;
        const auto address = (int64_t)(intptr_t)t.source + low * nbytes;
        const Extent *extent = extent_of(address, count * nbytes);
        if (extent == nullptr) return "rows are not in a file that was opened";
        const int64_t at = extent->offset + (address - extent->address), start = at / sector_ * sector_;
        const int64_t wanted = at + count * nbytes - start;
        int64_t got = 0;
        while (got < wanted) {
            const int64_t whole = (wanted - got + sector_ - 1) / sector_ * sector_;
            const ssize_t n = pread((int)extent->file, buffer + got, (size_t)whole, (off_t)(start + got));
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) return std::string("a file of the pack cannot be read: ") + std::strerror(errno);
            if (n == 0) return "a file of the pack is shorter than it was";
            // Only a file's end may leave a part of a sector.
            got += got + n < wanted ? n / sector_ * sector_ : n;
            if (n < sector_ && got < wanted) return "a file of the pack is shorter than it was";
        }
        for (int64_t i = request.first; i < request.last; i++) {
            const int64_t row = t.index[order[i]] - low;
            std::memcpy(t.target + (int64_t)t.slots[order[i]] * nbytes, buffer + (at - start) + row * nbytes,
                        (size_t)nbytes);
        }
        return "";
    }

    const Extent *extent_of(int64_t address, int64_t bytes) const {
        auto after = std::upper_bound(extents_.begin(), extents_.end(), address,
                                      [](int64_t wanted, const Extent &one) { return wanted < one.address; });
        if (after == extents_.begin()) return nullptr;
        const Extent &found = *--after;
        return address + bytes <= found.address + found.bytes ? &found : nullptr;
    }

    const int64_t gap_, sector_; // rows; bytes
    std::vector<Extent> extents_;
    std::array<std::vector<int32_t>, kLanes> orders_; // of the rows of a lane's chunk, by their place in the file
    std::array<std::atomic<int64_t>, kLanes> left_{};
    std::mutex requests_mutex_;
    std::condition_variable wanted_, read_;
    std::deque<Request> urgent_, prefetch_;
    std::string broken_;
    bool ending_ = false;
    std::mutex ending_readers_;
    std::vector<std::thread> readers_;
};

#endif

} // namespace

std::shared_ptr<Link> make_disk_link(const floe_link_config &config) {
#if defined(__unix__) || defined(__APPLE__)
    auto link = std::make_shared<DiskLink>(config);
    link->start();
    return link;
#else
    (void)config;
    return nullptr;
#endif
}

} // namespace floe
