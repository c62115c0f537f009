// Row operations for AVX-512 with VNNI (Cascade Lake, Zen 4 and later).

#include "row_generic.inl"

// A test that cannot run them leaves them out, since they take longest to compile.
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(FLOE_WITHOUT_AVX512)

#include <immintrin.h>

#include "codes_avx512.inl"
#include "dot_avx512.inl"

namespace floe {
namespace {

constexpr int64_t kMaxChunks = kMaxChunked / kChunk;

inline __m512 wide(const uint8_t *p, __mmask16 here, bool bfloat16) {
    const __m256i raw = _mm256_maskz_loadu_epi16(here, p);
    if (bfloat16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    return _mm512_cvtph_ps(raw);
}

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

// a · scale and -a · scale · zero of each chunk.
inline void factors_for_axpy(const floe_vector &v, const Stored &w, float a, float *scales, float *zeros) {
    const int64_t groups = v.n / v.group, chunks_per_group = v.group / kChunk;
    const __m512 factor = _mm512_set1_ps(a);
    for (int64_t g = 0; g < groups; g += 16) {
        const __mmask16 here = first(groups - g);
        const __m512 scale = _mm512_mul_ps(factor, halves(w.scale + 2 * g, groups - g));
        const __m512 zero = halves(w.zero + 2 * g, groups - g);
        _mm512_mask_storeu_ps(scales + g, here, scale);
        _mm512_mask_storeu_ps(zeros + g, here, _mm512_fnmadd_ps(scale, zero, _mm512_setzero_ps()));
    }
    if (chunks_per_group == 1) return;
    for (int64_t c = v.n / kChunk - 1; c >= 0; c--) {
        scales[c] = scales[c / chunks_per_group];
        zeros[c] = zeros[c / chunks_per_group];
    }
}

inline __m512i bytes16(const uint8_t *p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p)); }

// What each code stands for, in 16 lanes: a permutation then does the dequantizing.
template <int BITS> inline __m512 table(float scale, float zero) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 codes = _mm512_cvtepi32_ps(_mm512_and_si512(lanes, _mm512_set1_epi32((1 << (BITS & 7)) - 1)));
    return _mm512_fmadd_ps(codes, _mm512_set1_ps(scale), _mm512_set1_ps(zero));
}

// 64 codes of one chunk as floats, 16 at a time: use(j, w) gets values 16j...
template <int BITS, class Use> inline void each_quarter(const uint8_t *p, const uint8_t *top, __m512 values, Use use) {
    if (BITS == 4) {
        FLOE_UNROLL for (int i = 0; i < 2; i++) {
            const __m512i q = bytes16(p + 16 * i);
            use(i, _mm512_permutexvar_ps(q, values)); // looks at four bits
            use(2 + i, _mm512_permutexvar_ps(_mm512_srli_epi32(q, 4), values));
        }
        return;
    }
    const __m512i q = bytes16(p);
    if (BITS == 2) {
        FLOE_UNROLL for (int k = 0; k < 4; k++) // looks at two bits of each lane
            use(k, _mm512_permutevar_ps(values, k ? _mm512_srli_epi32(q, 2 * k) : q));
        return;
    }
    const __m512i shifts = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i both = _mm_loadl_epi64((const __m128i *)top);
    const __m512i upper =
        _mm512_slli_epi32(_mm512_srlv_epi32(_mm512_cvtepu8_epi32(_mm_unpacklo_epi64(both, both)), shifts), 2);
    FLOE_UNROLL for (int k = 0; k < 4; k++) { // three-bit tables repeat after eight, so the bits above do not matter
        const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), _mm512_srli_epi32(q, 2 * k),
                                                       _mm512_srli_epi32(upper, 2 * k), 0xca);
        use(k, _mm512_permutexvar_ps(code, values));
    }
}

