// The CPU's share of a step: rows in RAM, computed by the threads of the other operations while the caller continues.
#include "floe_offload.h"
#include "found.h"
#include "src/sparse_sum.h"
#include "src/thread_pool.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <new>
#include <unordered_map>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace floe {
namespace {

using Clock = std::chrono::steady_clock;

class Share {
  public:
    int start(const floe_beside &beside, const floe_found &found, const floe_places &places) {
        if (begun_.started()) begun_.join(); // of a step that was given up
        started_at_ = ended_at_ = Clock::now();
        const int threads = beside.threads < 2 ? 2 : beside.threads < kMaxThreads ? beside.threads : kMaxThreads;
        const int64_t hidden = found.tokens * beside.rows->other.n, calls = found.calls;
        const int64_t *const offsets = places.offsets + FLOE_PART_BESIDE * (calls + 1);
        const int32_t *const at = places.at + FLOE_PART_BESIDE * places.room;
        const int64_t count = offsets[calls];
        if (hidden < 0 || found.values == nullptr) return FLOE_BAD_SHAPE;
        if (!rise(offsets, calls) || count > places.room || !in_range(at, count, total_of(found)))
            return FLOE_BAD_INDEX;
        uint8_t *memory = buffer_.take(aligned(4 * hidden) + 2 * aligned(4 * count) + 3 * aligned(8 * (calls + 1)) +
                                       2 * aligned(4 * calls));
        if (memory == nullptr) return FLOE_NO_MEMORY;
        float *const x = carve<float>(memory, hidden);
        int32_t *const neurons = carve<int32_t>(memory, count);
        float *const values = carve<float>(memory, count);
        int64_t *const ends = carve<int64_t>(memory, calls + 1);
        for (int64_t i = 0; i < hidden; i++) x[i] = number_at(beside.hidden, found.kind, i);
        for (int64_t i = 0; i < count; i++) {
            neurons[i] = found.neurons[at[i]];
            values[i] = number_at(found.values, found.kind, at[i]);
        }
        std::copy(offsets, offsets + calls + 1, ends);
        floe_calls given = {calls,
                            carve<int64_t>(memory, calls),
                            carve<int64_t>(memory, calls),
                            carve<float>(memory, calls),
                            nullptr,
                            nullptr,
                            nullptr};
        std::copy(beside.tokens, beside.tokens + calls, given.token);
        std::copy(found.experts, found.experts + calls, given.expert);
        std::copy(found.weights, found.weights + calls, given.weight);
        if (beside.products != nullptr) {
            given.product = carve<float>(memory, calls);
            std::copy(beside.products, beside.products + calls, given.product);
        }
        // Nothing of the caller's is looked at afterwards, but for the rows.
        const floe_active active = {ends, neurons, values};
        if (const int error = sum_.prepare(x, found.tokens, *beside.rows, given, active, beside.digits, threads))
            return error;
        left_ = sum_.slice_count;
        begun_.start(threads, sum_.slice_count, compute, this);
        return FLOE_OK;
    }

    int join(const floe_beside &beside, double *seconds) {
        if (!begun_.started()) return FLOE_BAD_SHAPE;
        begun_.join();
        sum_.add(beside.threads, beside.y, beside.kept);
        *seconds = std::chrono::duration<double>(ended_at_ - started_at_).count();
        return FLOE_OK;
    }

  private:
    static void compute(void *it, int64_t item, int worker) {
        Share &share = *(Share *)it;
        share.sum_.compute(item, worker);
        if (--share.left_ == 0) share.ended_at_ = Clock::now();
    }

    Buffer buffer_;
    SparseSum sum_;
    std::atomic<int64_t> left_{0};
    Clock::time_point started_at_, ended_at_;
    Begun begun_; // joined first
};

struct Table {
    std::mutex mutex;
    std::unordered_map<int64_t, std::shared_ptr<Share>> shares;
};

std::atomic<int64_t> last_handle{0};
std::atomic<Table *> current{nullptr};

Table &table() {
    static const bool once = [] {
        current = new Table; // never destroyed, like the threads
#if defined(__unix__) || defined(__APPLE__)
        pthread_atfork(nullptr, nullptr, [] { current = new Table; }); // the child has none of the threads
#endif
        return true;
    }();
    (void)once;
    return *current;
}

std::shared_ptr<Share> share_of(int64_t handle) {
    Table &all = table();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.shares.find(handle);
    return found == all.shares.end() ? nullptr : found->second;
}

} // namespace
} // namespace floe

using namespace floe;

int64_t floe_share_open(void) {
    try {
        Table &all = table();
        auto share = std::make_shared<Share>();
        const std::lock_guard<std::mutex> lock(all.mutex);
        all.shares[++last_handle] = std::move(share);
        return last_handle;
    } catch (const std::bad_alloc &) {
        return FLOE_NO_MEMORY;
    }
}

int floe_share_start(const floe_beside *beside, const floe_found *found, const floe_places *places) {
    const std::shared_ptr<Share> share = share_of(beside->share);
    try {
        return share == nullptr ? FLOE_BAD_INDEX : share->start(*beside, *found, *places);
    } catch (const std::bad_alloc &) {
        return FLOE_NO_MEMORY;
    }
}

int floe_share_join(const floe_beside *beside, double *seconds) {
    const std::shared_ptr<Share> share = share_of(beside->share);
    return share == nullptr ? FLOE_BAD_INDEX : share->join(*beside, seconds);
}

int floe_share_free(int64_t share) {
    Table &all = table();
    std::shared_ptr<Share> freed; // destroyed without the lock
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.shares.find(share);
    if (found == all.shares.end()) return FLOE_BAD_INDEX;
    freed = std::move(found->second);
    all.shares.erase(found);
    return FLOE_OK;
}
