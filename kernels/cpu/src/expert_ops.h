// What the operations share: checks, and the state of the library.
#pragma once

#include <string.h>

#include <atomic>
#include <cmath>

#include "arch/row_ops.h"

namespace floe {

const RowOps &row_ops();

// Bytes of the codes of one vector, or FLOE_BAD_SHAPE for a layout that does not exist.
int64_t code_bytes(const floe_vector &v);

inline int64_t groups_of(const floe_vector &v) { return v.bits == 16 ? 0 : v.n / v.group; }

template <class Index> bool in_range(const Index *index, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (index[i] < 0 || index[i] >= end) return false;
    return true;
}

// A number in a record that another thread, or Python, reads or writes meanwhile.
template <class Number> std::atomic<Number> &shared(const Number &number) {
    static_assert(sizeof(std::atomic<Number>) == sizeof(Number) && std::atomic<Number>::is_always_lock_free,
                  "a plain number can be looked at as an atomic one");
    return *(std::atomic<Number> *)&number;
}

inline bool is_raised(const floe_stop &stop) { return shared(stop.raised).load(std::memory_order_relaxed) != 0; }

// Tables of one prepared token, and how many bytes they take in a buffer.
int64_t token_bytes(const floe_vector &v);
Token prepare_token(const floe_vector &v, const float *x, int digits, uint8_t *&memory);

// Many tokens, x (count, v.n), prepared by several threads.
int64_t tokens_bytes(const floe_vector &v, int64_t count);
Token *prepare_tokens(const floe_vector &v, const float *x, int64_t count, int digits, int threads, uint8_t *&memory);

// `count` vectors of one matrix from `start` on; ahead: what follows them.
void matrix_rows(const floe_vector &v, const uint8_t *q, const uint8_t *scale, const uint8_t *zero, int64_t start,
                 int count, Stored *rows, Ahead *ahead);

// The parts of a vector whose scales lie in front of its codes.
inline Stored stored(const floe_vector &v, const uint8_t *at) {
    return {at, at + v.scale_bytes * groups_of(v), at + head_bytes(v)};
}

inline float silu(float z) { return z / (1.0f + std::exp(-z)); }

// z (1 + tanh(u)) / 2, by exp, which costs less.
inline float gelu(float z) {
    constexpr float steepness = 1.5957691216057308f, cubic = 0.044715f; // twice the square root of 2 / pi
    return z / (1.0f + std::exp(-steepness * (z + cubic * z * z * z)));
}

inline bool is_function(int32_t function) { return function >= FLOE_PLAIN && function <= FLOE_RELU2; }

inline float at_most(float z, float limit) { return z > limit ? limit : z; } // NaN stays NaN, hence no std::min

inline float within(float z, float limit) { return z < -limit ? -limit : at_most(z, limit); }

// A projection's function, of one number.
inline float applied(int32_t function, float z) {
    constexpr float clamp = 7.0f, steepness = 1.702f, limit = 10.0f; // activation.py
    switch (function) {
    case FLOE_SILU: return silu(z);
    case FLOE_CLAMPED_GATE: z = at_most(z, clamp); return z / (1.0f + std::exp(-steepness * z));
    case FLOE_CLAMPED_UP: return within(z, clamp) + 1.0f;
    case FLOE_GELU: return gelu(z);
    case FLOE_LIMITED_GATE: return silu(at_most(z, limit));
    case FLOE_LIMITED_UP: return within(z, limit);
    case FLOE_ONE: return 1.0f;
    case FLOE_RELU2: return z < 0 ? 0.0f : z * z;
    default: return z;
    }
}

// Whether rows are made for this signal: one has the gate's function, the other up's of the same activation.
inline bool complete(const floe_signal &signal, const floe_rows &rows) {
    const int32_t low = signal.function < rows.function ? signal.function : rows.function;
    const int32_t high = signal.function < rows.function ? rows.function : signal.function;
    if (low == FLOE_PLAIN) return high == FLOE_SILU || high == FLOE_GELU;
    if (high != low + 1) return false;
    return low == FLOE_CLAMPED_GATE || low == FLOE_LIMITED_GATE || (low == FLOE_ONE && rows.function == FLOE_ONE);
}

inline bool gated(const floe_rows &rows) { return rows.function != FLOE_ONE; }

// Of the other projection in a row, negative for a layout that does not exist.
inline int64_t other_bytes(const floe_rows &rows) {
    if (!gated(rows)) return rows.other.n < 1 ? (int64_t)FLOE_BAD_SHAPE : 0;
    const int64_t codes = code_bytes(rows.other);
    return codes < 0 ? codes : head_bytes(rows.other) + codes;
}

// Parts of a row: the other projection's values, a bias at a whole word, and the down column (layouts.RowLayout).
inline int64_t bias_at(const floe_rows &rows) { return (other_bytes(rows) + 3) / 4 * 4; }

inline int64_t down_at(const floe_rows &rows) { return rows.biased ? bias_at(rows) + 16 : other_bytes(rows); }

inline float bias_of(const floe_rows &rows, int64_t at, const uint8_t *row) {
    float bias = 0;
    if (rows.biased) memcpy(&bias, row + at, sizeof(bias));
    return bias;
}

constexpr int64_t kSmall = 128 * 1024; // bytes that one thread reads before another one would have woken up

// Whether a matrix of floats or codes is of this size.
bool is_shape(const floe_matrix &m, int64_t rows, int64_t columns);

// y = x · Wᵀ + bias: x (tokens, columns) -> y (tokens, rows).
int multiply(const floe_matrix &m, const float *x, int64_t tokens, int digits, int threads, float *y);

// The stream (tokens, H) behind a layer with a sandwich, by what `beside` and the experts give; these are overwritten.
void close_layer(const floe_dense_layer &layer, int64_t tokens, const float *parallel, float *experts, float *stream);

// y = x / rms(x) · weight, without one where it is NULL; y may be x.
void normalize(const float *x, const float *weight, int64_t n, float eps, float *y);

// As the norm says; y may be x.
void normalize(const float *x, const floe_norm &norm, int64_t n, float eps, float *y);

} // namespace floe
