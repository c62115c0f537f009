// Row operations for AVX-512 with VNNI (Cascade Lake, Zen 4 and later). Codes are multiplied as they are, 64 at a
// time, with the 8-bit digits of x; what takes part in a row's speed is the number of vector operations per group:
// one to isolate the codes (the power of two of their place is undone by the scale), three multiply-adds, two
// shifts, one conversion and one multiply-add with the scale.

#include "row_generic.inl"

#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

#if defined(__GNUC__)
#define FLOE_UNROLL _Pragma("GCC unroll 16")
#else
#define FLOE_UNROLL
#endif

namespace floe {
namespace {

constexpr int64_t kMaxChunks = kMaxChunked / kChunk;

inline __m512i load(const void *p) { return _mm512_loadu_si512(p); }

inline __mmask16 first(int64_t count) { return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1); }

inline __m512 halves(const uint8_t *p, int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(count), p));
}

float place(int bits, int64_t k) {
    static const float two[4] = {1, 4, 16, 64}, three[4] = {1, 4, 16, 16}, four[2] = {1, 16};
    return bits == 2 ? two[k] : bits == 3 ? three[k] : bits == 4 ? four[k] : 1.0f;
}

// Unpacks 64 codes of block `p`, times place(BITS, k).
template <int BITS> inline __m512i codes_at(const uint8_t *p, int k) {
    const __m512i raw = load(BITS == 8 ? p + k * kChunk : p);
    if (BITS == 8) return raw;
    if (BITS == 4) return _mm512_and_si512(raw, _mm512_set1_epi8((char)(k ? 0xf0 : 0x0f)));
    if (BITS == 2) return _mm512_and_si512(raw, _mm512_set1_epi8((char)(3 << (2 * k))));
    const __m512i low = k < 3 ? _mm512_and_si512(raw, _mm512_set1_epi8((char)(3 << (2 * k))))
                              : _mm512_and_si512(_mm512_srli_epi16(raw, 2), _mm512_set1_epi8(0x30));
    // The top bits of 256 codes are 32 bytes: bit 2k of them for codes 0..31 of this chunk, bit 2k + 1 for 32..63.
    const __m512i top = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)(p + 64)));
    const __m512i which = _mm512_inserti64x4(_mm512_set1_epi8((char)(1 << (2 * k))),
                                             _mm256_set1_epi8((char)(2 << (2 * k))), 1);
    const __mmask64 set = _mm512_test_epi8_mask(top, which);
    return _mm512_mask_add_epi8(low, set, low, _mm512_set1_epi8((char)(4 << (k < 3 ? 2 * k : 4))));
}

template <int DIGITS> inline __m512 add_chunk(__m512 sum, __m512i codes, const int8_t *digits, const float *scale) {
    __m512i a = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, load(digits));
    a = _mm512_dpbusd_epi32(_mm512_slli_epi32(a, 7), codes, load(digits + kChunk));
    if (DIGITS == 3) a = _mm512_dpbusd_epi32(_mm512_slli_epi32(a, 7), codes, load(digits + 2 * kChunk));
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(a), _mm512_set1_ps(*scale), sum);
}

// Scale of each chunk, times x's; returns the zero points' share of the result, one lane per group.
inline __m512 scales_for_dot(const floe_vector &v, const Stored &w, const Token &token, float *out) {
    const int64_t groups = v.n / v.group, chunks_per_group = v.group / kChunk;
    __m512 zeros = _mm512_setzero_ps();
    int64_t g = 0;
    for (; chunks_per_group == 1 && g + 16 <= groups; g += 16) {
        const __m512 scale = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w.scale + 2 * g)));
        const __m512 zero = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(w.zero + 2 * g)));
        zeros = _mm512_fnmadd_ps(_mm512_mul_ps(scale, zero), _mm512_loadu_ps(token.sums + g), zeros);
        _mm512_storeu_ps(out + g, _mm512_mul_ps(scale, _mm512_loadu_ps(token.scale + g)));
    }
    for (; g < groups; g += 16) {
        const __mmask16 here = first(groups - g);
        const __m512 scale = halves(w.scale + 2 * g, groups - g);
        const __m512 product = _mm512_mul_ps(scale, halves(w.zero + 2 * g, groups - g));
        zeros = _mm512_fnmadd_ps(product, _mm512_maskz_loadu_ps(here, token.sums + g), zeros);
        const __m512 x = chunks_per_group == 1 ? _mm512_maskz_loadu_ps(here, token.scale + g) : _mm512_set1_ps(1);
        _mm512_mask_storeu_ps(out + g, here, _mm512_mul_ps(scale, x));
    }
    if (chunks_per_group > 1) // from the end, since one group's scale spreads over later places
        for (int64_t c = v.n / kChunk - 1; c >= 0; c--) out[c] = out[c / chunks_per_group] * token.scale[c];
    return zeros;
}

