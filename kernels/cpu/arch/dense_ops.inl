// Float32 operations of a decode step's dense part in plain C++; included by every dense_*.cpp (see dense_ops.h).

// Before all that is to be inlined here: functions of other options are not.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math") // else a comparison that NaN might reach keeps loops from becoming vectors
#endif

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include <string.h>

#include "dense_ops.h"
#include "numbers.inl"

#if defined(__GNUC__)
#define FLOE_FETCH(p) __builtin_prefetch((p), 0, 2)
#define FLOE_UNROLL _Pragma("GCC unroll 8")
#else
#define FLOE_UNROLL
#define FLOE_FETCH(p) (void)(p)
#endif

namespace floe {
namespace {

// kLanes, a register's width in floats, is the including file's.
#if defined(__GNUC__)
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
#else
struct Lanes {
    float v[kLanes];
    float operator[](int l) const { return v[l]; }
    void operator+=(const Lanes &other) {
        for (int l = 0; l < kLanes; l++) v[l] += other.v[l];
    }
};
inline Lanes operator*(const Lanes &a, const Lanes &b) {
    Lanes c;
    for (int l = 0; l < kLanes; l++) c.v[l] = a.v[l] * b.v[l];
    return c;
}
inline Lanes operator*(float a, const Lanes &b) {
    Lanes c;
    for (int l = 0; l < kLanes; l++) c.v[l] = a * b.v[l];
    return c;
}
#endif

constexpr int kShared = 4; // query heads, or rows, that meet the same numbers at once
// Stored tokens whose keys do, and registers of their values: as many as leave no register in memory.
constexpr int kTokens = kLanes == 16 ? 4 : 2, kColumns = kTokens;

inline Lanes load(const float *p) {
    Lanes lanes;
    memcpy(&lanes, p, sizeof lanes);
    return lanes;
}

// kLanes float16 values as float32, and back.
inline Lanes load(const uint16_t *p) {
    float wide[kLanes];
#if defined(__AVX512F__)
    _mm512_storeu_ps(wide, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)));
#elif defined(__AVX2__)
    _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)));
#else
    for (int64_t l = 0; l < kLanes; l++) wide[l] = half_to_float(p[l]);
#endif
    return load(wide);
}

// kLanes codes as float32.
inline Lanes load(const int8_t *p) {
    float wide[kLanes];
#if defined(__AVX512F__)
    _mm512_storeu_ps(wide, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p))));
#elif defined(__AVX2__)
    _mm256_storeu_ps(wide, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p))));
#else
    for (int64_t l = 0; l < kLanes; l++) wide[l] = p[l];
#endif
    return load(wide);
}

inline void narrow(const float *p, uint16_t *out) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtps_ph(_mm512_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(_mm256_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT));
#else
    for (int64_t l = 0; l < kLanes; l++) out[l] = float_to_half(p[l]);
#endif
}

inline float one(const float *p) { return *p; }
inline float one(const uint16_t *p) { return half_to_float(*p); }
inline float one(const int8_t *p) { return *p; }

inline void store(float *p, const Lanes &lanes) { memcpy(p, &lanes, sizeof lanes); }

inline float sum_lanes(const Lanes &lanes) {
    float sums[kLanes];
    store(sums, lanes);
    FLOE_UNROLL for (int width = kLanes / 2; width > 0; width /= 2) FLOE_UNROLL for (int l = 0; l < width; l++)
        sums[l] += sums[l + width];
    return sums[0];
}

// The sums of kShared registers.
inline void sum_each(const Lanes *lanes, float *out) {
#if defined(__AVX512F__)
    __m512 a, b, c, d;
    memcpy(&a, lanes, 64), memcpy(&b, lanes + 1, 64), memcpy(&c, lanes + 2, 64), memcpy(&d, lanes + 3, 64);
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); // a b a b in each quarter
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee)); // a b c d
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
    __m256 a, b, c, d;
    memcpy(&a, lanes, 32), memcpy(&b, lanes + 1, 32), memcpy(&c, lanes + 2, 32), memcpy(&d, lanes + 3, 32);
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d)); // a b c d in each half
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int c = 0; c < kShared; c++) out[c] = sum_lanes(lanes[c]);
#endif
}

