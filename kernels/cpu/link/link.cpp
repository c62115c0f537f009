// The C interface of links: handles, and checks of arguments.
#include "link/link.h"
#include "src/marks.h"

#include <cmath>
#include <system_error>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace floe {
namespace {

// Handles are never used again, so a stale one finds nothing.
struct Table {
    std::mutex mutex;
    std::unordered_map<int64_t, std::shared_ptr<Link>> links;
};

std::atomic<int64_t> last_handle{0};
std::atomic<Table *> current{nullptr};

Table &table() {
    static const bool once = [] {
        current = new Table; // never destroyed: a link's thread may outlive the program's last statement
#if defined(__unix__) || defined(__APPLE__)
        // The child has none of the links' threads and perhaps a held lock: it forgets its parent's links.
        pthread_atfork(nullptr, nullptr, [] { current = new Table; });
#endif
        return true;
    }();
    (void)once;
    return *current;
}

// Runs `use` on a handle's link.
template <class Use> auto with(int64_t handle, Use use) -> decltype(use(*link_of(handle))) {
    const std::shared_ptr<Link> link = link_of(handle);
    if (link == nullptr) return FLOE_BAD_INDEX;
    try {
        return use(*link);
    } catch (const std::bad_alloc &) {
        return FLOE_NO_MEMORY;
    }
}

// FLOE_OK if these slots are named once each. A thread's own variable may not stand in a function that a DLL exports.
int named_once(const int32_t *slots, int64_t count, int64_t capacity) {
    thread_local Marks marks;
    return marks.once(slots, count, capacity);
}

std::shared_ptr<Link> make(const floe_link_config &config) {
    if (config.kind == FLOE_LINK_CUDA) return make_cuda_link(config);
    if (config.kind == FLOE_LINK_DISK) return make_disk_link(config);
    return config.kind == FLOE_LINK_THROTTLED ? make_throttled_link(config) : make_virtual_link(config);
}

int check(const floe_link_config &config) {
    const bool timed = config.kind == FLOE_LINK_VIRTUAL || config.kind == FLOE_LINK_THROTTLED;
    if (config.kind < FLOE_LINK_NONE || config.kind > FLOE_LINK_DISK) return FLOE_UNSUPPORTED;
    if (config.row_bytes < 1 || config.row_bytes % 64 || config.chunk < 1 || config.pack_threads < 1)
        return FLOE_BAD_SHAPE;
    if (config.chunk > (INT64_MAX >> 16) / config.row_bytes) return FLOE_BAD_SHAPE;
    if (timed && (!(config.rate > 0) || !(config.latency >= 0) || std::isinf(config.latency))) return FLOE_BAD_SHAPE;
    if (config.kind == FLOE_LINK_VIRTUAL && config.clock == nullptr) return FLOE_BAD_SHAPE;
    if (config.kind == FLOE_LINK_CUDA) {
        if (config.driver == nullptr || config.lanes == nullptr || config.stall_count < 0) return FLOE_BAD_SHAPE;
        if (config.stall_count && config.stalls == nullptr) return FLOE_BAD_SHAPE;
        if (config.head % 64 || config.head / 8 < 4 + config.chunk) return FLOE_BAD_SHAPE;
    }
    if (config.kind == FLOE_LINK_DISK && (config.extents == nullptr || config.extent_count < 1 || config.readers < 1 ||
                                          config.gap < 0 || config.sector < 1 || config.sector > (1 << 20)))
        return FLOE_BAD_SHAPE;
    if (config.gate != nullptr && (config.gate->capacity < 0 || config.gate->chunks == nullptr)) return FLOE_BAD_SHAPE;
    return FLOE_OK;
}

bool in_range(const int32_t *index, int64_t count, int64_t end) {
    const int32_t last = end > INT32_MAX ? INT32_MAX : (int32_t)(end - 1);
    bool all = true;
    for (int64_t i = 0; i < count; i++) all &= index[i] >= 0 && index[i] <= last;
    return all;
}

} // namespace

