// Row operations for AVX2 with FMA and F16C. Codes of 2 to 4 bits are multiplied with the 8-bit digits of x in
// 16-bit pairs, which codes of at most 112 (7 · 16) times 127 cannot overflow; wider codes go through floats.

#include "row_generic.inl"

#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

namespace floe {
namespace {

constexpr int64_t kMaxChunks = kMaxChunked / kChunk;

inline __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }

inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

float place(int bits, int64_t k) {
    static const float small[4] = {1, 4, 16, 16};
    return bits < 4 ? small[k] : 1.0f;
}

// 32 of the 64 codes of chunk k of block `p`, times place(BITS, k).
template <int BITS> inline __m256i codes_at(const uint8_t *p, int k, int half) {
    const __m256i raw = load(p + 32 * half);
    if (BITS == 4) return _mm256_and_si256(k ? _mm256_srli_epi16(raw, 4) : raw, _mm256_set1_epi8(0x0f));
    const __m256i low = k < 3 ? _mm256_and_si256(raw, _mm256_set1_epi8((char)(3 << (2 * k))))
                              : _mm256_and_si256(_mm256_srli_epi16(raw, 2), _mm256_set1_epi8(0x30));
    if (BITS == 2) return low;
    const __m256i bit = _mm256_set1_epi8((char)(1 << (2 * k + half)));
    const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(load(p + 64), bit), bit);
    return _mm256_or_si256(low, _mm256_and_si256(set, _mm256_set1_epi8((char)(4 << (k < 3 ? 2 * k : 4)))));
}

template <int DIGITS> inline __m256 add_half(__m256 sum, __m256i codes, const int8_t *digits, __m256 scale) {
    const __m256i hi = _mm256_maddubs_epi16(codes, load(digits));
    const __m256i mid = _mm256_maddubs_epi16(codes, load(digits + kChunk));
    __m256i a;
    if (DIGITS == 3) {
        const __m256i lo = _mm256_maddubs_epi16(codes, load(digits + 2 * kChunk));
        a = _mm256_add_epi32(_mm256_madd_epi16(hi, _mm256_set1_epi16(16384)),
                             _mm256_madd_epi16(mid, _mm256_set1_epi16(128)));
        a = _mm256_add_epi32(a, _mm256_madd_epi16(lo, _mm256_set1_epi16(1)));
    } else {
        a = _mm256_add_epi32(_mm256_madd_epi16(hi, _mm256_set1_epi16(128)),
                             _mm256_madd_epi16(mid, _mm256_set1_epi16(1)));
    }
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(a), scale, sum);
}

inline float half(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

inline void halves(const uint8_t *p, int64_t count, float *out) {
    int64_t g = 0;
    for (; g + 8 <= count; g += 8)
        _mm256_storeu_ps(out + g, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * g))));
    for (; g < count; g++) out[g] = half_to_float(load16(p + 2 * g));
}

template <int BITS, int DIGITS>
float dot_codes(const floe_vector &v, const Stored &w, const Token &token, uint8_t *scratch, Ahead ahead) {
    constexpr int kBlock = BITS == 3 ? 256 : 512 / BITS, kPerBlock = kBlock / 64, kBytes = BITS == 3 ? 96 : 64;
    float scales[kMaxChunks], zeros[kMaxChunks];
    const int64_t groups = v.n / v.group, per_group = v.group / kChunk, blocks = v.n / kBlock;
    Pace pace(ahead, blocks);
    halves(w.scale, groups, scales);
    halves(w.zero, groups, zeros);
    float lanes[8] = {};
    for (int64_t g = 0; g < groups; g++) lanes[g & 7] -= scales[g] * zeros[g] * token.sums[g];
    __m256 sum = _mm256_loadu_ps(lanes), other = _mm256_setzero_ps();
    const uint8_t *p = w.codes;
    const int8_t *digits = token.digits;
    int64_t c = 0;
    for (int64_t b = 0; b < blocks; b++, p += kBytes) {
        pace.step();
        for (int k = 0; k < kPerBlock; k++, digits += DIGITS * kChunk, c++) {
            const __m256 scale = _mm256_set1_ps(scales[per_group == 1 ? c : c / per_group] * token.scale[c]);
            sum = add_half<DIGITS>(sum, codes_at<BITS>(p, k, 0), digits, scale);
            other = add_half<DIGITS>(other, codes_at<BITS>(p, k, 1), digits + 32, scale);
        }
    }
    if (c * kChunk < v.n) {
        unpack_from(v, p, c * kChunk, scratch);
        for (; c * kChunk < v.n; c++, scratch += kChunk, digits += DIGITS * kChunk) {
            const __m256 scale = _mm256_set1_ps(scales[c / per_group] * token.scale[c]);
            sum = add_half<DIGITS>(sum, load(scratch), digits, scale);
            other = add_half<DIGITS>(other, load(scratch + 32), digits + 32, scale);
        }
    }
    return sum8(_mm256_add_ps(sum, other));
}