template <int BITS, int DIGITS>
float dot_codes(const floe_vector &v, const Stored &w, const Token &token, uint8_t *scratch, Ahead ahead) {
    // Two blocks of 8 bit make one step, so that each has a sum of its own.
    constexpr int kBlock = BITS == 3 ? 256 : BITS == 8 ? 128 : 512 / BITS, kPerBlock = kBlock / 64;
    constexpr int kBytes = BITS == 3 ? 96 : BITS == 8 ? 128 : 64;
    float scales[kMaxChunks];
    __m512 sum = scales_for_dot(v, w, token, scales), other = _mm512_setzero_ps();
    const uint8_t *p = w.codes;
    const int8_t *digits = token.digits;
    const float *scale = scales;
    const int64_t blocks = v.n / kBlock;
    Pace pace(ahead, blocks);
    for (int64_t b = 0; b < blocks; b++, p += kBytes) {
        pace.step();
        FLOE_UNROLL for (int k = 0; k < kPerBlock; k++, digits += DIGITS * kChunk, scale++) {
            __m512 &to = k % 2 ? other : sum;
            to = add_chunk<DIGITS>(to, codes_at<BITS>(p, k), digits, scale);
        }
    }
    if (blocks * kBlock < v.n) {
        unpack_from(v, p, blocks * kBlock, scratch);
        for (int64_t i = blocks * kBlock; i < v.n; i += kChunk, scratch += kChunk, digits += DIGITS * kChunk, scale++)
            sum = add_chunk<DIGITS>(sum, load(scratch), digits, scale);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(sum, other));
}

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
        FLOE_UNROLL for (int j = 0; j < 4; j++)
            sums[j] = _mm512_fmadd_ps(wide(w.codes + 2 * i + 32 * j, 0xffff, bfloat16),
                                      _mm512_loadu_ps(token.x + i + 16 * j), sums[j]);
    }
    for (; i < v.n; i += 16) {
        const __mmask16 here = first(v.n - i);
        sums[0] = _mm512_fmadd_ps(wide(w.codes + 2 * i, here, bfloat16), _mm512_maskz_loadu_ps(here, token.x + i), sums[0]);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

float dot(const floe_vector &v, const Stored &w, const Token &token, uint8_t *scratch, Ahead ahead) {
    if (v.bits == 16) return dot16(v, w, token, ahead);
    switch (token.digit_count * 16 + v.bits) {
    case 2 * 16 + 2: return dot_codes<2, 2>(v, w, token, scratch, ahead);
    case 2 * 16 + 3: return dot_codes<3, 2>(v, w, token, scratch, ahead);
    case 2 * 16 + 4: return dot_codes<4, 2>(v, w, token, scratch, ahead);
    case 2 * 16 + 8: return dot_codes<8, 2>(v, w, token, scratch, ahead);
    case 3 * 16 + 2: return dot_codes<2, 3>(v, w, token, scratch, ahead);
    case 3 * 16 + 3: return dot_codes<3, 3>(v, w, token, scratch, ahead);
    case 3 * 16 + 4: return dot_codes<4, 3>(v, w, token, scratch, ahead);
    case 3 * 16 + 8: return dot_codes<8, 3>(v, w, token, scratch, ahead);
    default: return generic_dot(v, w, token, scratch, ahead);
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

// One block of codes, dequantized, onto the y that `sums` hold; its chunks' factors follow each other.
template <int BITS> inline void add_block(__m512 *sums, const uint8_t *p, const float *scale, const float *zero) {
    if (BITS == 8) {
        const __m512 factor = _mm512_set1_ps(scale[0]);
        FLOE_UNROLL for (int j = 0; j < 4; j++)
            sums[j] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(bytes16(p + 16 * j)), factor, sums[j]);
        return;
    }
    constexpr int kPerBlock = BITS == 4 ? 2 : 4;
    __m512 values[kPerBlock];
    FLOE_UNROLL for (int k = 0; k < kPerBlock; k++) values[k] = table<BITS>(scale[k], zero[k]);
    FLOE_UNROLL for (int j = 0; j < 4; j++) {
        const __m512i q = bytes16(p + 16 * j);
        FLOE_UNROLL for (int k = 0; k < kPerBlock; k++) {
            __m512i code = _mm512_srli_epi32(q, BITS == 4 ? 4 * k : 2 * k);
            __m512 w;
            if (BITS == 2) { // looks at two bits of each lane
                w = _mm512_permutevar_ps(values[k], code);
            } else { // looks at four bits; three-bit tables repeat after eight
                if (BITS == 3) {
                    const __m512i top = bytes16(p + 64 + 16 * (j & 1));
                    const int bit = 2 * k + j / 2;
                    const __m512i third = bit < 2 ? _mm512_slli_epi32(top, 2 - bit) : _mm512_srli_epi32(top, bit - 2);
                    code = _mm512_ternarylogic_epi32(_mm512_set1_epi32(3), code, third, 0xca);
                }
                w = _mm512_permutexvar_ps(code, values[k]);
            }
            sums[4 * k + j] = _mm512_add_ps(sums[4 * k + j], w);
        }
    }
}

// Blocks `from`..`to` of y, COUNT at a time so that the loop's own work is small beside theirs.
template <int BITS, int COUNT>
void add_blocks(int64_t from, int64_t to, const Stored *w, int count, float *y, const float (*scales)[kMaxChunks],
                const float (*zeros)[kMaxChunks], Pace *paces) {
    constexpr int kBlock = BITS == 3 ? 256 : 512 / BITS, kPerBlock = kBlock / 64, kBytes = BITS == 3 ? 96 : 64;
    constexpr int kVectors = kBlock / 16;
    for (int64_t b = from; b < to; b += COUNT) {
        __m512 sums[COUNT * kVectors];
        float *out = y + b * kBlock;
        FLOE_UNROLL for (int i = 0; i < COUNT * kVectors; i++) sums[i] = _mm512_loadu_ps(out + 16 * i);
        for (int r = 0; r < count; r++) {
            const uint8_t *codes = w[r].codes + b * kBytes;
            const float *scale = scales[r] + b * kPerBlock, *zero = zeros[r] + b * kPerBlock;
            paces[r].step();
            FLOE_UNROLL for (int i = 0; i < COUNT; i++)
                add_block<BITS>(sums + i * kVectors, codes + i * kBytes, scale + i * kPerBlock, zero + i * kPerBlock);
        }
        FLOE_UNROLL for (int i = 0; i < COUNT * kVectors; i++) _mm512_storeu_ps(out + 16 * i, sums[i]);
    }
}

template <int BITS>
void axpy_codes(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                uint8_t *scratch, const Ahead *ahead) {
    constexpr int kBlock = BITS == 3 ? 256 : 512 / BITS, kPerBlock = kBlock / 64, kBytes = BITS == 3 ? 96 : 64;
    constexpr int kCount = 256 / kBlock; // blocks that fill 16 registers
    alignas(64) float scales[kBatch][kMaxChunks], zeros[kBatch][kMaxChunks];
    const int64_t blocks = v.n / kBlock, chunks = v.n / kChunk, even = blocks / kCount * kCount;
    Pace paces[kBatch];
    for (int r = 0; r < count; r++) {
        factors_for_axpy(v, w[r], a[r], scales[r], zeros[r]);
        paces[r] = Pace(ahead[r], even / kCount);
    }
    add_blocks<BITS, kCount>(0, even, w, count, y, scales, zeros, paces);
    if (kCount > 1 && even < blocks) {
        Pace done[kBatch];
        add_blocks<BITS, 1>(even, blocks, w, count, y, scales, zeros, done);
    }
    for (int r = 0; r < count; r++) {
        int64_t c = blocks * kPerBlock;
        if (c < chunks) unpack_from(v, w[r].codes + blocks * kBytes, c * kChunk, scratch);
        for (const uint8_t *codes = scratch; c < chunks; c++, codes += kChunk) {
            const __m512 values = table<BITS>(scales[r][c], zeros[r][c]);
            for (int j = 0; j < 4; j++) {
                float *out = y + c * kChunk + 16 * j;
                const __m512 part = _mm512_permutexvar_ps(bytes16(codes + 16 * j), values);
                _mm512_storeu_ps(out, _mm512_add_ps(_mm512_loadu_ps(out), part));
            }
        }
        for (c = 0; BITS == 8 && c < chunks; c += 16) {
            const __mmask16 here = first(chunks - c);
            const __m512 total = _mm512_add_ps(_mm512_maskz_loadu_ps(here, bias + c), _mm512_load_ps(zeros[r] + c));
            _mm512_mask_storeu_ps(bias + c, here, total);
        }
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
            FLOE_UNROLL for (int j = 0; j < 4; j++)
                sums[j] = _mm512_fmadd_ps(wide(p + 32 * j, 0xffff, bfloat16), factor, sums[j]);
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

void axpy(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias, uint8_t *scratch,
          const Ahead *ahead) {
    if (v.bits == 16) return axpy16(v, w, a, count, y, ahead);
    if (!chunked(v)) return generic_axpy(v, w, a, count, y, bias, scratch, ahead);
    switch (v.bits) {
    case 2: return axpy_codes<2>(v, w, a, count, y, bias, scratch, ahead);
    case 3: return axpy_codes<3>(v, w, a, count, y, bias, scratch, ahead);
    case 4: return axpy_codes<4>(v, w, a, count, y, bias, scratch, ahead);
    default: return axpy_codes<8>(v, w, a, count, y, bias, scratch, ahead);
    }
}

void finish(const floe_vector &v, float *y, const float *bias) {
    if (v.bits != 8 || !chunked(v)) return;
    for (int64_t i = 0; i < v.n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_add_ps(_mm512_loadu_ps(y + i), _mm512_set1_ps(bias[i / kChunk])));
}

void prepare(const floe_vector &v, Token &token) {
    if (chunked(v)) return chunked_prepare(v, token, place);
    token.digit_count = 0;
    plain_sums(v, token);
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
    __m512i lanes[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                        _mm512_setzero_si512()};
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

const RowOps ops = {"avx512", prepare, dot, axpy, finish, copy, read};

} // namespace

const RowOps *avx512_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx512_ops() { return nullptr; }
} // namespace floe

#endif
