// A throttled link used by several threads at once: prints how many transfers finished and were dropped, and every
// promise that was broken.
#include "link/link.h"
#include "src/expert_ops.h"

#include <stdio.h>
#include <string.h>

#include <random>
#include <thread>

namespace floe {

const RowOps &row_ops() {
    static const RowOps ops = [] {
        RowOps made = {};
        made.copy = [](uint8_t *const *to, const uint8_t *const *from, const uint8_t *const *, int count,
                       int64_t bytes) {
            for (int r = 0; r < count; r++) memcpy(to[r], from[r], (size_t)bytes);
        };
        return made;
    }();
    return ops;
}

} // namespace floe

namespace {

constexpr int64_t kRow = 128, kRows = 900, kSlots = 4000;
std::atomic<int> broken{0};
int finished = 0, dropped = 0;

void expect(bool held) { broken += !held; }

struct Sent {
    int64_t number;
    std::vector<int32_t> index, slots;
};

struct Engine {
    const std::vector<uint8_t> &source;
    std::vector<uint8_t> target = std::vector<uint8_t>((size_t)(kSlots * kRow), 0xA5);
    std::vector<Sent> sent;
    std::mt19937 random;
    int64_t link;
    int32_t free = 0; // slots from here on

    Engine(const std::vector<uint8_t> &source, int64_t link, int seed) : source(source), random(seed), link(link) {}

    int64_t draw(int64_t below) { return (int64_t)(random() % (uint64_t)below); }

    int64_t submit(int64_t count) {
        Sent one{0, {}, {}};
        for (int64_t i = 0; i < count; i++) {
            one.index.push_back((int32_t)draw(kRows));
            one.slots.push_back(free++);
        }
        one.number = floe_link_submit(link, source.data(), kRows, target.data(), kSlots, count, one.index.data(),
                                      one.slots.data(), draw(3) == 0, (double)draw(5), draw(3));
        if (one.number > 0) sent.push_back(one);
        return one.number;
    }

    bool there(const Sent &one) const {
        for (size_t i = 0; i < one.index.size(); i++)
            if (memcmp(target.data() + one.slots[i] * kRow, source.data() + one.index[i] * kRow, (size_t)kRow))
                return false;
        return true;
    }

    void take(int64_t (*call)(int64_t, int64_t *), bool landed) {
        int64_t numbers[8];
        for (int64_t count = 8; count == 8;) {
            count = call(link, numbers);
            for (int64_t i = 0; i < count; i++) {
                size_t at = 0;
                while (at < sent.size() && sent[at].number != numbers[i]) at++;
                expect(at < sent.size());
                if (at == sent.size()) continue;
                expect(!landed || there(sent[at]));
                sent.erase(sent.begin() + (long)at);
                landed ? finished++ : dropped++;
            }
        }
    }

    void take_finished() {
        take([](int64_t link, int64_t *numbers) { return floe_link_finished(link, 8, numbers); }, true);
    }

    void work(const floe_stop *stop) {
        for (int turn = 0; turn < 60; turn++) {
            if (free + 60 <= kSlots) expect(submit(draw(60)) > 0);
            double seconds = -1;
            if (!sent.empty() && turn % 3 == 0) {
                const Sent wanted = sent[(size_t)draw((int64_t)sent.size())];
                const int code = floe_link_wait(link, wanted.number, turn % 2 ? stop : nullptr, &seconds);
                expect((code == FLOE_OK && there(wanted)) || (code == FLOE_STOPPED && turn % 2));
                expect(seconds >= 0);
            }
            if (turn % 7 == 0)
                take([](int64_t link, int64_t *numbers) { return floe_link_drop(link, 1, 8, numbers); }, false);
            expect(floe_link_queued(link) >= 0);
            take_finished();
        }
    }
};

// One thread works, another looks at it and raises its stop; then the link ends normally, or while it is busy.
void run(int seed, bool busy) {
    std::vector<uint8_t> source((size_t)(kRows * kRow));
    std::mt19937 random((unsigned)seed);
    for (uint8_t &byte : source) byte = (uint8_t)random();
    floe_link_config config = {};
    config.kind = FLOE_LINK_THROTTLED;
    config.pack_threads = 2;
    config.row_bytes = kRow;
    config.chunk = 7;
    config.rate = busy ? 4e6 : 1e9;
    const int64_t link = floe_link_open(&config);
    expect(link > 0);
    Engine engine(source, link, seed);
    floe_stop stop = {};
    std::atomic<bool> over{false};
    std::thread beside([&] {
        int64_t bytes = 0;
        for (double busy_s = 0; !over; std::this_thread::sleep_for(std::chrono::microseconds(300))) {
            expect(floe_link_moved(link, &bytes, &busy_s) == FLOE_OK && bytes >= 0 && busy_s >= 0);
            floe::shared(stop.raised) = bytes / 100000 % 2 ? 1 : 0;
        }
    });
    engine.work(&stop);
    over = true;
    beside.join();
    double seconds;
    if (busy) {
        const int64_t last = engine.submit(40);
        std::thread waiter([&] {
            const int code = floe_link_wait(link, last, nullptr, &seconds);
            expect(code == FLOE_OK || code == FLOE_LINK_FAILED);
        });
        std::thread closer([&] { floe_link_close(link); });
        expect(floe_link_close(link) == FLOE_OK);
        waiter.join();
        closer.join();
        expect(engine.submit(1) == FLOE_LINK_FAILED);
    } else {
        expect(floe_link_drain(link) == FLOE_OK && floe_link_queued(link) == 0);
    }
    engine.take_finished();
    expect(busy || engine.sent.empty());
    const std::vector<uint8_t> left = engine.target;
    expect(floe_link_free(link) == FLOE_OK && floe_link_free(link) == FLOE_BAD_INDEX);
    expect(left == engine.target);
    expect(floe_link_wait(link, 1, nullptr, &seconds) == FLOE_BAD_INDEX && floe_link_failure(link) == nullptr);
}

} // namespace

int main() {
    for (int seed = 0; seed < 6; seed++) run(seed, seed % 2);
    printf("%d %d %d\n", finished, dropped, broken.load());
    return 0;
}
