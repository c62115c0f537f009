// Row operations for AVX2 with FMA and F16C. Codes of 2 to 4 bits are multiplied with the 8-bit digits of x and added
// in 16 bits; wider codes go through floats.

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

// 32 bytes of codes, plane by plane: one half of a register as row_generic.inl's Fill describes it. `top`: the upper
// bits of its two chunks of 3-bit codes.
template <int BITS> inline void unpack_planes(__m256i raw, const uint8_t *top, __m256i *codes) {
    if (BITS == 4) {
        const __m256i mask = _mm256_set1_epi8(0x0f);
        codes[0] = _mm256_and_si256(raw, mask);
        codes[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
        return;
    }
    const __m256i mask = _mm256_set1_epi8(3);
    codes[0] = _mm256_and_si256(raw, mask);
    codes[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 2), mask);
    codes[2] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
    codes[3] = _mm256_and_si256(_mm256_srli_epi16(raw, 6), mask);
    if (BITS == 2) return;
    // 8 bytes a chunk: bit 2k belongs to the first 8 of a plane's 16 codes, bit 2k + 1 to the rest.
    const __m128i bytes = _mm_loadu_si128((const __m128i *)top);
    const __m256i twice = _mm256_set_m128i(_mm_unpackhi_epi64(bytes, bytes), _mm_unpacklo_epi64(bytes, bytes));
    for (int k = 0; k < 4; k++) {
        const long long low = 0x0101010101010101ll << (2 * k), high = (long long)(0x0202020202020202ull << (2 * k));
        const __m256i bit = _mm256_setr_epi64x(low, high, low, high);
        const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(twice, bit), bit);
        codes[k] = _mm256_or_si256(codes[k], _mm256_and_si256(set, _mm256_set1_epi8(4)));
    }
}

// Integer sums of one half register with one token. 16-bit sums of at most 8 products of 15 and 127 do not overflow.
template <int BITS, int DIGITS> inline __m256 sum_half(const __m256i *codes, const int8_t *digits) {
    constexpr int kPlanes = BITS == 4 ? 2 : 4;
    __m256i total = _mm256_setzero_si256();
    for (int d = 0; d < DIGITS; d++) {
        __m256i a = _mm256_maddubs_epi16(codes[0], load(digits + d * kPlanes * kChunk));
        for (int k = 1; k < kPlanes; k++)
            a = _mm256_add_epi16(a, _mm256_maddubs_epi16(codes[k], load(digits + (d * kPlanes + k) * kChunk)));
        const __m256i weight = _mm256_set1_epi16((short)(1 << (7 * (DIGITS - 1 - d))));
        total = _mm256_add_epi32(total, _mm256_madd_epi16(a, weight));
    }
    return _mm256_cvtepi32_ps(total);
}

inline float half(uint16_t h) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h))); }

inline void halves(const uint8_t *p, int64_t count, float *out) {
    int64_t g = 0;
    for (; g + 8 <= count; g += 8)
        _mm256_storeu_ps(out + g, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 2 * g))));
    for (; g < count; g++) out[g] = half_to_float(load16(p + 2 * g));
}

