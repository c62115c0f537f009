#include "thread_pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#define FLOE_PAUSE() _mm_pause()
#else
#define FLOE_PAUSE() std::this_thread::yield()
#endif

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace floe {
namespace {

// Longer than what lies between two operations of a decode step, since to wake a thread that sleeps takes about as long.
constexpr std::chrono::microseconds kSpin{300};

struct Job {
    Work work;
    void *context;
    int64_t items;
    int limit;
    std::atomic<int64_t> next{0};
    int joined = 1;  // worker numbers given out; the caller is 0. Guarded by the pool's mutex, as is:
    int running = 0; // helpers that still look at this job
};

void take_items(Job &job, int worker) {
    for (;;) {
        const int64_t item = job.next.fetch_add(1, std::memory_order_relaxed);
        if (item >= job.items) return;
        job.work(job.context, item, worker);
    }
}

// Spins until `ready` or until the bound has passed.
template <class Ready> bool spin_until(Ready ready) {
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < 32; i++) {
            if (ready()) return true;
            FLOE_PAUSE();
        }
    } while (std::chrono::steady_clock::now() < end);
    return ready();
}

class Pool {
  public:
    void run(Job &job) {
        std::unique_lock<std::mutex> turn(serial_, std::try_to_lock);
        if (!turn.owns_lock()) return take_items(job, 0);
        bool asleep;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (helpers_ < job.limit - 1 && start_helper()) {}
            job_ = &job;
            generation_.fetch_add(1, std::memory_order_release);
            asleep = sleeping_ > 0;
        }
        if (asleep) wake_.notify_all();
        take_items(job, 0);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = nullptr; // nobody joins any more
            running_.store(job.running, std::memory_order_relaxed);
            if (job.running == 0) return;
        }
        if (spin_until([&] { return running_.load(std::memory_order_acquire) == 0; })) {
            std::lock_guard<std::mutex> lock(mutex_); // the last helper has let go of the job
            return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return job.running == 0; });
    }

  private:
    bool start_helper() {
        try {
            std::thread([this] { help(); }).detach();
        } catch (const std::system_error &) {
            return false; // fewer threads than asked for, the same result
        }
        helpers_++;
        return true;
    }

    void help() {
        uint64_t seen = 0;
        for (;;) {
            spin_until([&] { return generation_.load(std::memory_order_acquire) != seen; });
            std::unique_lock<std::mutex> lock(mutex_);
            while (generation_.load(std::memory_order_relaxed) == seen) {
                sleeping_++;
                wake_.wait(lock);
                sleeping_--;
            }
            seen = generation_.load(std::memory_order_relaxed);
            Job *job = job_;
            if (job == nullptr || job->joined >= job->limit) continue;
            const int worker = job->joined++;
            job->running++;
            lock.unlock();
            take_items(*job, worker);
            lock.lock();
            running_.store(--job->running, std::memory_order_release);
            if (job->running == 0) done_.notify_one();
        }
    }

    std::mutex serial_; // one job at a time
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> running_{0}; // of the job that its caller waits for
    Job *job_ = nullptr;
    int helpers_ = 0, sleeping_ = 0;
};

std::atomic<Pool *> current{nullptr};

Pool &pool() {
    static const bool once = [] {
        current = new Pool;
#if defined(__unix__) || defined(__APPLE__)
        // The child has none of the threads and perhaps a held lock: it forgets the pool and starts another.
        pthread_atfork(nullptr, nullptr, [] { current = new Pool; });
#endif
        return true;
    }();
    (void)once;
    return *current;
}

} // namespace

void parallel_for(int threads, int64_t items, Work work, void *context) {
    Job job;
    job.work = work;
    job.context = context;
    job.items = items;
    job.limit = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    if (job.limit > items) job.limit = items < 1 ? 1 : (int)items;
    if (job.limit == 1) return take_items(job, 0);
    pool().run(job);
}

} // namespace floe
