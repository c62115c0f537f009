// A stand-in for the GPU's driver, in RAM: streams are queues of work that a test lets run, and what it does is noted.
//
// A stream runs its work in order on `run`, up to an event that has not passed. Launching a graph does what land_kernel
// (kernels/triton/moving.py) does with a lane. Each card has a context with a default stream, number 0 of whichever is
// the calling thread's; without one nothing works, and an event is recorded on streams of its own context alone.
#include <stdint.h>
#include <string.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Work {
    std::function<bool()> ready; // whether it may run
    std::function<void()> run;
};

struct Stream {
    int64_t context;
    std::deque<Work> work;
};

struct Event {
    int64_t context, recorded = 0, passed = 0; // how many times
    double at = 0;
};

struct Graph {
    uint8_t *lane;
    int64_t chunk, head, row_bytes, in_place;
};

std::mutex mutex;
std::condition_variable changed;
std::deque<Stream> streams;
std::deque<Event> events;
std::deque<Graph> graphs;
std::vector<int64_t>
    noted; // pairs: what (1 copy, 2 launch, 3 record, 4 wait, 5 synchronize), and on which stream or event
int64_t failing = 0, until_failure = -1, pinned_from = 0, pinned_to = 0;
std::map<int64_t, int64_t> defaults;        // each context's default stream
thread_local std::vector<int64_t> contexts; // the calling thread's, the current one last
double now = 0;
bool running = false;

int64_t current() { return contexts.empty() ? 0 : contexts.back(); }

int64_t number_of(int64_t stream) { return stream == 0 ? defaults[current()] : stream; }

// The driver's answer to a call; the lock is held.
int answered(int64_t what, int64_t where) {
    if (current() == 0) return 201;
    noted.push_back(what);
    noted.push_back(where);
    if (failing == what && until_failure-- <= 0) return 719;
    return 0;
}

bool advance() {
    bool moved = false;
    for (Stream &stream : streams)
        while (!stream.work.empty() && stream.work.front().ready()) {
            stream.work.front().run();
            stream.work.pop_front();
            moved = true;
        }
    return moved;
}

void advance_all() {
    while (running && advance()) {}
    changed.notify_all();
}

bool always() { return true; }

void land(const Graph &graph) {
    int64_t words[3];
    memcpy(words, graph.lane, sizeof words);
    const int32_t *const slots = (const int32_t *)(graph.lane + 32), *const index = slots + graph.chunk;
    for (int64_t i = 0; i < words[0]; i++) {
        const uint8_t *const from = graph.in_place ? (const uint8_t *)words[2] + index[i] * graph.row_bytes
                                                   : graph.lane + graph.head + i * graph.row_bytes;
        memcpy((uint8_t *)words[1] + slots[i] * graph.row_bytes, from, (size_t)graph.row_bytes);
    }
}

} // namespace

EXPORT int64_t fake_stream(int64_t context) {
    const std::lock_guard<std::mutex> lock(mutex);
    streams.push_back({context, {}});
    return (int64_t)streams.size();
}

// A context; its default stream.
EXPORT int64_t fake_card(int64_t context) { return defaults[context] = fake_stream(context); }

EXPORT int64_t fake_event(int64_t context) {
    const std::lock_guard<std::mutex> lock(mutex);
    events.push_back({context});
    return (int64_t)events.size();
}

EXPORT int64_t fake_graph(uint8_t *lane, int64_t chunk, int64_t head, int64_t row_bytes, int64_t in_place) {
    const std::lock_guard<std::mutex> lock(mutex);
    graphs.push_back({lane, chunk, head, row_bytes, in_place});
    return (int64_t)graphs.size();
}

// From now on streams run what they are given, or keep it.
EXPORT void fake_run(int on) {
    const std::lock_guard<std::mutex> lock(mutex);
    running = on != 0;
    advance_all();
}

// `what` fails after so many calls that do not.
EXPORT void fake_fail(int64_t what, int64_t after) {
    const std::lock_guard<std::mutex> lock(mutex);
    failing = what;
    until_failure = after;
}