// The products of TOKENS keys with kShared queries: scores[c * kSpan + t].
template <int TOKENS, typename Stored>
inline void score(const Stored *keys, int64_t stride, const float *queries, int64_t dim, float *scores) {
    Lanes sums[TOKENS][kShared] = {};
    int64_t i = 0;
    for (; i + kLanes <= dim; i += kLanes) {
        Lanes key[TOKENS];
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) key[t] = load(keys + t * stride + i);
        FLOE_UNROLL for (int c = 0; c < kShared; c++) {
            const Lanes query = load(queries + c * dim + i);
            FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[t][c] += key[t] * query;
        }
    }
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
        float found[kShared];
        sum_each(sums[t], found);
        for (int c = 0; c < kShared; c++) {
            for (int64_t rest = i; rest < dim; rest++)
                found[c] += one(keys + t * stride + rest) * queries[c * dim + rest];
            scores[c * kSpan + t] = found[c];
        }
    }
}

// out[c] = w · x_c for COUNT vectors x_c, which lie `stride` apart.
template <int COUNT, typename Stored>
inline void dot(const Stored *w, const float *x, int64_t stride, int64_t n, float *out) {
    Lanes even[COUNT] = {}, odd[COUNT] = {};
    int64_t i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        const Lanes first = load(w + i), second = load(w + i + kLanes);
        FLOE_UNROLL for (int c = 0; c < COUNT; c++) {
            even[c] += first * load(x + c * stride + i);
            odd[c] += second * load(x + c * stride + i + kLanes);
        }
    }
    if (i + kLanes <= n) {
        const Lanes last = load(w + i);
        FLOE_UNROLL for (int c = 0; c < COUNT; c++) even[c] += last * load(x + c * stride + i);
        i += kLanes;
    }
    FLOE_UNROLL for (int c = 0; c < COUNT; c++) {
        even[c] += odd[c];
        out[c] = sum_lanes(even[c]);
        for (int64_t rest = i; rest < n; rest++) out[c] += one(w + rest) * x[c * stride + rest];
    }
}

void multiply(const float *w, const float *x, int64_t rows, int64_t n, float *y) {
    int64_t r = 0;
    for (; r + kShared <= rows; r += kShared) dot<kShared>(x, w + r * n, n, n, y + r);
    for (; r < rows; r++) dot<1>(x, w + r * n, n, n, y + r);
}

// Cephes' expf: 2^k · polynomial, with ln 2 in two parts; below -87 it stays at the smallest normal number.
inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;                         // NaN is not
    const float shifted = x * 1.44269504f + 12582912.0f; // 1.5 · 2^23: the sum's last bits are the integer
    const float k = shifted - 12582912.0f;
    const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (bits + 127u) << 23; // 2^k
    float power;
    memcpy(&power, &bits, 4);
    return p * power;
}

// NaN is smaller than any number, but as the first of all the largest.
float largest(const float *x, int64_t n) {
    float most[kLanes];
    for (int64_t l = 0; l < kLanes; l++) most[l] = x[l < n ? l : 0];
    int64_t i = kLanes;
    for (; i + kLanes <= n; i += kLanes)
        for (int64_t l = 0; l < kLanes; l++) most[l] = x[i + l] > most[l] ? x[i + l] : most[l];
    for (; i < n; i++) most[0] = x[i] > most[0] ? x[i] : most[0];
    for (int64_t l = 1; l < kLanes; l++) most[0] = most[l] > most[0] ? most[l] : most[0];
    return most[0];
}

float exponentials(float *x, int64_t n, float most) {
    for (int64_t i = 0; i < n; i++) x[i] = exponential(x[i] - most);
    Lanes lanes = {};
    float total = 0;
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) lanes += load(x + i);
    for (; i < n; i++) total += x[i];
    return total + sum_lanes(lanes);
}

