// Logits of a token, and the one drawn from them. A head in two planes is read whole only where tokens can be drawn:
// the first plane tells about how likely each is, and of those that may be likely enough the second one is added.
#include "src/buffers.h"
#include "src/expert_ops.h"
#include "src/thread_pool.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace floe {
namespace {

// Standard deviations that a first plane may be wrong by. Products of thousands of weights are spread normally.
constexpr float kSure = 8;
constexpr int64_t kCapped = 4096; // logits that a thread caps at once

// The largest of each block of logits: most blocks hold none that matters.
class Peaks {
  public:
    static int64_t blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

    // memory: room for `blocks(count)`.
    Peaks(const float *logits, int64_t count, float *memory) : logits_(logits), count_(count), peaks_(memory) {
        int32_t wrong[kLanes] = {}; // side by side, as the compiler takes them in one instruction
        for (int64_t start = 0; start < count; start += kBlock) {
            const int64_t end = start + kBlock < count ? start + kBlock : count;
            float most[kLanes];
            std::fill_n(most, kLanes, -INFINITY);
            for (int64_t i = start; i < end; i += kLanes)
                for (int64_t j = 0; j < (end - i < kLanes ? end - i : kLanes); j++) {
                    most[j] = logits[i + j] > most[j] ? logits[i + j] : most[j];
                    wrong[j] |= logits[i + j] != logits[i + j];
                }
            memory[start / kBlock] = *std::max_element(most, most + kLanes);
        }
        is_number_ = std::find(wrong, wrong + kLanes, 1) == wrong + kLanes;
    }

    // Whether there is no NaN.
    bool is_number() const { return is_number_; }

    // The first of the largest.
    int64_t best() const {
        const int64_t block = std::max_element(peaks_, peaks_ + blocks(count_)) - peaks_;
        const float *const from = logits_ + block * kBlock;
        return std::find(from, logits_ + std::min(count_, (block + 1) * kBlock), peaks_[block]) - logits_;
    }

    // use(i) for logits of at least that, in order.
    template <class Use> void each(float least, Use use) const {
        for (int64_t start = 0; start < count_; start += kBlock) {
            if (peaks_[start / kBlock] < least) continue;
            for (int64_t i = start; i < std::min(count_, start + kBlock); i++)
                if (!(logits_[i] < least)) use(i);
        }
    }

