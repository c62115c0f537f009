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

// a · scale of a batch of 4-bit vectors as multiples, of DIGITS bytes each, of a step that each chunk has for itself.
struct Factors {
    int32_t pairs[kBatch / 2][kMaxChunks];       // of two vectors each: two 16-bit numbers, or two 8-bit ones twice
    float steps[kMaxChunks], shares[kMaxChunks]; // shares: of the zero points
};

template <int DIGITS> inline __m256i pair_up(__m256i first, __m256i second) {
    if (DIGITS == 2) return _mm256_blend_epi16(first, _mm256_slli_epi32(second, 16), 0xaa);
    const __m256i byte = _mm256_set1_epi32(0xff);
    const __m256i both =
        _mm256_or_si256(_mm256_and_si256(first, byte), _mm256_slli_epi32(_mm256_and_si256(second, byte), 8));
    return _mm256_or_si256(both, _mm256_slli_epi32(both, 16));
}

// Eight chunks from c on. False if a factor is not finite.
template <int DIGITS>
inline bool make_factors(const floe_vector &v, const Stored *w, const float *a, int count, int64_t c, Factors &out) {
    constexpr float kMost = DIGITS == 2 ? 32767 : 127;
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
    __m256i whole[kBatch] = {};
    for (int r = 0; r < count; r++) {
        whole[r] = _mm256_cvtps_epi32(_mm256_mul_ps(factors[r], inverse));
        share = _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole[r]), zeros8(v, w[r], c), share);
    }
    for (int p = 0; p < kBatch / 2; p++)
        _mm256_storeu_si256((__m256i *)(out.pairs[p] + c), pair_up<DIGITS>(whole[2 * p], whole[2 * p + 1]));
    _mm256_storeu_ps(out.steps + c, step);
    _mm256_storeu_ps(out.shares + c, _mm256_mul_ps(share, step));
    return true;
}

inline void add_eight(float *y, __m256i whole, __m256 step) {
    _mm256_storeu_ps(y, _mm256_fmadd_ps(_mm256_cvtepi32_ps(whole), step, _mm256_loadu_ps(y)));
}

// One chunk of all vectors onto y, with 16-bit factors: two vectors' codes stand side by side in 16 bits, so that one
// multiplication adds up both.
inline void add_words(const Stored *w, int count, int64_t c, const Factors &factors, float *y) {
    const __m256i nibble = _mm256_set1_epi16(0x0f);
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
            add_eight(out, _mm256_permute2x128_si256(rows[h][0], rows[h][1], 0x20), step);
            add_eight(out + 16, _mm256_permute2x128_si256(rows[h][0], rows[h][1], 0x31), step);
        }
    }
}

// The same with 8-bit factors, in half as many operations: the bytes of two vectors stand side by side, and 16-bit sums
// of kBatch products of 15 and 127 do not overflow.
template <bool FULL> inline void add_bytes(const Stored *w, int count, int64_t c, const Factors &factors, float *y) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    __m256i sums[2][2] = {}; // the lower and upper codes, of bytes 0 to 7 of each lane and of the others
    FLOE_UNROLL for (int r = 0; r < (FULL ? kBatch : count); r += 2) {
        const __m256i first = load(w[r].codes + 32 * c), second = load(w[r + 1 < count ? r + 1 : r].codes + 32 * c);
        const __m256i factor = _mm256_set1_epi32(factors.pairs[r / 2][c]);
        FLOE_UNROLL for (int h = 0; h < 2; h++) {
            const __m256i bytes = h ? _mm256_unpackhi_epi8(first, second) : _mm256_unpacklo_epi8(first, second);
            const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), nibble);
            sums[0][h] = _mm256_add_epi16(sums[0][h], _mm256_maddubs_epi16(_mm256_and_si256(bytes, nibble), factor));
            sums[1][h] = _mm256_add_epi16(sums[1][h], _mm256_maddubs_epi16(upper, factor));
        }
    }
    const __m256 step = _mm256_broadcast_ss(factors.steps + c);
    FLOE_UNROLL for (int k = 0; k < 2; k++) FLOE_UNROLL for (int h = 0; h < 2; h++) {
        float *const out = y + 32 * k + 8 * h;
        add_eight(out, _mm256_cvtepi16_epi32(_mm256_castsi256_si128(sums[k][h])), step);
        add_eight(out + 16, _mm256_cvtepi16_epi32(_mm256_extracti128_si256(sums[k][h], 1)), step);
    }
}

// 4-bit vectors with a scale per chunk, in integers. False, with nothing added, if they are shorter than a section or a
// factor is not finite.
template <int DIGITS>
bool axpy_nibbles(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                  const Ahead *ahead) {
    const int64_t chunks = v.n / kChunk;
    if (chunks < kSection) return false;
    Factors factors;
    for (int64_t c = 0; c < chunks; c += kSection) { // the last eight in any case, of which some may be there already
        const int64_t start = c + kSection <= chunks ? c : chunks - kSection;
        if (!make_factors<DIGITS>(v, w, a, count, start, factors)) return false;
    }
    for (int64_t c = 0; c < chunks; c++) bias[c] -= factors.shares[c];
    Columns next(ahead, count, chunks);
    for (int64_t c = 0; c < chunks; c++, y += kChunk) {
        next.step();
        if (DIGITS == 2) add_words(w, count, c, factors, y);
        else if (count == kBatch) add_bytes<true>(w, count, c, factors, y);
        else add_bytes<false>(w, count, c, factors, y);
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
    if (v.bits == 4 && v.group == kChunk && digits < 3) {
        const auto in_integers = digits == 1 ? axpy_nibbles<1> : axpy_nibbles<2>;
        if (in_integers(v, w, a, count, y, bias, ahead)) return;
    }
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