// What COUNT heads' scores (kSpan apart) add up of one key head's values: WIDTH registers' columns from v on.
template <int COUNT, int WIDTH, typename Stored>
inline void add_values(const float *scores, const Stored *v, int64_t stride, int64_t tokens, float *sums, int64_t dim) {
    Lanes total[COUNT][WIDTH] = {};
    for (int64_t t = 0; t < tokens; t++, v += stride) FLOE_UNROLL for (int w = 0; w < WIDTH; w++) {
            const Lanes value = load(v + w * kLanes);
            FLOE_UNROLL for (int c = 0; c < COUNT; c++) total[c][w] += scores[c * kSpan + t] * value;
        }
    FLOE_UNROLL for (int c = 0; c < COUNT; c++) FLOE_UNROLL for (int w = 0; w < WIDTH; w++)
        store(sums + c * dim + w * kLanes, total[c][w]);
}

template <int COUNT, typename Stored>
void add_all_values(const Heads &h, const float *scores, const Stored *v, int64_t tokens, float *sums) {
    const int64_t width = h.value();
    int64_t d = 0;
    for (; d + kColumns * kLanes <= width; d += kColumns * kLanes)
        add_values<COUNT, kColumns>(scores, v + d, h.stride(), tokens, sums + d, width);
    for (; d + kLanes <= width; d += kLanes) add_values<COUNT, 1>(scores, v + d, h.stride(), tokens, sums + d, width);
    for (; d < width; d++)
        for (int c = 0; c < COUNT; c++) {
            float sum = 0;
            for (int64_t t = 0; t < tokens; t++) sum += scores[c * kSpan + t] * one(v + t * h.stride() + d);
            sums[c * width + d] = sum;
        }
}

// Where `tokens` stored tokens' codes have scales, the numbers of each query (kSpan apart) times those of its row;
// first: 0 for keys, kv_heads for values.
void scale_numbers(const Heads &h, const void *kv, int64_t tokens, int64_t first, float *numbers) {
    if (h.stored != FLOE_KEPT_CODES) return;
    for (int64_t g = 0; g < h.kv_heads; g++) {
        const uint8_t *at = (const uint8_t *)kv + h.numbers() + 2 * (first + g);
        float scales[kSpan];
        for (int64_t t = 0; t < tokens; t++) scales[t] = half_to_float(load16(at + t * h.bytes()));
        for (int64_t q = g * h.group(); q < (g + 1) * h.group(); q++)
            for (int64_t t = 0; t < tokens; t++) numbers[q * kSpan + t] *= scales[t];
    }
}

template <typename Stored>
void attend_to(const Heads &h, const float *queries, const Stored *kv, int64_t tokens, float *scores, Share *shares,
               float *sums) {
    const int64_t group = h.group(), stride = h.stride(), dim = h.dim;
    for (int64_t t = 0; t < tokens;) { // all keys of a token, in the order in which they lie
        const int64_t taken = t + kTokens <= tokens ? kTokens : 1;
        const Stored *keys = kv + t * stride;
        for (int64_t next = 0; next < taken; next++)
            for (int64_t i = 0; i < h.values_at(); i += 64 / (int64_t)sizeof(Stored))
                FLOE_FETCH(keys + next * stride + h.values_at() + i); // as many values as keys
        for (int64_t g = 0; g < h.kv_heads; g++, keys += dim) {
            int64_t q = g * group;
            for (; q + kShared <= (g + 1) * group; q += kShared)
                if (taken == kTokens) score<kTokens>(keys, stride, queries + q * dim, dim, scores + q * kSpan + t);
                else score<1>(keys, stride, queries + q * dim, dim, scores + q * kSpan + t);
            for (; q < (g + 1) * group; q++)
                for (int64_t next = 0; next < taken; next++)
                    dot<1>(keys + next * stride, queries + q * dim, dim, dim, scores + q * kSpan + t + next);
        }
        t += taken;
    }
    scale_numbers(h, kv, tokens, 0, scores);
    for (int64_t q = 0; q < h.heads; q++) {
        const float most = largest(scores + q * kSpan, tokens);
        shares[q] = {most, exponentials(scores + q * kSpan, tokens, most)};
    }
    scale_numbers(h, kv, tokens, h.kv_heads, scores);
    const Stored *values = kv + h.values_at();
    const int64_t width = h.value();
    for (int64_t g = 0; g < h.kv_heads; g++, values += width) {
        int64_t q = g * group;
        for (; q + kShared <= (g + 1) * group; q += kShared)
            add_all_values<kShared>(h, scores + q * kSpan, values, tokens, sums + q * width);
        for (; q < (g + 1) * group; q++) add_all_values<1>(h, scores + q * kSpan, values, tokens, sums + q * width);
    }
}

