// Float32 operations of a decode step's dense part in plain C++; included by every dense_*.cpp (see dense_ops.h).

#include <string.h>

#include "dense_ops.h"

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math") // else a comparison that NaN might reach keeps loops from becoming vectors
#endif

#if defined(__GNUC__)
#define FLOE_FETCH(p) __builtin_prefetch((p), 0, 2)
#define FLOE_UNROLL _Pragma("GCC unroll 8")
#else
#define FLOE_UNROLL
#define FLOE_FETCH(p) (void)(p)
#endif

namespace floe {
namespace {

// kLanes, a register's width in floats, is the including file's.
#if defined(__GNUC__)
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
#else
struct Lanes {
    float v[kLanes];
    float operator[](int l) const { return v[l]; }
    void operator+=(const Lanes &other) {
        for (int l = 0; l < kLanes; l++) v[l] += other.v[l];
    }
};
inline Lanes operator*(const Lanes &a, const Lanes &b) {
    Lanes c;
    for (int l = 0; l < kLanes; l++) c.v[l] = a.v[l] * b.v[l];
    return c;
}
inline Lanes operator*(float a, const Lanes &b) {
    Lanes c;
    for (int l = 0; l < kLanes; l++) c.v[l] = a * b.v[l];
    return c;
}
#endif

constexpr int kShared = 4; // query heads, or rows, that meet the same numbers at once

inline Lanes load(const float *p) {
    Lanes lanes;
    memcpy(&lanes, p, sizeof lanes);
    return lanes;
}

inline void store(float *p, const Lanes &lanes) { memcpy(p, &lanes, sizeof lanes); }

inline float sum_lanes(const Lanes &lanes) {
    float sums[kLanes];
    store(sums, lanes);
    FLOE_UNROLL for (int width = kLanes / 2; width > 0; width /= 2)
        FLOE_UNROLL for (int l = 0; l < width; l++) sums[l] += sums[l + width];
    return sums[0];
}

// out[c] = w · x_c for COUNT vectors x_c, which lie `stride` apart.
template <int COUNT> inline void dot(const float *w, const float *x, int64_t stride, int64_t n, float *out) {
    Lanes even[COUNT] = {}, odd[COUNT] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const Lanes first = load(w + i), second = load(w + i + kLanes);
        FLOE_UNROLL for (int c = 0; c < COUNT; c++) {
            even[c] += first * load(x + c * stride + i);
            odd[c] += second * load(x + c * stride + i + kLanes);
        }
    }
    FLOE_UNROLL for (int c = 0; c < COUNT; c++) {
        even[c] += odd[c];
        out[c] = sum_lanes(even[c]);
        for (int64_t rest = i; rest < n; rest++) out[c] += w[rest] * x[c * stride + rest];
    }
}

void multiply(const float *w, const float *x, int64_t rows, int64_t n, float *y) {
    int64_t r = 0;
    for (; r + kShared <= rows; r += kShared) dot<kShared>(x, w + r * n, n, n, y + r);
    for (; r < rows; r++) dot<1>(x, w + r * n, n, n, y + r);
}

// Cephes' expf: 2^k · polynomial, with ln 2 in two parts; below -87 it stays at the smallest normal number.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x; // NaN is not
    const float shifted = x * 1.44269504f + 12582912.0f; // 1.5 · 2^23: the sum's last bits are the integer
    const float k = shifted - 12582912.0f;
    const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127u) << 23; // 2^k
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

float exponentials(float *x, int64_t n, float most) {
    for (int64_t i = 0; i < n; i++) x[i] = exponential(x[i] - most);
    Lanes lanes = {};
    float total = 0;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) lanes += load(x + i);
    for (; i < n; i++) total += x[i];
    return total + sum_lanes(lanes);
}

// What COUNT heads' scores (kSpan apart) add up of one key head's values: two registers' columns from v on.
template <int COUNT>
inline void add_values(const float *scores, const float *v, int64_t stride, int64_t tokens, float *sums, int64_t dim) {
    Lanes left[COUNT] = {}, right[COUNT] = {};
    for (int64_t t = 0; t < tokens; t++, v += stride) {
        const Lanes first = load(v), second = load(v + kLanes);
        FLOE_UNROLL for (int c = 0; c < COUNT; c++) {
            left[c] += scores[c * kSpan + t] * first;
            right[c] += scores[c * kSpan + t] * second;
        }
    }
    FLOE_UNROLL for (int c = 0; c < COUNT; c++) {
        store(sums + c * dim, left[c]);
        store(sums + c * dim + kLanes, right[c]);
    }
}

template <int COUNT>
void add_all_values(const Heads &h, const float *scores, const float *v, int64_t tokens, float *sums) {
    int64_t d = 0;
    for (; d + 2 * kLanes <= h.dim; d += 2 * kLanes)
        add_values<COUNT>(scores, v + d, h.stride(), tokens, sums + d, h.dim);
    for (; d < h.dim; d++)
        for (int c = 0; c < COUNT; c++) {
            float sum = 0;
            for (int64_t t = 0; t < tokens; t++) sum += scores[c * kSpan + t] * v[t * h.stride() + d];
            sums[c * h.dim + d] = sum;
        }
}

void attend(const Heads &h, const float *queries, const float *kv, int64_t tokens, float *scores, Share *shares,
            float *sums) {
    const int64_t group = h.group(), stride = h.stride(), dim = h.dim;
    for (int64_t t = 0; t < tokens; t++) { // all keys of a token, in the order in which they lie
        const float *keys = kv + t * stride, *values = keys + h.kv_heads * dim;
        for (int64_t i = 0; i < h.kv_heads * dim; i += 16) FLOE_FETCH(values + i);
        for (int64_t g = 0; g < h.kv_heads; g++, keys += dim) {
            int64_t q = g * group;
            float found[kShared];
            for (; q + kShared <= (g + 1) * group; q += kShared) {
                dot<kShared>(keys, queries + q * dim, dim, dim, found);
                for (int c = 0; c < kShared; c++) scores[(q + c) * kSpan + t] = found[c];
            }
            for (; q < (g + 1) * group; q++) dot<1>(keys, queries + q * dim, dim, dim, scores + q * kSpan + t);
        }
    }
    for (int64_t q = 0; q < h.heads; q++) {
        float most = scores[q * kSpan];
        for (int64_t t = 1; t < tokens; t++) most = scores[q * kSpan + t] > most ? scores[q * kSpan + t] : most;
        shares[q] = {most, exponentials(scores + q * kSpan, tokens, most)};
    }
    const float *values = kv + h.kv_heads * dim;
    for (int64_t g = 0; g < h.kv_heads; g++, values += dim) {
        int64_t q = g * group;
        for (; q + kShared <= (g + 1) * group; q += kShared)
            add_all_values<kShared>(h, scores + q * kSpan, values, tokens, sums + q * dim);
        for (; q < (g + 1) * group; q++) add_all_values<1>(h, scores + q * kSpan, values, tokens, sums + q * dim);
    }
}

} // namespace
} // namespace floe
