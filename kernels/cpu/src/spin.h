// Short waits for another thread without sleeping: to wake a thread that sleeps takes some 50 us.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#define FLOE_PAUSE() _mm_pause()
#elif defined(__aarch64__) && defined(__GNUC__)
#define FLOE_PAUSE() __asm__ volatile("yield")
#else
#define FLOE_PAUSE() std::this_thread::yield()
#endif

namespace floe {

// Threads that work on items of a job (thread_pool.cpp).
extern std::atomic<int> computing;

// Cores that this process may use.
int core_count();

// Whether a thread that spins takes no core from one that computes.
inline bool may_spin() {
    static const int cores = core_count();
    return cores > 1 && computing.load(std::memory_order_relaxed) < cores;
}

// Spins until `ready`, at most so long, and while it may. Returns whether it is ready.
template <class Ready> bool spin_until(std::chrono::microseconds most, Ready ready) {
    if (ready()) return true;
    const auto end = std::chrono::steady_clock::now() + most;
    while (may_spin() && std::chrono::steady_clock::now() < end)
        for (int i = 0; i < 32; i++) {
            if (ready()) return true;
            FLOE_PAUSE();
        }
    return ready();
}

} // namespace floe
