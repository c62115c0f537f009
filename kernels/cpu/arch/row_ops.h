// What one thread does with one stored vector. Each instruction set brings a table of these (row_*.cpp).
//
// The row_*.cpp files are compiled for different processors into one library. So nothing with external linkage may
// be defined in what they include (no standard C++ templates either): the linker would keep a single copy, and it
// could be the one that this processor cannot run.
#pragma once

#include <stdint.h>

#include "floe_offload.h"

// Into the second cache: the first one has too few places for lines on their way to hide the memory's latency (on
// Zen 4 rows then arrive a fifth more slowly).
#if defined(__GNUC__)
#define FLOE_PREFETCH(p) __builtin_prefetch((p), 0, 2)
#elif defined(_M_X64)
#include <xmmintrin.h>
#define FLOE_PREFETCH(p) _mm_prefetch((const char *)(p), _MM_HINT_T1)
#else
#define FLOE_PREFETCH(p) (void)(p)
#endif

namespace floe {

constexpr int64_t kChunk = 64;             // codes packed together (layouts.CHUNK); they share one scale of x
constexpr int64_t kMaxChunked = 16 * 1024; // longest vector for the chunked paths (their tables lie on the stack)
constexpr int kBatch = 8;                  // vectors, and tokens, that one call of an operation takes at most

constexpr int64_t kSide = 32;                // vectors side by side
constexpr int64_t kNever = (int64_t)1 << 62; // more tokens than there are

// Codes as bytes, scales, and zeros times scales.
static inline int64_t packed_bytes(const floe_vector &v) { return v.n * kSide + 2 * 4 * (v.n / kChunk) * kSide; }

constexpr int64_t kTile = 64;                  // neurons whose down columns many tokens share at a time
constexpr int64_t kTileBlock = kTile * kChunk; // floats of a block of their columns

// Bytes of a vector's scales and zeros where they lie in front of its codes, which begin at a whole word.
static inline int64_t head_bytes(const floe_vector &v) {
    return v.bits == 16 ? 0 : (2 * v.scale_bytes * (v.n / v.group) + 3) / 4 * 4;
}

// Where a vector's parts lie. Scales and zeros are of scale_bytes each, one per group, at any alignment.
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
// 64 values, x = scale · (hi · 2^14 + mid · 2^7 + lo), or scale · (hi · 2^7 + lo) with two digits, or scale · hi with
// one, which rounds x to 8 bits. One 32-bit sum of a register of codes takes 16 products at up to 4 bits, 4 at 8 bits,
// of a code and three digits: below 2^31 in each case (4 · 255 · 127 · 2^14 is the largest), so it is exact. Digits lie
// as the codes do: for each register of codes and each digit, the planes of all chunks in it.
//
// The three tables of a token lie as far apart as those of any other that is prepared for the same layout.
struct Token {
    const float *x;
    int8_t *digits;  // (registers, digit_count, planes, 64), zero where the last register has no chunk
    float *scale;    // (chunks, up to a multiple of 16 with zeros)
    float *sums;     // the sums of x, which zero points multiply: of chunks, likewise; of groups if not chunked
    int digit_count; // 0: this layout is not chunked
};

struct RowOps {
    const char *name;

    // Fills the token's tables; digit_count comes in as 1 to 3 and goes out as 0 where they are not used.
    void (*prepare)(const floe_vector &v, Token &token);

    // out[r][t] = w_r · x_t for 1 to kBatch vectors and tokens. wanted: bit t of wanted[r] says whether that product is
    // needed (others may hold anything), nullptr that all are. `scratch` holds n bytes; ahead: one per vector.
    void (*dot)(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
                const uint8_t *wanted, float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead);

    // For many tokens, kSide vectors or fewer lie side by side in packed_bytes(v): `pack` puts them there, `dot_packed`
    // gives out[t][r] = w_r · x_t. packs_from: how many tokens, prepared with so many digits, it pays for.
    int64_t (*packs_from)(const floe_vector &v, int digits);
    void (*pack)(const floe_vector &v, const Stored *w, int rows, uint8_t *packed);
    void (*dot_packed)(const floe_vector &v, const uint8_t *packed, const Token *const *tokens, int64_t count, int rows,
                       float *const *out);

    // y += a[0] · w[0] + ... for up to kBatch vectors, so that y is read and written once for all of them. The zero
    // points' share may be left in bias (n / 64 + groups) until `finish` adds it. With one digit or two a · scale may
    // be read with 15 bits relative to the largest of the batch; not with fewer, so that which vectors are a batch,
    // which hangs on where rows lie, is no more than other noise of floats. ahead: one per vector.
    void (*axpy)(const floe_vector &v, const Stored *w, const float *a, int count, int digits, float *y, float *bias,
                 uint8_t *scratch, const Ahead *ahead);
    void (*finish)(const floe_vector &v, float *y, const float *bias);

    // Values from..to of one neuron's vector as floats, into its place `out` in the first block of a tile: blocks of 64
    // columns of kTile neurons follow each other, so that one block fits the first cache. `from`: a multiple of 256.
    void (*expand)(const floe_vector &v, const Stored &w, int64_t from, int64_t to, float *out, uint8_t *scratch);

    // y (tokens, y_stride) += h (tokens, kTile) · tile (neurons, columns): the down projection of many tokens.
    void (*add_products)(const float *h, const float *tile, int64_t neurons, int64_t columns, int64_t tokens, float *y,
                         int64_t y_stride);

    // The same where few neurons are active: h[t] holds the factors of the counts[t] neurons which[t].
    void (*add_active)(const float (*h)[kTile], const uint8_t (*which)[kTile], const uint8_t *counts, const float *tile,
                       int64_t columns, int64_t tokens, float *y, int64_t y_stride);

    // Copies up to kBatch vectors side by side, past the caches where that pays: the reader is another core or device.
    // ahead: where as many bytes each are wanted next.
    void (*copy)(uint8_t *const *to, const uint8_t *const *from, const uint8_t *const *ahead, int count, int64_t bytes);
    // Reads likewise; returns what depends on every byte.
    uint64_t (*read)(const uint8_t *const *from, const uint8_t *const *ahead, int count, int64_t bytes);
};

// Where the lists of present and absent neurons go: positions and slots, positions and keys.
struct Presence {
    int32_t *here_at, *slots, *gone_at, *keys;
};

// What the rows of slots are worth (offload/eviction.h), and what is looked for.
struct Worths {
    const float *factors;   // by expert, below 0 where none of its rows may go
    uint64_t expert_factor; // which is key * expert_factor >> expert_shift
    int32_t expert_shift, finds, ready;
    float prefetch_worth;
    uint32_t limit; // of worths to list, as numbers in the same order
};

// The pool's long loops, as far as there are whole registers; both return where they have got to. Lists have room for
// all that is looked at, and are written to up to there.
struct PoolOps {
    int64_t (*classify)(const int32_t *table, const int32_t *neurons, int64_t start, int64_t end, int32_t first,
                        const Presence &out, int64_t *here, int64_t *gone);
    int64_t (*look)(const floe_cell *cells, const Worths &by, int64_t slot, int64_t end, uint64_t *rows, int64_t *count,
                    int64_t *ready);
};

const PoolOps *avx512_pool();
// Of the instruction set in use; nullptr where it has none.
const PoolOps *pool_ops();

const RowOps *portable_ops();
const RowOps *avx2_ops();
const RowOps *avx512_ops();

} // namespace floe