  private:
    static constexpr int64_t kBlock = 64, kLanes = 16;
    const float *logits_;
    int64_t count_;
    float *peaks_;
    bool is_number_;
};

struct Rest {
    const floe_matrix &plane;
    const Token *token;
    const int32_t *rows;
    int64_t count;
    uint8_t *scratch;
    int64_t scratch_bytes;
    float *logits;
};

// logits[row] += plane[row] · x, for a few of the rows.
void add_rows(void *opaque, int64_t item, int worker) {
    const Rest &r = *(const Rest *)opaque;
    const floe_matrix &m = r.plane;
    const int32_t *const rows = r.rows + item * kBatch;
    const int count = (int)std::min<int64_t>(r.count - item * kBatch, kBatch);
    const int64_t bytes = code_bytes(m.row);
    Stored w[kBatch];
    Ahead ahead[kBatch];
    float out[kBatch][kBatch];
    for (int i = 0; i < count; i++) {
        matrix_rows(m.row, m.q, m.scale, m.zero, rows[i], 1, w + i, ahead + i);
        ahead[i].lines = 0; // what lies behind it is not wanted
        FLOE_PREFETCH(w[i].scale);
        FLOE_PREFETCH(w[i].zero);
        for (int64_t at = 0; at < bytes; at += 64) FLOE_PREFETCH(w[i].codes + at);
    }
    row_ops().dot(m.row, w, count, &r.token, 1, nullptr, out, r.scratch + worker * r.scratch_bytes, ahead);
    for (int i = 0; i < count; i++) r.logits[rows[i]] += out[i][0];
}

// The standard deviation of what the second plane adds.
float deviation(const floe_vector &v, const float *spread, const float *x) {
    double total = 0;
    for (int64_t g = 0; g < v.n / v.group; g++) {
        double squares = 0;
        for (int64_t i = g * v.group; i < (g + 1) * v.group; i++) squares += (double)x[i] * x[i];
        total += squares * spread[g];
    }
    return (float)std::sqrt(total);
}

// How large a logit is that is so far below the best one once both are capped.
float below(float cap, float best, float reach) {
    if (cap == 0 || reach == 0) return best - reach;
    const float least = std::tanh(best / cap) - reach / cap;
    return least > -1 ? cap * std::atanh(least) : -INFINITY;
}

void cap_all(float cap, int64_t count, int threads, float *logits) {
    struct Capped {
        float cap;
        int64_t count;
        float *logits;
    } all = {cap, count, logits};
    const auto work = [](void *opaque, int64_t item, int) {
        const Capped &a = *(const Capped *)opaque;
        const int64_t end = std::min(a.count, (item + 1) * kCapped);
        for (int64_t i = item * kCapped; i < end; i++) a.logits[i] = a.cap * std::tanh(a.logits[i] / a.cap);
    };
    parallel_for(threads, (count + kCapped - 1) / kCapped, work, &all);
}

// Adds the second plane where the sum may be no further than `reach` below the largest.
int add_rest(const floe_ends &e, const float *x, float reach, int digits, int threads, float *logits) {
    thread_local Buffer buffer;
    const floe_matrix &plane = *e.rest;
    const int64_t scratch_bytes = aligned(plane.row.n + kChunk), blocks = Peaks::blocks(e.vocabulary);
    uint8_t *memory = buffer.take(aligned(4 * blocks) + aligned(4 * e.vocabulary) + tokens_bytes(plane.row, 1) +
                                  threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    const Peaks peaks(logits, e.vocabulary, carve<float>(memory, blocks));
    if (!peaks.is_number()) return FLOE_OK; // nor would the sum be
    int32_t *rows = carve<int32_t>(memory, e.vocabulary);
    const Token *token = prepare_tokens(plane.row, x, 1, digits, 1, memory);
    const int32_t best = (int32_t)peaks.best();
    Rest rest = {plane, token, &best, 1, memory, scratch_bytes, logits};
    add_rows(&rest, 0, 0);
    const float least = below(e.cap, logits[best], reach) - kSure * deviation(plane.row, e.spread, x);
    rest.rows = rows;
    rest.count = 0;
    peaks.each(least, [&](int64_t i) {
        rows[rest.count] = (int32_t)i;
        rest.count += i != best;
    });
    const bool few = rest.count * code_bytes(plane.row) < kSmall;
    parallel_for(few ? 1 : threads, (rest.count + kBatch - 1) / kBatch, add_rows, &rest);
    return FLOE_OK;
}

int add_whole(const floe_ends &e, int64_t tokens, const float *x, int digits, int threads, float *logits) {
    thread_local Buffer buffer;
    uint8_t *memory = buffer.take(aligned(4 * tokens * e.vocabulary));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *more = carve<float>(memory, tokens * e.vocabulary);
    const int code = multiply(*e.rest, x, tokens, digits, threads, more);
    for (int64_t i = 0; code == FLOE_OK && i < tokens * e.vocabulary; i++) logits[i] += more[i];
    return code;
}

// The least of the `wanted` largest, which moves them about.
double least_of(double *scores, int64_t count, int64_t wanted) {
    std::nth_element(scores, scores + wanted - 1, scores + count, std::greater<double>());
    return scores[wanted - 1];
}

double sum(const double *weights, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++) total += weights[i];
    return total;
}

// Takes the weight of all but the likeliest that together reach `share`; of equal ones the last stays.
void keep_share(const double *scores, double *weights, int64_t count, double share, int64_t *order) {
    const double all = sum(weights, count), too_light = all * (1 - share) / (2.0 * (double)count);
    double reached = 0;
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++) {
        if (weights[i] == 0) continue;
        if (weights[i] > too_light) {
            order[kept++] = i;
        } else { // together not half of what is left out: they need not be sorted
            reached += weights[i] / all;
            weights[i] = 0;
        }
    }
    std::stable_sort(order, order + kept, [scores](int64_t a, int64_t b) { return scores[a] < scores[b]; });
    for (int64_t i = 0; i + 1 < kept; i++) {
        reached += weights[order[i]] / all;
        if (!(reached <= 1 - share)) return;
        weights[order[i]] = 0;
    }
}

} // namespace
} // namespace floe