template <int BITS, int DIGITS>
float dot_codes(const floe_vector &v, const Stored &w, const Token &token, Ahead ahead) {
    constexpr int kPlanes = BITS == 4 ? 2 : 4, kStride = DIGITS * kPlanes * kChunk;
    constexpr int kPerHalf = kPlanes / 2, kBytes = BITS == 3 ? 96 : 64; // chunks in 32 bytes; bytes of a register
    float scales[kMaxChunks + 4], zeros[kMaxChunks];
    const int64_t chunks = v.n / kChunk, per_group = v.group / kChunk;
    Pace pace(ahead, (chunks + kPlanes - 1) / kPlanes);
    halves(w.scale, v.n / v.group, scales);
    halves(w.zero, v.n / v.group, zeros);
    float lanes[8] = {};
    for (int64_t c = chunks - 1; c >= 0; c--) { // from the end, since one group's scale spreads over later places
        lanes[c & 7] -= scales[c / per_group] * zeros[c / per_group] * token.sums[c];
        scales[c] = scales[c / per_group] * token.scale[c];
    }
    for (int64_t c = chunks; c < chunks + 4; c++) scales[c] = 0;
    __m256 sum[2] = {_mm256_loadu_ps(lanes), _mm256_setzero_ps()};
    const uint8_t *p = w.codes;
    const int8_t *digits = token.digits;
    for (int64_t c = 0; c < chunks; c += kPlanes, p += kBytes, digits += kStride) {
        const int64_t here = chunks - c < kPlanes ? chunks - c : kPlanes;
        uint8_t padded[96] = {}; // the last register, if it is not full
        const uint8_t *codes = p, *top = p + 64;
        if (here < kPlanes) {
            memcpy(padded, p, (size_t)(here * 64 / kPlanes));
            if (BITS == 3) memcpy(padded + 64, p + here * 16, (size_t)(here * 8));
            codes = padded;
            top = padded + 64;
        }
        pace.step();
        for (int half = 0; half < 2; half++) {
            __m256i planes[kPlanes];
            unpack_planes<BITS>(load(codes + 32 * half), top + 16 * half, planes);
            const float *scale = scales + c + half * kPerHalf;
            const __m256 factor = kPerHalf == 1 ? _mm256_set1_ps(scale[0])
                                                : _mm256_set_m128(_mm_set1_ps(scale[1]), _mm_set1_ps(scale[0]));
            sum[half] = _mm256_fmadd_ps(sum_half<BITS, DIGITS>(planes, digits + 32 * half), factor, sum[half]);
        }
    }
    return sum8(_mm256_add_ps(sum[0], sum[1]));
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

float dot_one(const floe_vector &v, const Stored &w, const Token &token, Ahead ahead) {
    switch (token.digit_count * 16 + v.bits) {
    case 2 * 16 + 2: return dot_codes<2, 2>(v, w, token, ahead);
    case 2 * 16 + 3: return dot_codes<3, 2>(v, w, token, ahead);
    case 2 * 16 + 4: return dot_codes<4, 2>(v, w, token, ahead);
    case 3 * 16 + 2: return dot_codes<2, 3>(v, w, token, ahead);
    case 3 * 16 + 3: return dot_codes<3, 3>(v, w, token, ahead);
    case 3 * 16 + 4: return dot_codes<4, 3>(v, w, token, ahead);
    default: return v.bits == 16 ? dot16(v, w, token, ahead) : dot8(v, w, token, ahead);
    }
}

void dot(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count, const uint8_t *wanted,
         float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead) {
    if (v.bits < 16 && !chunked(v)) return generic_dot(v, w, rows, tokens, count, wanted, out, scratch, ahead);
    for (int r = 0; r < rows; r++) {
        Ahead rest = ahead[r];
        for (int t = 0; t < count; t++) {
            if (!is_wanted(wanted, r, t)) continue;
            out[r][t] = dot_one(v, w[r], *tokens[t], rest);
            rest.lines = 0;
        }
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
        unpack(v.bits, v.n, w.codes, scratch);
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
        if (v.bits == 16) axpy16(v, w[r], a[r], y);
        else if (chunked(v)) axpy_codes(v, w[r], a[r], y, bias, scratch);
        else generic_axpy_one(v, w[r], a[r], y, scratch);
    }
}

void finish(const floe_vector &v, float *y, const float *bias) {
    if (!chunked(v)) return;
    for (int64_t i = 0; i < v.n; i++) y[i] += bias[i / v.group];
}

void prepare(const floe_vector &v, Token &token) {
    if (chunked(v) && v.bits < 8) return chunked_prepare(v, token);
    token.digit_count = 0;
    plain_sums(v, token);
}

// 64 columns of one token: y += sum of factors[n] · block[which(n)].
template <class Which>
inline void add_row(const float *factors, Which which, int64_t count, const float *block, float *y) {
    __m256 sums[8];
    for (int j = 0; j < 8; j++) sums[j] = _mm256_loadu_ps(y + 8 * j);
    for (int64_t n = 0; n < count; n++) {
        const __m256 factor = _mm256_broadcast_ss(factors + n);
        const float *from = block + which(n) * kChunk;
        for (int j = 0; j < 8; j++) sums[j] = _mm256_fmadd_ps(factor, _mm256_loadu_ps(from + 8 * j), sums[j]);
    }
    for (int j = 0; j < 8; j++) _mm256_storeu_ps(y + 8 * j, sums[j]);
}

void add_products(const float *h, const float *tile, int64_t neurons, int64_t columns, int64_t tokens, float *y,
                  int64_t y_stride) {
    const auto which = [](int64_t n) { return n; };
    int64_t i = 0;
    for (; i + kChunk <= columns; i += kChunk, tile += kTileBlock)
        for (int64_t t = 0; t < tokens; t++) add_row(h + t * kTile, which, neurons, tile, y + t * y_stride + i);
    for (int64_t t = 0; i < columns && t < tokens; t++)
        add_columns(h + t * kTile, which, neurons, tile, 0, columns - i, y + t * y_stride + i);
}

void add_active(const float (*h)[kTile], const uint8_t (*which)[kTile], const uint8_t *counts, const float *tile,
                int64_t columns, int64_t tokens, float *y, int64_t y_stride) {
    int64_t i = 0;
    for (; i + kChunk <= columns; i += kChunk, tile += kTileBlock)
        for (int64_t t = 0; t < tokens; t++)
            add_row(h[t], [&](int64_t n) { return which[t][n]; }, counts[t], tile, y + t * y_stride + i);
    for (int64_t t = 0; i < columns && t < tokens; t++)
        add_columns(
            h[t], [&](int64_t n) { return which[t][n]; }, counts[t], tile, 0, columns - i, y + t * y_stride + i);
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

const RowOps ops = {"avx2", prepare, dot, axpy, finish, generic_expand, add_products, add_active, copy, read};

} // namespace

const RowOps *avx2_ops() { return &ops; }

} // namespace floe

#else

namespace floe {
const RowOps *avx2_ops() { return nullptr; }
} // namespace floe

#endif
