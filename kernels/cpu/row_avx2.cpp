// Row operations for AVX2 with FMA and F16C.

#include "row_generic.inl"

#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

#if defined(__GNUC__)
#define FLOE_UNROLL _Pragma("GCC unroll 8")
#define FLOE_NOINLINE __attribute__((noinline))
#define FLOE_ADDRESS(p) __asm__("" : "+r"(p))
#else
#define FLOE_UNROLL
#define FLOE_NOINLINE
#define FLOE_ADDRESS(p)
#endif

#include "codes_avx2.inl"
#include "dot_avx2.inl"

namespace floe {
namespace {

void dot(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count, const uint8_t *wanted,
         float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead) {
    switch (tokens[0]->digit_count * 16 + v.bits) {
    case 2 * 16 + 2: return dot_codes<2, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 3: return dot_codes<3, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 4: return dot_codes<4, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 2 * 16 + 8: return dot_codes<8, 2>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 2: return dot_codes<2, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 3: return dot_codes<3, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    case 3 * 16 + 4: return dot_codes<4, 3>(v, w, rows, tokens, count, wanted, out, ahead);
    default:
        if (v.bits == 16 || chunked(v)) return dot_floats(v, w, rows, tokens, count, wanted, out, ahead);
        return generic_dot(v, w, rows, tokens, count, wanted, out, scratch, ahead);
    }
}

// a · scale of each chunk, and its zero point's share into the bias of each group.
inline void factors_for_axpy(const floe_vector &v, const Stored &w, float a, float *scales, float *bias) {
    const int64_t groups = v.n / v.group, per_group = v.group / kChunk;
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8) {
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(a), _mm256_cvtph_ps(load128(w.scale + 2 * g)));
        const __m256 zero = _mm256_cvtph_ps(load128(w.zero + 2 * g));
        _mm256_storeu_ps(scales + g, scale);
        _mm256_storeu_ps(bias + g, _mm256_fnmadd_ps(scale, zero, _mm256_loadu_ps(bias + g)));
    }
    for (; g < groups; g++) {
        scales[g] = a * half(w.scale + 2 * g);
        bias[g] -= scales[g] * half(w.zero + 2 * g);
    }
    for (int64_t c = v.n / kChunk - 1; per_group > 1 && c >= 0; c--) scales[c] = scales[c / per_group];
}

template <int BITS>
void axpy_codes(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                const Ahead *ahead) {
    float scales[kBatch][kMaxChunks];
    Pace paces[kBatch];
    // Lines to fetch ahead come one by one: many at once would make everything else wait.
    const int64_t chunks = v.n / kChunk, every = ahead[0].lines > 0 ? (chunks - 1) / ahead[0].lines + 1 : chunks;
    for (int r = 0; r < count; r++) {
        factors_for_axpy(v, w[r], a[r], scales[r], bias);
        paces[r] = Pace(ahead[r], chunks / every);
    }
    int64_t until = 0; // chunks before the next lines are fetched
    for (int64_t c = 0; c < chunks; c++, y += kChunk, until--) {
        const bool fetch = until == 0;
        if (fetch) until = every;
        __m256 sums[8];
        FLOE_UNROLL for (int j = 0; j < 8; j++) sums[j] = _mm256_loadu_ps(y + 8 * j);
        for (int r = 0; r < count; r++) {
            if (fetch) paces[r].step();
            const __m256 factor = _mm256_broadcast_ss(scales[r] + c);
            each_eight<BITS>(
                chunk_at<BITS>(w[r].codes, c), BITS == 3 ? top_at(w[r].codes, c, chunks) : nullptr,
                [&](int j, __m256i q) { sums[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), factor, sums[j]); });
        }
        FLOE_UNROLL for (int j = 0; j < 8; j++) _mm256_storeu_ps(y + 8 * j, sums[j]);
    }
}

// a · scale of a batch of 4-bit vectors as 16-bit multiples of a step that each chunk has for itself.
struct Factors {
    int32_t pairs[kBatch / 2][kMaxChunks];       // of two vectors each
    float steps[kMaxChunks], shares[kMaxChunks]; // shares: of the zero points
};