void attend(const Heads &h, const float *queries, const void *kv, int64_t tokens, float *scores, Share *shares,
            float *sums) {
    if (h.stored == FLOE_KEPT_CODES) attend_to(h, queries, (const int8_t *)kv, tokens, scores, shares, sums);
    else if (h.stored == FLOE_KEPT_HALF) attend_to(h, queries, (const uint16_t *)kv, tokens, scores, shares, sums);
    else attend_to(h, queries, (const float *)kv, tokens, scores, shares, sums);
}

// One row as codes, and its scale: `entries.stored`. What is not finite makes the scale none.
uint16_t encode(const float *values, int64_t dim, int8_t *codes) {
    float most = 0, nothing = 0;
    for (int64_t d = 0; d < dim; d++) {
        const float size = values[d] < 0 ? -values[d] : values[d];
        most = size > most ? size : most;
        nothing += values[d] * 0.0f;
    }
    const uint16_t scale = float_to_half(most / 127.0f + nothing);
    const float factor = half_to_float(scale);
    if (!(factor > 0)) {
        memset(codes, 0, (size_t)dim);
        return scale;
    }
    for (int64_t d = 0; d < dim; d++) {
        const float nearest = (values[d] / factor + 12582912.0f) - 12582912.0f; // 1.5 · 2^23: rounds to an integer
        codes[d] = (int8_t)(nearest < -127.0f ? -127.0f : nearest > 127.0f ? 127.0f : nearest);
    }
    return scale;
}

// Past the caches where it can be: the next token needs it when other layers' states have been there.
inline void put_away(const Lanes &lanes, float *p) {
#if defined(__GNUC__) && defined(__AVX512F__)
    if (((uintptr_t)p & 63) == 0) return _mm512_stream_ps(p, (__m512)lanes);
#elif defined(__GNUC__) && defined(__AVX2__)
    if (((uintptr_t)p & 31) == 0) return _mm256_stream_ps(p, (__m256)lanes);
#endif
    memcpy(p, &lanes, sizeof lanes);
}

// Columns of a state: as many as leave a head's in the first cache between its two readings.
template <int kWide>
void delta_columns(const float *before, int64_t keys, int64_t stride, const float *q, const float *k, const float *v,
                   float decay, float beta, float both, float *after, float *out) {
    Lanes recalled[kWide] = {}, seen[kWide] = {};
    for (int64_t i = 0; i < keys; i++) FLOE_UNROLL
    for (int c = 0; c < kWide; c++) {
        const Lanes s = load(before + i * stride + c * kLanes);
        recalled[c] += k[i] * s;
        seen[c] += q[i] * s;
    }
    Lanes change[kWide];
    FLOE_UNROLL
    for (int c = 0; c < kWide; c++) {
        Lanes own = load(v + c * kLanes);
        own += -decay * recalled[c];
        change[c] = beta * own;
        Lanes y = decay * seen[c];
        y += both * change[c];
        memcpy(out + c * kLanes, &y, sizeof y);
    }
    for (int64_t i = 0; i < keys; i++) FLOE_UNROLL
    for (int c = 0; c < kWide; c++) {
        Lanes s = decay * load(before + i * stride + c * kLanes);
        s += k[i] * change[c];
        put_away(s, after + i * stride + c * kLanes);
    }
}

