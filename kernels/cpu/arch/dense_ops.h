// What one thread does in a decode step's dense part with float32 numbers. Each instruction set brings a table of these
// (dense_*.cpp); the rule of row_ops.h about external linkage holds for those files too.
#pragma once

#include <stdint.h>

#include "floe.h"

namespace floe {

constexpr int64_t kSpan = 64; // stored tokens that one call of `attend` takes at most: their values stay in a cache

// One token's heads. Of each stored token the keys of all key heads lie before their values, in float32, float16 or
// codes of 8 bits; those are followed by a scale in float16 for each key and each value (kernels/entries.py).
// inside: where not 0, so many of the first numbers of a key are its value.
struct Heads {
    int64_t heads, kv_heads, dim;
    int stored; // FLOE_KEPT_*
    int64_t inside;

    int64_t group() const { return heads / kv_heads; } // query heads that share a key head
    int64_t value() const { return inside ? inside : dim; }
    int64_t values_at() const { return inside ? 0 : kv_heads * dim; }
    int64_t numbers() const { return (inside ? 1 : 2) * kv_heads * dim; }
    int64_t stride() const { return numbers() + (stored == FLOE_KEPT_CODES ? 4 * kv_heads : 0); } // in stored numbers
    int64_t bytes() const { return stride() * (stored == FLOE_KEPT_CODES ? 1 : stored == FLOE_KEPT_HALF ? 2 : 4); }
};

// A head's attention to some of the tokens: sum of exp(score - most) · value lies beside it.
struct Share {
    float most, total; // largest score; sum of exp(score - most)
};

struct DenseOps {
    const char *name;

    // y[r] = w_r · x for `rows` rows of n floats.
    void (*multiply)(const float *w, const float *x, int64_t rows, int64_t n, float *y);

    // Attention of queries (heads, D), which are scaled already, to `tokens` stored tokens from kv on: shares (heads)
    // and sums (heads, V), V numbers of a value, not yet divided by the total. scores: heads · kSpan floats of scratch.
    void (*attend)(const Heads &h, const float *queries, const void *kv, int64_t tokens, float *scores, Share *shares,
                   float *sums);

    // Store a token's keys and values.
    void (*keep)(const Heads &h, const float *values, void *kv);

    // One head's gated delta rule: of its state (keys, values) `before` to `after`, which may not overlap. With S =
    // decay · before: after = S + k ⊗ beta (v - k · S), and out (values) = q · after.
    void (*delta)(const float *before, int64_t keys, int64_t values, const float *q, const float *k, const float *v,
                  float decay, float beta, float *after, float *out);

    // c (rows, columns) += m (rows, inner) · b (inner, columns), each with a stride from row to row.
    void (*add_product)(const float *m, int64_t m_stride, const float *b, int64_t b_stride, int64_t rows, int64_t inner,
                        int64_t columns, float *c, int64_t c_stride);

    // x[i] = exp(x[i] - most); returns their sum. NaN stays NaN.
    float (*exponentials)(float *x, int64_t n, float most);
};

const DenseOps *dense_portable();
const DenseOps *dense_avx2();
const DenseOps *dense_avx512();

} // namespace floe
