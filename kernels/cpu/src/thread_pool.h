// A small pool of threads for work of a millisecond.
//
// Items of one job are handed out one by one, so a thread that the system delays takes fewer of them, but neighbouring
// ones to one thread as long as there are some. Between jobs a thread spins for some microseconds, then sleeps: it
// never holds a core while others want it. Threads are detached and the pool is never destroyed, so nothing waits for
// them at exit; after fork the child starts a pool of its own.
#pragma once

#include <stdint.h>

#include <memory>

namespace floe {

// item: 0..items-1. worker: 0..threads-1, no two at the same time with one number.
using Work = void (*)(void *context, int64_t item, int worker);

constexpr int kMaxThreads = 64;

// Calls work(context, i, worker) for every item with at most `threads` threads, the caller among them, and returns
// when all are done. Several callers at once share the threads evenly: after each item a thread goes where fewer are,
// and no more threads run than the caller with the most asked for (or than there are callers).
void parallel_for(int threads, int64_t items, Work work, void *context);

struct Job;

// Work that other threads begin while its caller does something else. `join` lends a hand, and returns when all is
// done; the caller counts as one of the threads meanwhile, but there is always another one. One thread's.
class Begun {
  public:
    Begun();
    ~Begun();
    Begun(const Begun &) = delete;
    Begun &operator=(const Begun &) = delete;

    // After a `join`, or for the first time. Workers are numbered up to max(threads, 2) - 1.
    void start(int threads, int64_t items, Work work, void *context);
    void join();
    bool started() const { return started_; }

  private:
    std::unique_ptr<Job> job_;
    bool started_ = false;
};

} // namespace floe
