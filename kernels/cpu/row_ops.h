// What one thread does with one stored vector. Each instruction set brings a table of these (row_*.cpp).
//
// The row_*.cpp files are compiled for different processors into one library. So nothing with external linkage may
// be defined in what they include (no standard C++ templates either): the linker would keep a single copy, and it
// could be the one that this processor cannot run.
#pragma once

#include <stdint.h>

#include "floe.h"

#if defined(__GNUC__)
#define FLOE_PREFETCH(p) __builtin_prefetch((p), 0, 3)
#elif defined(_M_X64)
#include <xmmintrin.h>
#define FLOE_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T0)
#else
#define FLOE_PREFETCH(p) (void)(p)
#endif

namespace floe {

constexpr int64_t kChunk = 64;             // values that share one scale of x, and one 64-byte register of codes
constexpr int64_t kMaxChunked = 16 * 1024; // longest vector for the chunked paths (their tables lie on the stack)
constexpr int kBatch = 8;                   // vectors that one pass over y adds

// Where a vector's parts lie. Scales and zeros are float16, one per group, at any alignment.
struct Stored {
    const uint8_t *scale;
    const uint8_t *zero;
    const uint8_t *codes;
};

// What to prefetch while working: the memory's latency is the time of several rows.
struct Ahead {
    const uint8_t *at;
    int64_t lines; // of 64 bytes
};

// One token's x, prepared for vectors of one layout.
//
// x is also cut into signed 8-bit digits, so that 8-bit multiply-adds can take the codes as they are: in a chunk of
// 64 values, x = scale · (hi · 2^14 + mid · 2^7 + lo), or scale · (hi · 2^7 + lo) with two digits. Sums of 64
// products of a code and three digits stay below 2^31 (4 · 255 · 127 · 2^14), so they are exact.
struct Token {
    const float *x;
    int8_t *digits;  // (chunks, digit_count, 64)
    float *scale;    // (chunks): also undoes the power of two that a code's place in its byte gives it
    float *sums;     // (groups): the sum of x, which the zero points multiply
    int digit_count; // 0: this layout is not chunked
};

struct RowOps {
    const char *name;

    // Fills the token's tables; digit_count comes in as 2 or 3 and goes out as 0 where they are not used.
    void (*prepare)(const floe_vector &v, Token &token);

    // w · x. `scratch` holds n bytes.
    float (*dot)(const floe_vector &v, const Stored &w, const Token &token, uint8_t *scratch, Ahead ahead);

    // y += a[0] · w[0] + ... for up to kBatch vectors, so that y is read and written once for all of them. The zero
    // points' share may be left in bias (n / 64 + groups) until `finish` adds it. ahead: one per vector.
    void (*axpy)(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                 uint8_t *scratch, const Ahead *ahead);
    void (*finish)(const floe_vector &v, float *y, const float *bias);

    // Copy past the caches where that pays: the reader is another core or device.
    void (*copy)(uint8_t *to, const uint8_t *from, int64_t bytes);
    uint64_t (*read)(const uint8_t *from, int64_t bytes, const uint8_t *ahead);
};

const RowOps *portable_ops();
const RowOps *avx2_ops();
const RowOps *avx512_ops();

} // namespace floe
