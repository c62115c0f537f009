// Row operations for AVX-512 with VNNI (Cascade Lake, Zen 4 and later).

#include "arch/row_generic.inl"

// A test that cannot run them leaves them out, since they take longest to compile.
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(FLOE_WITHOUT_AVX512)

#include <immintrin.h>

#include "codes.inl"

#include "axpy.inl"
#include "dot.inl"
#include "packed.inl"

namespace floe {
namespace {

float dot16(const floe_vector &v, const Stored &w, const Token &token, Ahead ahead) {
    const bool bfloat16 = v.bfloat16 != 0;
    __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
    Pace pace(ahead, v.n / 64);
    int64_t i = 0;
    for (; i + 64 <= v.n; i += 64) {
        pace.step();
        FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] = _mm512_fmadd_ps(
            wide(w.codes + 2 * i + 32 * j, 0xffff, bfloat16), _mm512_loadu_ps(token.x + i + 16 * j), sums[j]);
    }
    for (; i < v.n; i += 16) {
        const __mmask16 here = first(v.n - i);
        sums[0] =
            _mm512_fmadd_ps(wide(w.codes + 2 * i, here, bfloat16), _mm512_maskz_loadu_ps(here, token.x + i), sums[0]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

void dot(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count, const uint8_t *wanted,
         float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead) {
    if (v.bits == 16) {
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < count; t++)
                if (is_wanted(wanted, r, t))
                    out[r][t] = dot16(v, w[r], *tokens[t], t == 0 ? ahead[r] : Ahead{nullptr, 0});
        return;
    }
    switch (tokens[0]->digit_count * 16 + v.bits) {
    case 1 * 16 + 2: return dot_codes<2, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 1 * 16 + 3: return dot_codes<3, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 1 * 16 + 4: return dot_codes<4, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 1 * 16 + 8: return dot_codes<8, 1>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 2: return dot_codes<2, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 3: return dot_codes<3, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 4: return dot_codes<4, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 8: return dot_codes<8, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 2: return dot_codes<2, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 3: return dot_codes<3, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 4: return dot_codes<4, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 8: return dot_codes<8, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    default: return generic_dot(v, w, rows, tokens, count, wanted, out, scratch, ahead);
    }
}

void prepare(const floe_vector &v, Token &token) {
    if (chunked(v)) {
        const int64_t planes = v.bits == 8 ? 1 : v.bits == 4 ? 2 : 4; // each of a register's chunks has a part in each
        return chunked_prepare(v, token, {planes, planes});
    }
    token.digit_count = 0;
    plain_sums(v, token);
}

template <int BITS> void expand_codes(const floe_vector &v, const Stored &w, int64_t from, int64_t to, float *out) {
    const int64_t chunks = v.n / kChunk, end = to / kChunk;
    for (int64_t start = from / kChunk; start < end; start += 16) {
        alignas(64) float scales[16], zeros[16];
        __m512 scale, zero;
        chunk_scales<false>(v, w, start, &scale, &zero);
        _mm512_store_ps(scales, scale);
        _mm512_store_ps(zeros, _mm512_sub_ps(_mm512_setzero_ps(), zero));
        for (int64_t c = start; c < end && c < start + 16; c++, out += kTileBlock) {
            const uint8_t *p = chunk_at<BITS>(w.codes, c);
            if (BITS == 8) {
                for (int j = 0; j < 4; j++)
                    _mm512_storeu_ps(out + 16 * j, _mm512_fmadd_ps(_mm512_cvtepi32_ps(bytes16(p + 16 * j)),
                                                                   _mm512_set1_ps(scales[c - start]),
                                                                   _mm512_set1_ps(zeros[c - start])));
                continue;
            }
            each_quarter<BITS>(p, BITS == 3 ? top_at(w.codes, c, chunks) : nullptr,
                               table<BITS>(scales[c - start], zeros[c - start]),
                               [out](int j, __m512 values) { _mm512_storeu_ps(out + 16 * j, values); });
        }
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

// TOKENS tokens and a block of 64 columns: their sums stay in registers while all neurons pass.
template <int TOKENS>
inline void add_block(const float *h, const float *block, int64_t neurons, float *y, int64_t y_stride) {
    __m512 sums[TOKENS][4];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) FLOE_UNROLL for (int j = 0; j < 4; j++) sums[t][j] =
        _mm512_loadu_ps(y + t * y_stride + 16 * j);
    for (int64_t n = 0; n < neurons; n++, block += kChunk) {
        __m512 w[4];
        FLOE_UNROLL for (int j = 0; j < 4; j++) w[j] = _mm512_loadu_ps(block + 16 * j);
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            const __m512 factor = _mm512_set1_ps(h[t * kTile + n]);
            FLOE_UNROLL for (int j = 0; j < 4; j++) sums[t][j] = _mm512_fmadd_ps(factor, w[j], sums[t][j]);
        }
    }
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) FLOE_UNROLL for (int j = 0; j < 4; j++)
        _mm512_storeu_ps(y + t * y_stride + 16 * j, sums[t][j]);
}

void add_products(const float *h, const float *tile, int64_t neurons, int64_t columns, int64_t tokens, float *y,
                  int64_t y_stride) {
    int64_t i = 0;
    for (; i + kChunk <= columns; i += kChunk, tile += kTileBlock) {
        int64_t t = 0;
        for (; t + 6 <= tokens; t += 6) add_block<6>(h + t * kTile, tile, neurons, y + t * y_stride + i, y_stride);
        for (; t + 2 <= tokens; t += 2) add_block<2>(h + t * kTile, tile, neurons, y + t * y_stride + i, y_stride);
        for (; t < tokens; t++) add_block<1>(h + t * kTile, tile, neurons, y + t * y_stride + i, y_stride);
    }
    for (int64_t t = 0; i < columns && t < tokens; t++)
        add_columns(h + t * kTile, [](int64_t n) { return n; }, neurons, tile, 0, columns - i, y + t * y_stride + i);
}

void add_active(const float (*h)[kTile], const uint8_t (*which)[kTile], const uint8_t *counts, const float *tile,
                int64_t columns, int64_t tokens, float *y, int64_t y_stride) {
    int64_t i = 0;
    for (; i + kChunk <= columns; i += kChunk, tile += kTileBlock)
        for (int64_t t = 0; t < tokens; t++) {
            float *out = y + t * y_stride + i;
            __m512 sums[4];
            FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] = _mm512_loadu_ps(out + 16 * j);
            for (int n = 0; n < counts[t]; n++) {
                const __m512 factor = _mm512_set1_ps(h[t][n]);
                const float *from = tile + which[t][n] * kChunk;
                FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] =
                    _mm512_fmadd_ps(factor, _mm512_loadu_ps(from + 16 * j), sums[j]);
            }
            FLOE_UNROLL for (int j = 0; j < 4; j++) _mm512_storeu_ps(out + 16 * j, sums[j]);
        }
    for (int64_t t = 0; i < columns && t < tokens; t++)
        add_columns(
            h[t], [&](int64_t n) { return which[t][n]; }, counts[t], tile, 0, columns - i, y + t * y_stride + i);
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
            _mm512_stream_si512((__m512i *)(to[r] + i), load(from[r] + i));
        }
    _mm_sfence();
}

uint64_t read(const uint8_t *const *from, const uint8_t *const *ahead, int count, int64_t bytes) {
    __m512i lanes = _mm512_setzero_si512();
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        for (int r = 0; r < count; r++) {
            FLOE_PREFETCH(ahead[r] + i);
            lanes = _mm512_xor_si512(lanes, load(from[r] + i));
        }
    uint64_t rest = 0;
    for (; i < bytes; i++)
        for (int r = 0; r < count; r++) rest ^= from[r][i];
    alignas(64) uint64_t parts[8]; // not _mm512_reduce_add_epi64, whose sum may overflow
    _mm512_store_si512((__m512i *)parts, lanes);
    for (const uint64_t part : parts) rest ^= part;
    return rest;
}

const RowOps ops = {"avx512", prepare, dot,          packs_from, pack, dot_packed, axpy,
                    finish,   expand,  add_products, add_active, copy, read};

} // namespace

const RowOps *avx512_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx512_ops() { return nullptr; }
} // namespace floe

#endif