// One chunk, times its scale, onto the y that `sums` hold. Of 8-bit codes, the zero point's share is left to `bias`.
template <int BITS> inline void add_chunk(__m512 *sums, const uint8_t *p, const uint8_t *top, float scale, float zero) {
    if (BITS == 8) {
        const __m512 factor = _mm512_set1_ps(scale);
        FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] =
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(bytes16(p + 16 * j)), factor, sums[j]);
        return;
    }
    each_quarter<BITS>(p, top, table<BITS>(scale, zero),
                       [sums](int j, __m512 w) { sums[j] = _mm512_add_ps(sums[j], w); });
}

// Chunks `from`..`to` of y, COUNT at a time so that the loop's own work is small beside theirs.
template <int BITS, int COUNT>
void add_chunks(int64_t from, int64_t to, int64_t chunks, const Stored *w, int count, float *y,
                const float (*scales)[kMaxChunks], const float (*zeros)[kMaxChunks], Pace *paces) {
    for (int64_t c = from; c < to; c += COUNT) {
        __m512 sums[4 * COUNT];
        float *out = y + c * kChunk;
        FLOE_UNROLL for (int i = 0; i < 4 * COUNT; i++) sums[i] = _mm512_loadu_ps(out + 16 * i);
        for (int r = 0; r < count; r++) {
            paces[r].step();
            FLOE_UNROLL for (int i = 0; i < COUNT; i++) add_chunk<BITS>(
                sums + 4 * i, chunk_at<BITS>(w[r].codes, c + i),
                BITS == 3 ? top_at(w[r].codes, c + i, chunks) : nullptr, scales[r][c + i], zeros[r][c + i]);
        }
        FLOE_UNROLL for (int i = 0; i < 4 * COUNT; i++) _mm512_storeu_ps(out + 16 * i, sums[i]);
    }
}

template <int BITS>
void axpy_codes(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                const Ahead *ahead) {
    constexpr int kCount = 4; // chunks that fill 16 registers
    alignas(64) float scales[kBatch][kMaxChunks], zeros[kBatch][kMaxChunks];
    const int64_t chunks = v.n / kChunk, even = chunks / kCount * kCount;
    Pace paces[kBatch];
    for (int r = 0; r < count; r++) {
        factors_for_axpy(v, w[r], a[r], scales[r], zeros[r]);
        paces[r] = Pace(ahead[r], even / kCount);
    }
    add_chunks<BITS, kCount>(0, even, chunks, w, count, y, scales, zeros, paces);
    if (even < chunks) {
        Pace done[kBatch];
        add_chunks<BITS, 1>(even, chunks, chunks, w, count, y, scales, zeros, done);
    }
    for (int r = 0; BITS == 8 && r < count; r++)
        for (int64_t c = 0; c < chunks; c += 16) {
            const __mmask16 here = first(chunks - c);
            const __m512 total = _mm512_add_ps(_mm512_maskz_loadu_ps(here, bias + c), _mm512_load_ps(zeros[r] + c));
            _mm512_mask_storeu_ps(bias + c, here, total);
        }
}

void axpy16(const floe_vector &v, const Stored *w, const float *a, int count, float *y, const Ahead *ahead) {
    const bool bfloat16 = v.bfloat16 != 0;
    Pace paces[kBatch];
    for (int r = 0; r < count; r++) paces[r] = Pace(ahead[r], v.n / 64);
    int64_t i = 0;
    for (; i + 64 <= v.n; i += 64) {
        __m512 sums[4];
        FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] = _mm512_loadu_ps(y + i + 16 * j);
        for (int r = 0; r < count; r++) {
            paces[r].step();
            const uint8_t *p = w[r].codes + 2 * i;
            const __m512 factor = _mm512_set1_ps(a[r]);
            FLOE_UNROLL for (int j = 0; j < 4; j++) sums[j] =
                _mm512_fmadd_ps(wide(p + 32 * j, 0xffff, bfloat16), factor, sums[j]);
        }
        FLOE_UNROLL for (int j = 0; j < 4; j++) _mm512_storeu_ps(y + i + 16 * j, sums[j]);
    }
    for (; i < v.n; i += 16) {
        const __mmask16 here = first(v.n - i);
        __m512 sum = _mm512_maskz_loadu_ps(here, y + i);
        for (int r = 0; r < count; r++)
            sum = _mm512_fmadd_ps(wide(w[r].codes + 2 * i, here, bfloat16), _mm512_set1_ps(a[r]), sum);
        _mm512_mask_storeu_ps(y + i, here, sum);
    }
}

