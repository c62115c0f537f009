// Callers of the thread pool at the same time: prints how many lanes each had, and every promise that was broken.
#include "thread_pool.h"

#include <stdio.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 4;
std::atomic<int> broken{0};

// A caller's work: each item once, and a worker number never twice at a time.
struct Caller {
    int64_t items;
    std::unique_ptr<std::atomic<int>[]> done;
    std::atomic<bool> busy[kThreads] = {};
    std::atomic<int> inside{0}, most{0};

    explicit Caller(int64_t items) : items(items), done(new std::atomic<int>[items]()) {}

    template <class Within> void item(int64_t i, int worker, Within within) {
        if (busy[worker].exchange(true)) broken++;
        const int lanes = ++inside;
        for (int before = most; before < lanes && !most.compare_exchange_weak(before, lanes);) {}
        within();
        inside--;
        busy[worker] = false;
        done[i]++;
    }

    void check() const {
        for (int64_t i = 0; i < items; i++) broken += done[i] != 1;
    }
};

// Two long jobs that begin together, with far more items than it takes until both have had two lanes.
struct Pair {
    Caller callers[2] = {Caller(400000), Caller(400000)};
    std::atomic<int> begun{0};
    std::atomic<bool> ended{false};
};

struct Side {
    Pair *pair;
    int which;
    std::atomic<bool> begun{false};
};

void pair_item(void *context, int64_t i, int worker) {
    Side &side = *(Side *)context;
    Pair &pair = *side.pair;
    pair.callers[side.which].item(i, worker, [&] {
        if (pair.ended.load(std::memory_order_relaxed)) return;
        if (!side.begun.exchange(true)) pair.begun++;
        while (pair.begun < 2) std::this_thread::yield();
        std::this_thread::yield();
        if (pair.callers[0].most > 1 && pair.callers[1].most > 1) pair.ended = true;
    });
}

void short_item(void *context, int64_t i, int worker) {
    ((Caller *)context)->item(i, worker, [] {});
}

} // namespace

int main() {
    // Many short jobs of three callers, of which one alone fills the pool, and of one that lets others begin.
    std::vector<std::thread> threads;
    for (int caller = 0; caller < 3; caller++)
        threads.emplace_back([caller] {
            for (int round = 0; round < 100; round++) {
                Caller work(1 + (round * 7 + caller) % 40);
                floe::parallel_for(2 + caller, work.items, short_item, &work);
                work.check();
            }
        });
    threads.emplace_back([] {
        floe::Begun begun;
        for (int round = 0; round < 100; round++) {
            Caller work(1 + round % 40);
            begun.start(kThreads - round % 4, work.items, short_item, &work);
            if (round % 3) std::this_thread::yield();
            begun.join();
            work.check();
        }
        Caller left(5);
        floe::Begun forgotten; // joins when it goes
        forgotten.start(2, left.items, short_item, &left);
    });
    for (std::thread &thread : threads) thread.join();

    Pair pair;
    Side sides[2] = {{&pair, 0}, {&pair, 1}};
    std::thread other([&] { floe::parallel_for(kThreads, pair.callers[1].items, pair_item, &sides[1]); });
    floe::parallel_for(kThreads, pair.callers[0].items, pair_item, &sides[0]);
    other.join();
    for (const Caller &caller : pair.callers) caller.check();
    printf("%d %d %d\n", pair.callers[0].most.load(), pair.callers[1].most.load(), broken.load());
    return 0;
}