using namespace floe;

int floe_head(const floe_ends *ends, int64_t tokens, const float *x, float reach, int digits, int threads,
              float *logits) {
    thread_local Buffer buffer;
    const floe_ends &e = *ends;
    if (tokens < 1 || tokens > FLOE_MOST_TOGETHER || e.hidden < 1 || e.vocabulary < 1 || e.vocabulary > INT32_MAX ||
        !(e.cap >= 0) || !is_shape(e.head, e.vocabulary, e.hidden) ||
        (e.rest != nullptr && (!is_shape(*e.rest, e.vocabulary, e.hidden) || e.rest->row.bits > 8)))
        return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(aligned(4 * tokens * e.hidden));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    float *normed = carve<float>(memory, tokens * e.hidden);
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    for (int64_t i = 0; i < tokens * e.hidden; i += e.hidden) normalize(x + i, e.norm, e.hidden, e.eps, normed + i);
    int code = multiply(e.head, normed, tokens, digits, threads, logits);
    if (code == FLOE_OK && e.rest != nullptr && (e.spread == nullptr || !(reach < INFINITY))) {
        code = add_whole(e, tokens, normed, digits, threads, logits);
    } else {
        for (int64_t t = 0; code == FLOE_OK && e.rest != nullptr && t < tokens; t++)
            code = add_rest(e, normed + t * e.hidden, reach, digits, threads, logits + t * e.vocabulary);
    }
    if (code == FLOE_OK && e.cap != 0) cap_all(e.cap, tokens * e.vocabulary, threads, logits);
    return code;
}

int64_t floe_draw(const floe_sampling *sampling, const float *logits, int64_t count, const uint8_t *seen,
                  double uniform) {
    thread_local Buffer buffer;
    const floe_sampling &s = *sampling;
    if (count < 1 || s.top_k < 0) return FLOE_BAD_SHAPE;
    uint8_t *memory = buffer.take(5 * aligned(8 * count) + aligned(4 * Peaks::blocks(count)));
    if (memory == nullptr) return FLOE_NO_MEMORY;
    double *scores = carve<double>(memory, count), *weights = carve<double>(memory, count);
    double *room = carve<double>(memory, count);
    int64_t *which = carve<int64_t>(memory, count), *order = carve<int64_t>(memory, count);
    const Peaks peaks(logits, count, carve<float>(memory, Peaks::blocks(count)));
    const auto score = [&](int64_t i) {
        const double own = logits[i];
        return seen == nullptr || !seen[i] ? own : own < 0 ? own * s.penalty : own / s.penalty;
    };
    int64_t best = seen == nullptr ? peaks.best() : 0;
    for (int64_t i = 1; seen != nullptr && i < count; i++)
        if (score(i) > score(best)) best = i;
    if (!peaks.is_number() || !std::isfinite(score(best))) return FLOE_NOT_A_NUMBER;
    if (s.temperature == 0) return best;

    const double most = score(best) / s.temperature;
    double least = -INFINITY; // what is less likely would weigh too little below; exponentials take time
    if (s.top_p == 1 && s.min_p > 0) least = most + std::log(s.min_p) - 1e-6;
    const float far = seen == nullptr ? std::nextafter((float)(least * s.temperature), -INFINITY) : -INFINITY;
    int64_t found = 0;
    peaks.each(far, [&](int64_t i) {
        scores[found] = score(i) / s.temperature;
        which[found] = i;
        found += !(scores[found] < least);
    });
    if (s.top_k > 0 && s.top_k < found) least = least_of(std::copy_n(scores, found, room) - found, found, s.top_k);
    for (int64_t i = 0; i < found; i++) weights[i] = scores[i] < least ? 0 : std::exp(scores[i] - most);
    if (s.top_p < 1) keep_share(scores, weights, found, s.top_p, order);
    for (int64_t i = 0; i < found; i++)
        if (weights[i] < s.min_p) weights[i] = 0; // the likeliest weighs 1
    const double target = uniform * sum(weights, found);
    double reached = 0;
    int64_t last = best;
    for (int64_t i = 0; i < found; i++) {
        if (weights[i] == 0) continue;
        last = which[i];
        if ((reached += weights[i]) > target) break;
    }
    return last;
}