// Eight chunks from c on. False if a factor is not finite.
inline bool make_factors(const Stored *w, const float *a, int count, int64_t c, Factors &out) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 factors[kBatch], largest = _mm256_setzero_ps();
    for (int r = 0; r < count; r++) {
        factors[r] = _mm256_mul_ps(_mm256_set1_ps(a[r]), _mm256_cvtph_ps(load128(w[r].scale + 2 * c)));
        largest = _mm256_max_ps(_mm256_andnot_ps(sign, factors[r]), largest); // of two that are not ordered, the second
        const __m256 finite = _mm256_cmp_ps(_mm256_sub_ps(factors[r], factors[r]), _mm256_setzero_ps(), _CMP_EQ_OQ);
        if (_mm256_movemask_ps(finite) != 0xff) return false;
    }
    // Nothing, and not a division by it, where all factors are too small for a step.
    const __m256 some = _mm256_cmp_ps(largest, _mm256_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m256 step = _mm256_and_ps(some, _mm256_mul_ps(largest, _mm256_set1_ps(1.0f / 32767)));
    const __m256 inverse = _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(32767), largest));
    __m256 share = _mm256_setzero_ps();
    __m256i whole[kBatch] = {};
    for (int r = 0; r < count; r++) {
        whole[r] = _mm256_cvtps_epi32(_mm256_mul_ps(factors[r], inverse));
        share = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]), _mm256_cvtph_ps(load128(w[r].zero + 2 * c)), share);
    }
    for (int p = 0; p < kBatch / 2; p++) {
        const __m256i second = _mm256_slli_epi32(whole[2 * p + 1], 16);
        _mm256_storeu_si256((__m256i *)(out.pairs[p] + c), _mm256_blend_epi16(whole[2 * p], second, 0xaa));
    }
    _mm256_storeu_ps(out.steps + c, step);
    _mm256_storeu_ps(out.shares + c, _mm256_mul_ps(share, step));
    return true;
}

// 4-bit vectors with a scale per chunk: two vectors' codes stand side by side in 16 bits, so that one multiplication
// adds up both. False, with nothing added, if they are not whole sections or a factor is not finite.
bool axpy_nibbles(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                  const Ahead *ahead) {
    const int64_t chunks = v.n / kChunk;
    if (chunks % kSection != 0) return false;
    Factors factors;
    for (int64_t c = 0; c < chunks; c += kSection)
        if (!make_factors(w, a, count, c, factors)) return false;
    for (int64_t c = 0; c < chunks; c++) bias[c] -= factors.shares[c];
    const int64_t every = ahead[0].lines > 0 ? (chunks - 1) / ahead[0].lines + 1 : chunks;
    Pace paces[kBatch];
    for (int r = 0; r < count; r++) paces[r] = Pace(ahead[r], chunks / every);
    const __m256i nibble = _mm256_set1_epi16(0x0f);
    int64_t until = 0; // chunks before the next lines are fetched
    for (int64_t c = 0; c < chunks; c++, y += kChunk, until--) {
        if (until == 0) {
            until = every;
            for (int r = 0; r < count; r++) paces[r].step();
        }
        // Of words 0 to 3 and 8 to 11 of a vector's chunk, then of the others: the codes at bits 0, 4, 8 and 12.
        __m256i sums[2][4] = {};
        for (int r = 0; r < count; r += 2) {
            const __m256i first = load(w[r].codes + 32 * c), second = load(w[r + 1 < count ? r + 1 : r].codes + 32 * c);
            const __m256i factor = _mm256_set1_epi32(factors.pairs[r / 2][c]);
            FLOE_UNROLL for (int h = 0; h < 2; h++) {
                const __m256i words = h ? _mm256_unpackhi_epi16(first, second) : _mm256_unpacklo_epi16(first, second);
                const __m256i codes[4] = {
                    _mm256_and_si256(words, nibble), _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble),
                    _mm256_and_si256(_mm256_srli_epi16(words, 8), nibble), _mm256_srli_epi16(words, 12)};
                FLOE_UNROLL for (int k = 0; k < 4; k++) sums[h][k] =
                    _mm256_add_epi32(sums[h][k], _mm256_madd_epi16(codes[k], factor));
            }
        }
        const __m256 step = _mm256_broadcast_ss(factors.steps + c);
        FLOE_UNROLL for (int k = 0; k < 2; k++) { // the lower codes of all bytes, then the upper ones
            __m256i rows[2][2];
            FLOE_UNROLL for (int h = 0; h < 2; h++) {
                rows[h][0] = _mm256_unpacklo_epi32(sums[h][k], sums[h][k + 2]);
                rows[h][1] = _mm256_unpackhi_epi32(sums[h][k], sums[h][k + 2]);
            }
            FLOE_UNROLL for (int h = 0; h < 2; h++) {
                float *const out = y + 32 * k + 8 * h;
                const __m256i lower = _mm256_permute2x128_si256(rows[h][0], rows[h][1], 0x20);
                const __m256i upper = _mm256_permute2x128_si256(rows[h][0], rows[h][1], 0x31);
                _mm256_storeu_ps(out, _mm256_fmadd_ps(_mm256_cvtepi32_ps(lower), step, _mm256_loadu_ps(out)));
                _mm256_storeu_ps(out + 16, _mm256_fmadd_ps(_mm256_cvtepi32_ps(upper), step, _mm256_loadu_ps(out + 16)));
            }
        }
    }
    return true;
}

