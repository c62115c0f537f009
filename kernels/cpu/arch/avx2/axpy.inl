// Sums of stored vectors in AVX2; included by row.cpp.

namespace floe {
namespace {

// a · scale of each chunk, and its zero point's share into the bias of each group.
inline void factors_for_axpy(const floe_vector &v, const Stored &w, float a, float *scales, float *bias) {
    const int64_t groups = v.n / v.group, per_group = v.group / kChunk;
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8) {
        const __m256 scale = _mm256_mul_ps(_mm256_set1_ps(a), scales8(v, w, g));
        const __m256 zero = zeros8(v, w, g);
        _mm256_storeu_ps(scales + g, scale);
        _mm256_storeu_ps(bias + g, _mm256_fnmadd_ps(scale, zero, _mm256_loadu_ps(bias + g)));
    }
    for (; g < groups; g++) {
        scales[g] = a * scale_at(v, w, g);
        bias[g] -= scales[g] * zero_at(v, w, g);
    }
    for (int64_t c = v.n / kChunk - 1; per_group > 1 && c >= 0; c--) scales[c] = scales[c / per_group];
}

// What follows a batch of vectors, fetched line by line of all of them at once, evenly over the steps of a loop.
struct Columns {
    const Ahead *ahead;
    int64_t steps, lines, due, offset;
    int rows; // the first ones, of equally many lines

    Columns(const Ahead *ahead, int count, int64_t steps)
        : ahead(ahead), steps(steps), lines(ahead[0].lines), due(0), offset(0), rows(0) {
        while (rows < count && ahead[rows].lines == lines) rows++;
    }

    void step() {
        for (due += lines; due >= steps; due -= steps, offset += 64)
            for (int r = 0; r < rows; r++) FLOE_PREFETCH(ahead[r].at + offset);
    }
};

template <int BITS>
void axpy_codes(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                const Ahead *ahead) {
    float scales[kBatch][kMaxChunks];
    const int64_t chunks = v.n / kChunk;
    Columns next(ahead, count, chunks);
    for (int r = 0; r < count; r++) factors_for_axpy(v, w[r], a[r], scales[r], bias);
    for (int64_t c = 0; c < chunks; c++, y += kChunk) {
        next.step();
        __m256 sums[8];
        FLOE_UNROLL for (int j = 0; j < 8; j++) sums[j] = _mm256_loadu_ps(y + 8 * j);
        for (int r = 0; r < count; r++) {
            const __m256 factor = _mm256_broadcast_ss(scales[r] + c);
            each_eight<BITS>(
                chunk_at<BITS>(w[r].codes, c), BITS == 3 ? top_at(w[r].codes, c, chunks) : nullptr,
                [&](int j, __m256i q) { sums[j] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(q), factor, sums[j]); });
        }
        FLOE_UNROLL for (int j = 0; j < 8; j++) _mm256_storeu_ps(y + 8 * j, sums[j]);
    }
}

// a · scale of a batch of 4-bit vectors as multiples, of two digits of a byte each, of a step that each chunk has for
// itself.
struct Factors {
    int32_t pairs[2][kBatch / 2][kMaxChunks];    // by digit, the higher first: of two vectors each, twice side by side
    float steps[kMaxChunks], shares[kMaxChunks]; // shares: of the zero points
};

inline __m256i pair_up(__m256i first, __m256i second) {
    const __m256i byte = _mm256_set1_epi32(0xff);
    const __m256i both =
        _mm256_or_si256(_mm256_and_si256(first, byte), _mm256_slli_epi32(_mm256_and_si256(second, byte), 8));
    return _mm256_or_si256(both, _mm256_slli_epi32(both, 16));
}

