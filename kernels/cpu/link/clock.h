// Virtual time: `floe_clock`, with the arithmetic of engine/offload/virtual/virtual_clock.py.
#pragma once

#include "floe_offload.h"

#include <algorithm>
#include <time.h>

#if defined(_WIN32)
#define WIN32_LEAN_AND_MEAN
#define NOMINMAX
#include <windows.h>
#endif

namespace floe {

// One of the clock's lanes.
struct Lane {
    double floe_clock::*end, floe_clock::*busy;
};

constexpr Lane kHostLane{&floe_clock::host, &floe_clock::host_busy}, kGpuLane{&floe_clock::gpu, &floe_clock::gpu_busy};
constexpr Lane kCpuLane{&floe_clock::cpu, &floe_clock::cpu_busy}, kLinkLane{&floe_clock::link, &floe_clock::link_busy};

// Processor seconds of the calling thread, as Python's time.thread_time.
inline double thread_seconds() {
#if defined(_WIN32)
    FILETIME created, ended, kernel, user;
    GetThreadTimes(GetCurrentThread(), &created, &ended, &kernel, &user);
    const auto ticks = [](const FILETIME &t) { return ((int64_t)t.dwHighDateTime << 32) + t.dwLowDateTime; };
    return 1e-7 * (double)(ticks(kernel) + ticks(user));
#else
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
#endif
}

inline double thread_seconds(floe_clock &clock) {
    if (clock.ticks == nullptr) return thread_seconds();
    return clock.tick < clock.tick_count ? clock.ticks[clock.tick++] : clock.counted;
}

// Adds the host's own work up to now, if it counts.
inline void count_host(floe_clock &clock) {
    if (!clock.counting) return;
    const double before = clock.counted;
    clock.counted = thread_seconds(clock);
    clock.host += clock.counted - before;
    clock.host_busy += clock.counted - before;
}

inline double virtual_now(floe_clock &clock) {
    count_host(clock);
    return clock.host;
}

// Gives a lane work that was handed over at `asked`; returns when it ends.
inline double run_lane(floe_clock &clock, Lane lane, double seconds, double asked) {
    count_host(clock);
    clock.*lane.end = std::max(clock.*lane.end, asked) + seconds;
    clock.*lane.busy += seconds;
    return clock.*lane.end;
}

// A lane begins nothing more before `until`; returns the seconds that it idles because of that.
inline double wait_lane(floe_clock &clock, Lane lane, double until) {
    const double now = virtual_now(clock), end = clock.*lane.end;
    clock.*lane.end = std::max(end, until);
    return std::max(0.0, until - std::max(end, now));
}

// While it lives, the calling thread stands in for another lane: its own time does not count.
class Aside {
  public:
    explicit Aside(floe_clock &clock) : clock_(clock) {
        count_host(clock);
        counting_ = clock.counting;
        clock.counting = 0;
    }
    Aside(const Aside &) = delete;
    Aside &operator=(const Aside &) = delete;
    ~Aside() {
        if (!counting_) return;
        clock_.counted = thread_seconds(clock_);
        clock_.counting = counting_;
    }

  private:
    floe_clock &clock_;
    int32_t counting_;
};

} // namespace floe