void axpy(const floe_vector &v, const Stored *w, const float *a, int count, int, float *y, float *bias,
          uint8_t *scratch, const Ahead *ahead) {
    if (v.bits == 16) return axpy16(v, w, a, count, y, ahead);
    if (!chunked(v)) return generic_axpy(v, w, a, count, 2, y, bias, scratch, ahead);
    switch (v.bits) {
    case 2: return axpy_codes<2>(v, w, a, count, y, bias, ahead);
    case 3: return axpy_codes<3>(v, w, a, count, y, bias, ahead);
    case 4: return axpy_codes<4>(v, w, a, count, y, bias, ahead);
    default: return axpy_codes<8>(v, w, a, count, y, bias, ahead);
    }
}

void finish(const floe_vector &v, float *y, const float *bias) {
    if (v.bits != 8 || !chunked(v)) return;
    for (int64_t i = 0; i < v.n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_add_ps(_mm512_loadu_ps(y + i), _mm512_set1_ps(bias[i / kChunk])));
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
    const int64_t chunks = v.n / kChunk, per_group = v.group / kChunk;
    for (int64_t c = from / kChunk; c < to / kChunk; c++, out += kTileBlock) {
        const float scale = half_to_float(load16(w.scale + 2 * (c / per_group)));
        const float zero = -scale * half_to_float(load16(w.zero + 2 * (c / per_group)));
        const uint8_t *p = chunk_at<BITS>(w.codes, c);
        if (BITS == 8) {
            for (int j = 0; j < 4; j++)
                _mm512_storeu_ps(out + 16 * j, _mm512_fmadd_ps(_mm512_cvtepi32_ps(bytes16(p + 16 * j)),
                                                               _mm512_set1_ps(scale), _mm512_set1_ps(zero)));
            continue;
        }
        each_quarter<BITS>(p, BITS == 3 ? top_at(w.codes, c, chunks) : nullptr, table<BITS>(scale, zero),
                           [out](int j, __m512 values) { _mm512_storeu_ps(out + 16 * j, values); });
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

void copy(uint8_t *to, const uint8_t *from, int64_t bytes) {
    if (((uintptr_t)to | (uintptr_t)bytes) & 63) {
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < bytes; i += 64) _mm512_stream_si512((__m512i *)(to + i), load(from + i));
    _mm_sfence();
}

uint64_t read(const uint8_t *from, int64_t bytes, const uint8_t *ahead) {
    __m512i lanes[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
    int64_t i = 0;
    for (; i + 256 <= bytes; i += 256)
        for (int l = 0; l < 4; l++) {
            FLOE_PREFETCH(ahead + i + 64 * l);
            lanes[l] = _mm512_xor_si512(lanes[l], load(from + i + 64 * l));
        }
    uint64_t rest = 0;
    for (; i < bytes; i++) rest ^= from[i];
    const __m512i all = _mm512_xor_si512(_mm512_xor_si512(lanes[0], lanes[1]), _mm512_xor_si512(lanes[2], lanes[3]));
    return rest ^ (uint64_t)_mm512_reduce_add_epi64(all);
}

const RowOps ops = {"avx512", prepare, dot, axpy, finish, expand, add_products, add_active, copy, read};

} // namespace

const RowOps *avx512_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx512_ops() { return nullptr; }
} // namespace floe

#endif