void axpy16(const floe_vector &v, const Stored *w, const float *a, int count, float *y, const Ahead *ahead) {
    const bool bfloat16 = v.bfloat16 != 0;
    Pace paces[kBatch];
    for (int r = 0; r < count; r++) paces[r] = Pace(ahead[r], v.n / 32);
    int64_t i = 0;
    for (; i + 32 <= v.n; i += 32) {
        __m256 sums[4];
        FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] = _mm256_loadu_ps(y + i + 8 * j);
        for (int r = 0; r < count; r++) {
            paces[r].step();
            const __m256 factor = _mm256_broadcast_ss(a + r);
            FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] =
                _mm256_fmadd_ps(wide(w[r].codes + 2 * (i + 8 * j), bfloat16), factor, sums[j]);
        }
        FLOE_UNROLL for (int j = 0; j < 4; j++) _mm256_storeu_ps(y + i + 8 * j, sums[j]);
    }
    for (; i < v.n; i++)
        for (int r = 0; r < count; r++) y[i] += a[r] * wide16(load16(w[r].codes + 2 * i), v.bfloat16);
}

void axpy(const floe_vector &v, const Stored *w, const float *a, int count, int digits, float *y, float *bias,
          uint8_t *scratch, const Ahead *ahead) {
    if (v.bits == 16) return axpy16(v, w, a, count, y, ahead);
    if (!chunked(v)) return generic_axpy(v, w, a, count, digits, y, bias, scratch, ahead);
    if (v.bits == 4 && v.group == kChunk && digits == 2 && axpy_nibbles(v, w, a, count, y, bias, ahead)) return;
    switch (v.bits) {
    case 2: return axpy_codes<2>(v, w, a, count, y, bias, ahead);
    case 3: return axpy_codes<3>(v, w, a, count, y, bias, ahead);
    case 4: return axpy_codes<4>(v, w, a, count, y, bias, ahead);
    default: return axpy_codes<8>(v, w, a, count, y, bias, ahead);
    }
}

void finish(const floe_vector &v, float *y, const float *bias) {
    if (!chunked(v)) return;
    for (int64_t g = 0; g < v.n / v.group; g++) {
        const __m256 share = _mm256_set1_ps(bias[g]);
        for (const float *end = y + v.group; y < end; y += 8)
            _mm256_storeu_ps(y, _mm256_add_ps(_mm256_loadu_ps(y), share));
    }
}

// x in 16 bits for 8-bit codes.
void prepare16(const floe_vector &v, Token &token) {
    for (int64_t c = 0; c < v.n / kChunk; c++) {
        int8_t split[2 * kChunk];
        int16_t whole[kChunk];
        token.sums[c] = split_chunk(token.x + c * kChunk, 2, split, token.scale + c);
        for (int i = 0; i < kChunk; i++) whole[i] = (int16_t)(split[i] * 128 + split[kChunk + i]);
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
    chunked_prepare(v, token);
    if (v.bits == 4) return;
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
        const float scale = half(w.scale + 2 * (c / per_group));
        const float zero = scale * half(w.zero + 2 * (c / per_group));
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

void copy(uint8_t *to, const uint8_t *from, int64_t bytes) {
    if (((uintptr_t)to | (uintptr_t)bytes) & 31) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += 32) _mm256_stream_si256((__m256i *)(to + i), load(from + i));
    _mm_sfence();
}

uint64_t read(const uint8_t *from, int64_t bytes, const uint8_t *ahead) {
    __m256i lanes[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        FLOE_PREFETCH(ahead + i);
        FLOE_UNROLL for (int l = 0; l < 2; l++) lanes[l] = _mm256_xor_si256(lanes[l], load(from + i + 32 * l));
    }
    uint64_t words[4], rest = 0;
    _mm256_storeu_si256((__m256i *)words, _mm256_xor_si256(lanes[0], lanes[1]));
    for (; i < bytes; i++) rest ^= from[i];
    return rest ^ words[0] ^ words[1] ^ words[2] ^ words[3];
}

const RowOps ops = {"avx2", prepare, dot, axpy, finish, expand, add_products, add_active, copy, read};

} // namespace

const RowOps *avx2_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx2_ops() { return nullptr; }
} // namespace floe

#endif