// Eight chunks from c on. False if a factor is not finite.
inline bool make_factors(const floe_vector &v, const Stored *w, const float *a, int count, int64_t c, Factors &out) {
    constexpr float kMost = 127 * 128;
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 factors[kBatch], largest = _mm256_setzero_ps(), finite = _mm256_setzero_ps();
    for (int r = 0; r < count; r++) {
        factors[r] = _mm256_mul_ps(_mm256_set1_ps(a[r]), scales8(v, w[r], c));
        largest = _mm256_max_ps(_mm256_andnot_ps(sign, factors[r]), largest); // of two that are not ordered, the second
        finite = _mm256_add_ps(finite, _mm256_sub_ps(factors[r], factors[r])); // 0, or not a number
    }
    if (_mm256_movemask_ps(_mm256_cmp_ps(finite, _mm256_setzero_ps(), _CMP_EQ_OQ)) != 0xff) return false;
    // Nothing, and not a division by it, where all factors are too small for a step.
    const __m256 some = _mm256_cmp_ps(largest, _mm256_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m256 step = _mm256_and_ps(some, _mm256_mul_ps(largest, _mm256_set1_ps(1.0f / kMost)));
    const __m256 inverse = _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(kMost), largest));
    __m256 share = _mm256_setzero_ps();
    __m256i high[kBatch] = {}, low[kBatch] = {};
    for (int r = 0; r < count; r++) {
        const __m256i whole = _mm256_cvtps_epi32(_mm256_mul_ps(factors[r], inverse));
        share = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), zeros8(v, w[r], c), share);
        high[r] = _mm256_srai_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(64)), 7);
        low[r] = _mm256_sub_epi32(whole, _mm256_slli_epi32(high[r], 7));
    }
    for (int p = 0; p < kBatch / 2; p++) {
        _mm256_storeu_si256((__m256i *)(out.pairs[0][p] + c), pair_up(high[2 * p], high[2 * p + 1]));
        _mm256_storeu_si256((__m256i *)(out.pairs[1][p] + c), pair_up(low[2 * p], low[2 * p + 1]));
    }
    _mm256_storeu_ps(out.steps + c, step);
    _mm256_storeu_ps(out.shares + c, _mm256_mul_ps(share, step));
    return true;
}

// Eight 16-bit sums of each digit onto y.
inline void add_eight(float *y, __m128i high, __m128i low, __m256 step) {
    const __m256i whole =
        _mm256_add_epi32(_mm256_slli_epi32(_mm256_cvtepi16_epi32(high), 7), _mm256_cvtepi16_epi32(low));
    _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), step, _mm256_loadu_ps(y)));
}

// One chunk of all vectors onto y: the codes of two vectors stand side by side in 16 bits, so that one multiplication
// adds up both, and 16-bit sums of kBatch products of 15 and 127 do not overflow.
template <bool FULL> inline void add_chunk(const Stored *w, int count, int64_t c, const Factors &factors, float *y) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    __m256i sums[2][2][2] = {}; // by digit, the lower and upper codes, of bytes 0 to 7 of each lane and of the others
    FLOE_UNROLL for (int r = 0; r < (FULL ? kBatch : count); r += 2) {
        const __m256i first = load(w[r].codes + 32 * c);
        const __m256i second = load(w[FULL || r + 1 < count ? r + 1 : r].codes + 32 * c); // too many are times 0
        const __m256i factor[2] = {_mm256_set1_epi32(factors.pairs[0][r / 2][c]),
                                   _mm256_set1_epi32(factors.pairs[1][r / 2][c])};
        FLOE_UNROLL for (int h = 0; h < 2; h++) {
            const __m256i bytes = h ? _mm256_unpackhi_epi8(first, second) : _mm256_unpacklo_epi8(first, second);
            const __m256i codes[2] = {_mm256_and_si256(bytes, nibble),
                                      _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble)};
            FLOE_UNROLL for (int d = 0; d < 2; d++) FLOE_UNROLL for (int k = 0; k < 2; k++) sums[d][k][h] =
                _mm256_add_epi16(sums[d][k][h], _mm256_maddubs_epi16(codes[k], factor[d]));
        }
    }
    const __m256 step = _mm256_broadcast_ss(factors.steps + c);
    FLOE_UNROLL for (int k = 0; k < 2; k++) FLOE_UNROLL for (int h = 0; h < 2; h++) {
        float *const out = y + 32 * k + 8 * h;
        const __m256i high = sums[0][k][h], low = sums[1][k][h];
        add_eight(out, _mm256_castsi256_si128(high), _mm256_castsi256_si128(low), step);
        add_eight(out + 16, _mm256_extracti128_si256(high, 1), _mm256_extracti128_si256(low, 1), step);
    }
}

// 4-bit vectors with a scale per chunk, in integers. False, with nothing added, if they are shorter than a section or a
// factor is not finite.
bool axpy_nibbles(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                  const Ahead *ahead) {
    const int64_t chunks = v.n / kChunk;
    if (chunks < kSection) return false;
    Factors factors;
    for (int64_t c = 0; c < chunks; c += kSection) { // the last eight in any case, of which some may be there already
        const int64_t start = c + kSection <= chunks ? c : chunks - kSection;
        if (!make_factors(v, w, a, count, start, factors)) return false;
    }
    for (int64_t c = 0; c < chunks; c++) bias[c] -= factors.shares[c];
    Columns next(ahead, count, chunks);
    for (int64_t c = 0; c < chunks; c++, y += kChunk) {
        next.step();
        if (count == kBatch) add_chunk<true>(w, count, c, factors, y);
        else add_chunk<false>(w, count, c, factors, y);
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
    if (v.bits == 4 && v.group == kChunk && digits < 3 && axpy_nibbles(v, w, a, count, y, bias, ahead)) return;
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

} // namespace
} // namespace floe