std::shared_ptr<Link> link_of(int64_t handle) {
    Table &all = table();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.links.find(handle);
    return found == all.links.end() ? nullptr : found->second;
}

} // namespace floe

using namespace floe;

int64_t floe_link_open(const floe_link_config *config) {
    if (const int error = check(*config)) return error;
    try {
        std::shared_ptr<Link> link = make(*config);
        if (link == nullptr) return FLOE_UNSUPPORTED;
        Table &all = table();
        const std::lock_guard<std::mutex> lock(all.mutex);
        const int64_t handle = ++last_handle;
        all.links[handle] = std::move(link);
        return handle;
    } catch (const std::bad_alloc &) {
        return FLOE_NO_MEMORY;
    } catch (const std::system_error &) {
        return FLOE_UNSUPPORTED; // no thread can be started
    }
}

int64_t floe_link_submit(int64_t link, const uint8_t *source, int64_t rows, uint8_t *target, int64_t capacity,
                         int64_t count, const int32_t *index, const int32_t *slots, int urgent, double score,
                         int64_t layer) {
    return with(link, [&](Link &it) -> int64_t {
        const bool full = source != nullptr && target != nullptr;
        if (rows < 0 || capacity < 0 || count < 0 || std::isnan(score)) return FLOE_BAD_SHAPE;
        if (count && !full && (source != nullptr || target != nullptr)) return FLOE_BAD_SHAPE;
        if (!in_range(index, count, rows) || !in_range(slots, count, capacity)) return FLOE_BAD_INDEX;
        if (const int error = count ? named_once(slots, count, capacity) : FLOE_OK) return error;
        auto transfer = std::make_unique<Transfer>();
        transfer->source = source;
        transfer->target = target;
        transfer->index.assign(index, index + count);
        transfer->slots.assign(slots, slots + count);
        transfer->urgent = urgent != 0;
        transfer->score = score;
        transfer->layer = layer;
        return it.submit(std::move(transfer));
    });
}

int floe_link_wait(int64_t link, int64_t transfer, const floe_stop *stop, double *seconds) {
    return with(link, [&](Link &it) { return it.wait(transfer, stop, seconds); });
}

int64_t floe_link_finished(int64_t link, int64_t most, int64_t *transfers) {
    if (most < 0) return FLOE_BAD_SHAPE;
    return with(link, [&](Link &it) { return it.finished(most, transfers); });
}

int64_t floe_link_drop(int64_t link, int64_t layer, int64_t most, int64_t *transfers) {
    if (most < 0) return FLOE_BAD_SHAPE;
    return with(link, [&](Link &it) { return it.drop(layer, most, transfers); });
}

int64_t floe_link_queued(int64_t link) {
    return with(link, [](Link &it) { return it.queued_bytes(); });
}

int floe_link_moved(int64_t link, int64_t *bytes, double *busy) {
    return with(link, [&](Link &it) -> int {
        it.moved(bytes, busy);
        return FLOE_OK;
    });
}

int floe_link_drain(int64_t link) {
    return with(link, [](Link &it) { return it.drain(); });
}

int floe_link_follow(int64_t link) {
    return with(link, [](Link &it) { return it.follow(); });
}

int floe_link_close(int64_t link) {
    return with(link, [](Link &it) -> int {
        it.close();
        return FLOE_OK;
    });
}

int floe_link_free(int64_t link) {
    const int closed = floe_link_close(link);
    Table &all = table();
    std::shared_ptr<Link> freed; // destroyed without the lock
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.links.find(link);
    if (found == all.links.end()) return FLOE_BAD_INDEX;
    freed = std::move(found->second);
    all.links.erase(found);
    return closed;
}

const char *floe_link_failure(int64_t link) {
    const std::shared_ptr<Link> found = link_of(link);
    return found == nullptr ? nullptr : found->failure();
}