void delta(const float *before, int64_t keys, int64_t values, const float *q, const float *k, const float *v,
           float decay, float beta, float *after, float *out) {
    float both = 0;
    for (int64_t i = 0; i < keys; i++) both += q[i] * k[i];
    int64_t c = 0;
    for (; c + 4 * kLanes <= values; c += 4 * kLanes)
        delta_columns<4>(before + c, keys, values, q, k, v + c, decay, beta, both, after + c, out + c);
    for (; c + kLanes <= values; c += kLanes)
        delta_columns<1>(before + c, keys, values, q, k, v + c, decay, beta, both, after + c, out + c);
    for (; c < values; c++) {
        float recalled = 0, seen = 0;
        for (int64_t i = 0; i < keys; i++)
            recalled += k[i] * before[i * values + c], seen += q[i] * before[i * values + c];
        const float change = beta * (v[c] - decay * recalled);
        out[c] = decay * seen + both * change;
        for (int64_t i = 0; i < keys; i++) after[i * values + c] = decay * before[i * values + c] + k[i] * change;
    }
#if defined(__AVX2__)
    _mm_sfence(); // what was put away is there for other threads
#endif
}

// ROWS rows and WIDE registers' columns of c.
template <int ROWS, int WIDE>
inline void add_tile(const float *m, int64_t m_stride, const float *b, int64_t b_stride, int64_t inner, float *c,
                     int64_t c_stride) {
    Lanes sums[ROWS][WIDE];
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int w = 0; w < WIDE; w++) sums[r][w] =
        load(c + r * c_stride + w * kLanes);
    for (int64_t i = 0; i < inner; i++, b += b_stride) {
        Lanes row[WIDE];
        FLOE_UNROLL for (int w = 0; w < WIDE; w++) row[w] = load(b + w * kLanes);
        FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int w = 0; w < WIDE; w++) sums[r][w] +=
            m[r * m_stride + i] * row[w];
    }
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int w = 0; w < WIDE; w++)
        store(c + r * c_stride + w * kLanes, sums[r][w]);
}

template <int ROWS>
void add_rows(const float *m, int64_t m_stride, const float *b, int64_t b_stride, int64_t inner, int64_t columns,
              float *c, int64_t c_stride) {
    int64_t j = 0;
    for (; j + kColumns * kLanes <= columns; j += kColumns * kLanes)
        add_tile<ROWS, kColumns>(m, m_stride, b + j, b_stride, inner, c + j, c_stride);
    for (; j + kLanes <= columns; j += kLanes) add_tile<ROWS, 1>(m, m_stride, b + j, b_stride, inner, c + j, c_stride);
    for (; j < columns; j++)
        for (int r = 0; r < ROWS; r++)
            for (int64_t i = 0; i < inner; i++) c[r * c_stride + j] += m[r * m_stride + i] * b[i * b_stride + j];
}

void add_product(const float *m, int64_t m_stride, const float *b, int64_t b_stride, int64_t rows, int64_t inner,
                 int64_t columns, float *c, int64_t c_stride) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4)
        add_rows<4>(m + r * m_stride, m_stride, b, b_stride, inner, columns, c + r * c_stride, c_stride);
    for (; r < rows; r++)
        add_rows<1>(m + r * m_stride, m_stride, b, b_stride, inner, columns, c + r * c_stride, c_stride);
}

void keep(const Heads &h, const float *values, void *kv) {
    if (h.stored == FLOE_KEPT_FLOAT) {
        memcpy(kv, values, (size_t)h.bytes());
        return;
    }
    if (h.stored == FLOE_KEPT_CODES) {
        int8_t *codes = (int8_t *)kv;
        for (int64_t row = 0; row < 2 * h.kv_heads; row++) {
            const uint16_t scale = encode(values + row * h.dim, h.dim, codes + row * h.dim);
            memcpy(codes + h.numbers() + 2 * row, &scale, 2);
        }
        return;
    }
    uint16_t *out = (uint16_t *)kv;
    int64_t i = 0;
    for (; i + kLanes <= h.stride(); i += kLanes) narrow(values + i, out + i);
    for (; i < h.stride(); i++) out[i] = float_to_half(values[i]);
}

} // namespace
} // namespace floe
