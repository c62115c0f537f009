// Row operations for AVX2 with FMA and F16C.

#include "arch/row_generic.inl"

#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

#if defined(__GNUC__)
#define FLOE_UNROLL _Pragma("GCC unroll 8")
#define FLOE_NOINLINE __attribute__((noinline))
#define FLOE_ADDRESS(p) __asm__("" : "+r"(p))
// Added up now: the compiler would rather make all products first, for which there are no registers.
#define FLOE_NOW(x) __asm__("" : "+x"(x))
// What is read from p on is read after x is there: else products of all tokens are made side by side.
#define FLOE_AFTER(x, p) __asm__("" : "+x"(x), "+r"(p))
#else
#define FLOE_UNROLL
#define FLOE_NOINLINE
#define FLOE_ADDRESS(p)
#define FLOE_NOW(x)
#define FLOE_AFTER(x, p)
#endif

#include "codes.inl"
#include "dot.inl"
#include "axpy.inl"
#include "packed.inl"

namespace floe {
namespace {

void dot(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count, const uint8_t *wanted,
         float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead) {
    switch (tokens[0]->digit_count * 16 + v.bits) {
    case 1 * 16 + 2: return dot_codes<2, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 1 * 16 + 3: return dot_codes<3, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 1 * 16 + 4: return dot_codes<4, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 1 * 16 + 8:
    case 2 * 16 + 8: return dot_codes<8, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 2: return dot_codes<2, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 3: return dot_codes<3, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 4: return dot_codes<4, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 2: return dot_codes<2, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 3: return dot_codes<3, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 4: return dot_codes<4, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    default:
        if (v.bits == 16 || chunked(v)) return dot_floats(v, w, rows, tokens, count, wanted, out, ahead);
        return generic_dot(v, w, rows, tokens, count, wanted, out, scratch, ahead);
    }
}

// x as 16-bit numbers, of one digit or two, for 8-bit codes.
void prepare16(const floe_vector &v, Token &token) {
    for (int64_t c = 0; c < v.n / kChunk; c++) {
        int8_t split[2 * kChunk];
        int16_t whole[kChunk];
        token.sums[c] = split_chunk(token.x + c * kChunk, token.digit_count, split, token.scale + c);
        for (int i = 0; i < kChunk; i++)
            whole[i] = (int16_t)(token.digit_count == 1 ? split[i] : split[i] * 128 + split[kChunk + i]);
        memcpy(token.digits + c * 2 * kChunk, whole, sizeof whole);
    }
    // Whole sections are added up: what a last, shorter one lacks must not be what happened to lie in memory.
    for (int64_t c = v.n / kChunk; c % kSection != 0; c++) token.scale[c] = token.sums[c] = 0;
}

void prepare(const floe_vector &v, Token &token) {
    if (!chunked(v) || (v.bits == 8 && token.digit_count == 3)) {
        token.digit_count = 0;
        return plain_sums(v, token);
    }
    if (v.bits == 8) return prepare16(v, token);
    chunked_prepare(v, token, {4, 4});
    for (int64_t c = 0; c < v.n / kChunk; c += kSection) {
        float *const scale = token.scale + c, *const sums = token.sums + c;
        float placed[2][kSection];
        for (int64_t i = 0; i < kSection; i++) {
            placed[0][place_of<2>(i)] = scale[i];
            placed[1][place_of<2>(i)] = sums[i];
        }
        memcpy(scale, placed[0], sizeof placed[0]);
        memcpy(sums, placed[1], sizeof placed[1]);
    }
}

template <int BITS> void expand_codes(const floe_vector &v, const Stored &w, int64_t from, int64_t to, float *out) {
    const int64_t chunks = v.n / kChunk, per_group = v.group / kChunk;
    for (int64_t c = from / kChunk; c < to / kChunk; c++, out += kTileBlock) {
        const float scale = scale_at(v, w, c / per_group), zero = scale * zero_at(v, w, c / per_group);
        each_eight<BITS>(
            chunk_at<BITS>(w.codes, c), BITS == 3 ? top_at(w.codes, c, chunks) : nullptr, [&](int j, __m256i q) {
                _mm256_storeu_ps(out + 8 * j,
                                 _mm256_fmsub_ps(_mm256_cvtepi32_ps(q), _mm256_set1_ps(scale), _mm256_set1_ps(zero)));
            });
    }
}

void expand(const floe_vector &v, const Stored &w, int64_t from, int64_t to, float *out, uint8_t *scratch) {
    if (!chunked(v)) return generic_expand(v, w, from, to, out, scratch);
    switch (v.bits) {
    case 2: return expand_codes<2>(v, w, from, to, out);
    case 3: return expand_codes<3>(v, w, from, to, out);
    case 4: return expand_codes<4>(v, w, from, to, out);
    default: return expand_codes<8>(v, w, from, to, out);
    }
}

// TOKENS tokens and 32 columns: their sums stay in registers while all neurons pass.
template <int TOKENS>
inline void add_block(const float *h, const float *block, int64_t neurons, float *y, int64_t y_stride) {
    __m256 sums[TOKENS][4];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) FLOE_UNROLL for (int j = 0; j < 4; j++) sums[t][j] =
        _mm256_loadu_ps(y + t * y_stride + 8 * j);
    for (int64_t n = 0; n < neurons; n++, block += kChunk) {
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            const __m256 factor = _mm256_broadcast_ss(h + t * kTile + n);
            FLOE_UNROLL for (int j = 0; j < 4; j++) sums[t][j] =
                _mm256_fmadd_ps(factor, _mm256_loadu_ps(block + 8 * j), sums[t][j]);
        }
    }
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) FLOE_UNROLL for (int j = 0; j < 4; j++)
        _mm256_storeu_ps(y + t * y_stride + 8 * j, sums[t][j]);
}