EXPORT void fake_pin(int64_t from, int64_t to) {
    const std::lock_guard<std::mutex> lock(mutex);
    pinned_from = from;
    pinned_to = to;
}

EXPORT int64_t fake_noted(int64_t most, int64_t *out) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (int64_t i = 0; i < most && i < (int64_t)noted.size(); i++) out[i] = noted[(size_t)i];
    return (int64_t)noted.size();
}

EXPORT int64_t fake_context(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    return current();
}

EXPORT void fake_reset(void) {
    const std::lock_guard<std::mutex> lock(mutex);
    streams.clear();
    events.clear();
    graphs.clear();
    noted.clear();
    defaults.clear();
    contexts.clear();
    failing = pinned_from = pinned_to = 0;
    until_failure = -1;
    running = false;
}

EXPORT int fake_set_context(int64_t given) {
    const std::lock_guard<std::mutex> lock(mutex);
    contexts = {given};
    return answered(6, given);
}

EXPORT int fake_push(int64_t context) {
    contexts.push_back(context);
    return 0;
}

EXPORT int fake_pop(int64_t *context) {
    *context = current();
    contexts.pop_back();
    return 0;
}

EXPORT int fake_copy(int64_t there, const void *here, size_t bytes, int64_t stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const int code = answered(1, stream)) return code;
    // As late as a card would read it: a lane that is packed again too early is found out.
    streams[(size_t)stream - 1].work.push_back({always, [=] { memcpy((void *)there, here, bytes); }});
    advance_all();
    return 0;
}

EXPORT int fake_launch(int64_t graph, int64_t stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (const int code = answered(2, stream)) return code;
    const Graph what = graphs[(size_t)graph - 1];
    streams[(size_t)stream - 1].work.push_back({always, [=] { land(what); }});
    advance_all();
    return 0;
}

EXPORT int fake_record(int64_t event, int64_t stream) {
    const std::lock_guard<std::mutex> lock(mutex);
    stream = number_of(stream);
    if (const int code = answered(3, stream)) return code;
    if (events[(size_t)event - 1].context != streams[(size_t)stream - 1].context) return 400;
    Event &it = events[(size_t)event - 1];
    const int64_t turn = ++it.recorded;
    streams[(size_t)stream - 1].work.push_back({always, [&it, turn] {
                                                    it.passed = turn;
                                                    it.at = now += 0.25;
                                                }});
    advance_all();
    return 0;
}

EXPORT int fake_wait(int64_t stream, int64_t event, unsigned) {
    const std::lock_guard<std::mutex> lock(mutex);
    stream = number_of(stream);
    if (const int code = answered(4, stream)) return code;
    const Event &it = events[(size_t)event - 1];
    const int64_t turn = it.recorded;
    streams[(size_t)stream - 1].work.push_back({[&it, turn] { return it.passed >= turn; }, [] {}});
    advance_all();
    return 0;
}

EXPORT int fake_query(int64_t event) {
    const std::lock_guard<std::mutex> lock(mutex);
    const Event &it = events[(size_t)event - 1];
    return it.passed == it.recorded ? 0 : 600;
}

EXPORT int fake_synchronize(int64_t event) {
    std::unique_lock<std::mutex> lock(mutex);
    if (const int code = answered(5, event)) return code;
    const Event &it = events[(size_t)event - 1];
    changed.wait(lock, [&] { return it.passed == it.recorded; });
    return 0;
}

EXPORT int fake_elapsed(float *milliseconds, int64_t before, int64_t after) {
    const std::lock_guard<std::mutex> lock(mutex);
    *milliseconds = (float)(1e3 * (events[(size_t)after - 1].at - events[(size_t)before - 1].at));
    return 0;
}

EXPORT int fake_address(int64_t *found, int attribute, const void *pointer) {
    const std::lock_guard<std::mutex> lock(mutex);
    const int64_t at = (int64_t)pointer;
    if (current() == 0 || attribute != 3 || at < pinned_from || at >= pinned_to) return 1;
    *found = at;
    return 0;
}

EXPORT int fake_text(int code, const char **text) {
    *text = code == 719 ? "the card is gone" : code == 400 ? "invalid handle" : code == 201 ? "no context" : nullptr;
    return 0;
}
