#include "thread_pool.h"
#include "spin.h"

#include <condition_variable>
#include <mutex>
#include <system_error>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace floe {

std::atomic<int> computing{0};

int core_count() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    return (int)std::thread::hardware_concurrency();
}

// Each worker has a run of neighbouring items for itself, and then helps the others with theirs: memory is read fastest
// in order, and what lies behind an item has often been fetched with it.
struct Job {
    Work work;
    void *context;
    int64_t items;
    int limit;                              // workers, and runs
    std::atomic<int64_t> next[kMaxThreads]; // of each run
    std::atomic<int> helpers{0};            // that still look at this job. Changed under the pool's mutex, as is:
    uint64_t lanes = 1;                     // worker numbers in use, as bits; the caller is 0
    Job *other = nullptr;                   // the next of the pool's jobs

    Job(int threads, int64_t items, Work work, void *context)
        : work(work), context(context), items(items), limit(threads) {
        for (int run = 0; run < limit; run++) next[run].store(first(run), std::memory_order_relaxed);
    }

    // One run ends where the next one begins.
    int64_t first(int run) const { return items * run / limit; }

    bool is_left(int run) const { return next[run].load(std::memory_order_relaxed) < first(run + 1); }

    // The worker's next item, or -1 if none is left.
    int64_t take(int worker) {
        for (int i = 0; i < limit; i++) {
            const int run = (worker + i) % limit;
            if (!is_left(run)) continue;
            const int64_t item = next[run].fetch_add(1, std::memory_order_relaxed);
            if (item < first(run + 1)) return item;
        }
        return -1;
    }

    bool takes_more() const {
        if (helpers + 1 >= limit) return false;
        for (int run = 0; run < limit; run++)
            if (is_left(run)) return true;
        return false;
    }
};

namespace {

// Longer than what lies between two operations of a decode step, since to wake a thread that sleeps takes about as
// long.
constexpr std::chrono::microseconds kSpin{300};

// While work is done, numbers below 1.2e-38 count as zero: the states of a recurrence decay to there, and each
// operation on such a number would take a processor some hundred cycles.
class WithoutDenormals {
#if defined(__x86_64__) || defined(_M_X64)
    const unsigned before_ = _mm_getcsr();

  public:
    WithoutDenormals() { _mm_setcsr(before_ | 0x8040); } // results (FTZ) and operands (DAZ)
    ~WithoutDenormals() { _mm_setcsr(before_); }
    WithoutDenormals(const WithoutDenormals &) = delete;
    WithoutDenormals &operator=(const WithoutDenormals &) = delete;
#endif
};

// A thread that computes while it lives.
class Computing {
  public:
    Computing() { computing.fetch_add(1, std::memory_order_relaxed); }
    ~Computing() { computing.fetch_sub(1, std::memory_order_relaxed); }
    Computing(const Computing &) = delete;
    Computing &operator=(const Computing &) = delete;
};

static_assert(kMaxThreads <= 64, "a lane is a bit of Job::lanes");

// Until there are no more items, or until `leave`.
template <class Leave> void take_items(Job &job, int worker, Leave leave) {
    [[maybe_unused]] const WithoutDenormals here;
    const Computing counted;
    do {
        const int64_t item = job.take(worker);
        if (item < 0) return;
        job.work(job.context, item, worker);
    } while (!leave());
}

void take_all(Job &job) {
    take_items(job, 0, [] { return false; });
}

class Pool {
  public:
    void run(Job &job) {
        announce(job);
        finish(job);
    }

    // What was announced.
    void finish(Job &job) {
        take_all(job);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            remove(job); // nobody joins any more
            if (job.helpers == 0) return;
        }
        if (spin_until(kSpin, [&] { return job.helpers.load(std::memory_order_acquire) == 0; })) {
            std::lock_guard<std::mutex> lock(mutex_); // the last helper has let go of the job
            return;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait(lock, [&] { return job.helpers == 0; });
    }

    void announce(Job &job) {
        bool asleep;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (helpers_ < job.limit - 1 && start_helper()) {}
            job.other = jobs_;
            jobs_ = &job;
            asleep = changed();
        }
        if (asleep) wake_.notify_all();
    }

  private:
    void remove(const Job &job) {
        Job **at = &jobs_;
        while (*at != &job) at = &(*at)->other;
        *at = job.other;
        if (jobs_ != nullptr && changed()) wake_.notify_all(); // its lanes are free for the others
    }

    // Has every helper look again at what there is to do; whether some of them sleep.
    bool changed() {
        generation_.fetch_add(1, std::memory_order_release);
        return sleeping_ > 0;
    }

    // The job with the fewest lanes, if there are fewer lanes in all than the widest job asks for.
    Job *neediest() const {
        Job *found = nullptr;
        int lanes = 0, widest = 0;
        for (Job *job = jobs_; job != nullptr; job = job->other) {
            lanes += 1 + job->helpers;
            widest = job->limit > widest ? job->limit : widest;
            if (job->takes_more() && (found == nullptr || job->helpers < found->helpers)) found = job;
        }
        return lanes < widest ? found : nullptr;
    }

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
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            const uint64_t seen = generation_.load(std::memory_order_relaxed);
            const auto is_new = [&] { return generation_.load(std::memory_order_acquire) != seen; };
            if (Job *job = neediest()) {
                int lane = 1;
                while (job->lanes >> lane & 1) lane++;
                job->lanes |= (uint64_t)1 << lane;
                job->helpers++;
                lock.unlock();
                take_items(*job, lane, is_new); // another caller may need this thread more
                lock.lock();
                job->lanes &= ~((uint64_t)1 << lane);
                if (--job->helpers == 0) done_.notify_all();
                continue;
            }
            lock.unlock();
            spin_until(kSpin, is_new);
            lock.lock();
            sleeping_++;
            wake_.wait(lock, is_new);
            sleeping_--;
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<uint64_t> generation_{0}; // of the jobs there are
    Job *jobs_ = nullptr;                 // of all callers
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
    const int limit = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    Job job(limit > items ? items < 1 ? 1 : (int)items : limit, items, work, context);
    if (job.limit == 1) return take_all(job);
    pool().run(job);
}

Begun::Begun() = default;

Begun::~Begun() {
    if (started_) join();
}

void Begun::start(int threads, int64_t items, Work work, void *context) {
    job_ = std::make_unique<Job>(threads < 2 ? 2 : threads < kMaxThreads ? threads : kMaxThreads, items, work, context);
    pool().announce(*job_);
    started_ = true;
}

void Begun::join() {
    pool().finish(*job_);
    started_ = false;
}

} // namespace floe