void add_products(const float *h, const float *tile, int64_t neurons, int64_t columns, int64_t tokens, float *y,
                  int64_t y_stride) {
    int64_t i = 0;
    for (; i + kChunk <= columns; i += kChunk, tile += kTileBlock)
        for (int half = 0; half < kChunk; half += 32) {
            float *out = y + i + half;
            int64_t t = 0;
            for (; t + 3 <= tokens; t += 3)
                add_block<3>(h + t * kTile, tile + half, neurons, out + t * y_stride, y_stride);
            for (; t < tokens; t++) add_block<1>(h + t * kTile, tile + half, neurons, out + t * y_stride, y_stride);
        }
    for (int64_t t = 0; i < columns && t < tokens; t++)
        add_columns(h + t * kTile, [](int64_t n) { return n; }, neurons, tile, 0, columns - i, y + t * y_stride + i);
}

// 64 columns of one token: y += sum of h[n] · block[which[n]].
inline void add_row(const float *h, const uint8_t *which, int count, const float *block, float *y) {
    __m256 sums[8];
    FLOE_UNROLL for (int j = 0; j < 8; j++) sums[j] = _mm256_loadu_ps(y + 8 * j);
    for (int n = 0; n < count; n++) {
        const __m256 factor = _mm256_broadcast_ss(h + n);
        const float *from = block + which[n] * kChunk;
        FLOE_ADDRESS(from);
        FLOE_UNROLL for (int j = 0; j < 8; j++) sums[j] =
            _mm256_fmadd_ps(factor, _mm256_loadu_ps(from + 8 * j), sums[j]);
    }
    FLOE_UNROLL for (int j = 0; j < 8; j++) _mm256_storeu_ps(y + 8 * j, sums[j]);
}

void add_active(const float (*h)[kTile], const uint8_t (*which)[kTile], const uint8_t *counts, const float *tile,
                int64_t columns, int64_t tokens, float *y, int64_t y_stride) {
    int64_t i = 0;
    for (; i + kChunk <= columns; i += kChunk, tile += kTileBlock)
        for (int64_t t = 0; t < tokens; t++) add_row(h[t], which[t], counts[t], tile, y + t * y_stride + i);
    for (int64_t t = 0; i < columns && t < tokens; t++)
        add_columns(
            h[t], [&](int64_t n) { return (int64_t)which[t][n]; }, counts[t], tile, 0, columns - i,
            y + t * y_stride + i);
}

void copy(uint8_t *const *to, const uint8_t *const *from, const uint8_t *const *ahead, int count, int64_t bytes) {
    uintptr_t low = (uintptr_t)bytes;
    for (int r = 0; r < count; r++) low |= (uintptr_t)to[r];
    if (low & 63) {
        for (int r = 0; r < count; r++) memcpy(to[r], from[r], (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += 64)
        for (int r = 0; r < count; r++) {
            FLOE_PREFETCH(ahead[r] + i);
            FLOE_UNROLL for (int h = 0; h < 64; h += 32)
                _mm256_stream_si256((__m256i *)(to[r] + i + h), load(from[r] + i + h));
        }
    _mm_sfence();
}

uint64_t read(const uint8_t *const *from, const uint8_t *const *ahead, int count, int64_t bytes) {
    __m256i lanes[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        for (int r = 0; r < count; r++) {
            FLOE_PREFETCH(ahead[r] + i);
            FLOE_UNROLL for (int l = 0; l < 2; l++) lanes[l] = _mm256_xor_si256(lanes[l], load(from[r] + i + 32 * l));
        }
    uint64_t words[4], rest = 0;
    _mm256_storeu_si256((__m256i *)words, _mm256_xor_si256(lanes[0], lanes[1]));
    for (; i < bytes; i++)
        for (int r = 0; r < count; r++) rest ^= from[r][i];
    return rest ^ words[0] ^ words[1] ^ words[2] ^ words[3];
}

const RowOps ops = {"avx2", prepare, dot,          packs_from, pack, dot_packed, axpy,
                    finish, expand,  add_products, add_active, copy, read};

} // namespace

const RowOps *avx2_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx2_ops() { return nullptr; }
} // namespace floe

#endif
