// Links: what stands behind the handles of floe_link_open. Each kind defines when its chunks begin and land.
#pragma once

#include "link/link_queue.h"

#include <mutex>
#include <new>
#include <string>

namespace floe {

class Link {
  public:
    explicit Link(const floe_link_config &config)
        : pack_threads_(config.pack_threads), queue_(config.row_bytes, config.chunk) {}
    Link(const Link &) = delete;
    Link &operator=(const Link &) = delete;
    virtual ~Link() = default;

    int64_t row_bytes() const { return queue_.row_bytes; }

    // As floe_link_submit, _wait, ... (floe_offload.h), once arguments are checked. The transfer is complete.
    virtual int64_t submit(std::unique_ptr<Transfer> transfer) = 0;
    virtual int wait(int64_t number, const floe_stop *stop, double *seconds) = 0;
    virtual int64_t finished(int64_t most, int64_t *numbers) = 0;
    virtual int64_t drop(int64_t layer, int64_t most, int64_t *numbers) = 0;
    // Of transfers to a pool, see LinkQueue.
    virtual int64_t arrived(std::vector<int32_t> &slots) = 0;
    virtual void give_up(int64_t layer, std::vector<int32_t> &slots) = 0;
    virtual int64_t queued_bytes() = 0;
    virtual int drain() = 0;
    virtual void close() = 0;
    virtual int follow() { return FLOE_OK; }

    void moved(int64_t *bytes, double *busy) {
        const std::lock_guard<std::mutex> lock(mutex_);
        *bytes = queue_.bytes_moved;
        *busy = queue_.busy_s;
    }

    std::vector<int64_t> under_way(int64_t layer, const uint8_t *marks) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<int64_t> numbers;
        queue_.under_way(layer, marks, numbers);
        return numbers;
    }

    // These rows of a transfer to a pool stay there; it is not known to have arrived.
    int stay(int64_t number, int64_t count, const int32_t *slots) {
        const std::lock_guard<std::mutex> lock(mutex_);
        Transfer *const transfer = queue_.find(number);
        if (transfer == nullptr) return FLOE_BAD_INDEX;
        try {
            transfer->stay.assign(slots, slots + count);
        } catch (const std::bad_alloc &) {
            return FLOE_NO_MEMORY;
        }
        return FLOE_OK;
    }

    // Why it takes no transfers; of a link that has ended.
    const char *failure() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return failure_.empty() ? "the link is closed" : failure_.c_str();
    }

  protected:
    const int pack_threads_;
    std::mutex mutex_; // held while the queue is read or changed
    LinkQueue queue_;
    std::string failure_; // set once
};

// These throw std::bad_alloc and std::system_error.
std::shared_ptr<Link> make_virtual_link(const floe_link_config &config);
std::shared_ptr<Link> make_throttled_link(const floe_link_config &config);
std::shared_ptr<Link> make_cuda_link(const floe_link_config &config);
// nullptr where the system cannot read so.
std::shared_ptr<Link> make_disk_link(const floe_link_config &config);

// The link of a handle; nullptr for a handle that is stale, or of the process that this one was forked from.
std::shared_ptr<Link> link_of(int64_t handle);

} // namespace floe