inline __m256 bytes8(const uint8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

float dot8(const floe_vector &v, const Stored &w, const Token &token, Ahead ahead) {
    Pace pace(ahead, v.n / v.group);
    __m256 sum = _mm256_setzero_ps();
    float zeros = 0;
    for (int64_t g = 0; g < v.n / v.group; g++) {
        const uint8_t *q = w.codes + g * v.group;
        const float *x = token.x + g * v.group;
        __m256 a = _mm256_setzero_ps(), b = _mm256_setzero_ps();
        pace.step();
        for (int64_t i = 0; i < v.group; i += 16) {
            a = _mm256_fmadd_ps(bytes8(q + i), _mm256_loadu_ps(x + i), a);
            b = _mm256_fmadd_ps(bytes8(q + i + 8), _mm256_loadu_ps(x + i + 8), b);
        }
        const float scale = half(load16(w.scale + 2 * g));
        sum = _mm256_fmadd_ps(_mm256_add_ps(a, b), _mm256_set1_ps(scale), sum);
        zeros += scale * half(load16(w.zero + 2 * g)) * token.sums[g];
    }
    return sum8(sum) - zeros;
}

inline __m256 wide(const uint8_t *p, bool bfloat16) {
    const __m128i raw = _mm_loadu_si128((const __m128i *)p);
    if (bfloat16) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
    return _mm256_cvtph_ps(raw);
}

float dot16(const floe_vector &v, const Stored &w, const Token &token, Ahead ahead) {
    Pace pace(ahead, v.n / 32);
    __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= v.n; i += 32) {
        pace.step();
        for (int l = 0; l < 4; l++)
            sums[l] = _mm256_fmadd_ps(wide(w.codes + 2 * (i + 8 * l), v.bfloat16 != 0),
                                      _mm256_loadu_ps(token.x + i + 8 * l), sums[l]);
    }
    float rest = 0;
    for (; i < v.n; i++) rest += wide16(load16(w.codes + 2 * i), v.bfloat16) * token.x[i];
    return rest + sum8(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
}

float dot(const floe_vector &v, const Stored &w, const Token &token, uint8_t *scratch, Ahead ahead) {
    if (v.bits == 16) return dot16(v, w, token, ahead);
    if (v.bits == 8 && chunked(v)) return dot8(v, w, token, ahead);
    switch (token.digit_count * 16 + v.bits) {
    case 2 * 16 + 2: return dot_codes<2, 2>(v, w, token, scratch, ahead);
    case 2 * 16 + 3: return dot_codes<3, 2>(v, w, token, scratch, ahead);
    case 2 * 16 + 4: return dot_codes<4, 2>(v, w, token, scratch, ahead);
    case 3 * 16 + 2: return dot_codes<2, 3>(v, w, token, scratch, ahead);
    case 3 * 16 + 3: return dot_codes<3, 3>(v, w, token, scratch, ahead);
    case 3 * 16 + 4: return dot_codes<4, 3>(v, w, token, scratch, ahead);
    default: return generic_dot(v, w, token, scratch, ahead);
    }
}

inline void add_bytes(float *y, const uint8_t *codes, int64_t count, __m256 scale) {
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(bytes8(codes + i), scale, _mm256_loadu_ps(y + i)));
}

void axpy_codes(const floe_vector &v, const Stored &w, float a, float *y, float *bias, uint8_t *scratch) {
    const int64_t groups = v.n / v.group;
    const uint8_t *codes = w.codes;
    if (v.bits != 8) {
        unpack_from(v, w.codes, 0, scratch);
        codes = scratch;
    }
    for (int64_t g = 0; g < groups; g++) {
        const float scale = a * half(load16(w.scale + 2 * g));
        bias[g] -= scale * half(load16(w.zero + 2 * g));
        add_bytes(y + g * v.group, codes + g * v.group, v.group, _mm256_set1_ps(scale));
    }
}

void axpy16(const floe_vector &v, const Stored &w, float a, float *y) {
    const __m256 factor = _mm256_set1_ps(a);
    int64_t i = 0;
    for (; i + 8 <= v.n; i += 8) {
        const __m256 weights = wide(w.codes + 2 * i, v.bfloat16 != 0);
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(weights, factor, _mm256_loadu_ps(y + i)));
    }
    for (; i < v.n; i++) y[i] += a * wide16(load16(w.codes + 2 * i), v.bfloat16);
}

void axpy(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias, uint8_t *scratch,
          const Ahead *ahead) {
    for (int r = 0; r < count; r++) {
        Pace(ahead[r], 0);
        if (v.bits == 16)
            axpy16(v, w[r], a[r], y);
        else if (chunked(v))
            axpy_codes(v, w[r], a[r], y, bias, scratch);
        else
            generic_axpy_one(v, w[r], a[r], y, scratch);
    }
}

void finish(const floe_vector &v, float *y, const float *bias) {
    if (!chunked(v)) return;
    for (int64_t i = 0; i < v.n; i++) y[i] += bias[i / v.group];
}

void prepare(const floe_vector &v, Token &token) {
    if (chunked(v) && v.bits < 8) return chunked_prepare(v, token, place);
    token.digit_count = 0;
    plain_sums(v, token);
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
        for (int l = 0; l < 2; l++) lanes[l] = _mm256_xor_si256(lanes[l], load(from + i + 32 * l));
    }
    uint64_t words[4], rest = 0;
    _mm256_storeu_si256((__m256i *)words, _mm256_xor_si256(lanes[0], lanes[1]));
    for (; i < bytes; i++) rest ^= from[i];
    return rest ^ words[0] ^ words[1] ^ words[2] ^ words[3];
}

const RowOps ops = {"avx2", prepare, dot, axpy, finish, copy, read};

} // namespace

const RowOps *avx2_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx2_ops() { return nullptr; }
} // namespace floe

#endif
