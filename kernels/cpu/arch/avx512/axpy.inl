// Sums of stored vectors in AVX-512 VNNI; included by row.cpp.

namespace floe {
namespace {

constexpr int64_t kMaxChunks = kMaxChunked / kChunk;

// a · scale and -a · scale · zero of each chunk.
inline void factors_for_axpy(const floe_vector &v, const Stored &w, float a, float *scales, float *zeros) {
    const int64_t groups = v.n / v.group, chunks_per_group = v.group / kChunk;
    const __m512 factor = _mm512_set1_ps(a);
    for (int64_t g = 0; g < groups; g += 16) {
        const __mmask16 here = first(groups - g);
        const __m512 scale = _mm512_mul_ps(factor, scales16(v, w, g, groups - g));
        const __m512 zero = zeros16(v, w, g, groups - g);
        _mm512_mask_storeu_ps(scales + g, here, scale);
        _mm512_mask_storeu_ps(zeros + g, here, _mm512_fnmadd_ps(scale, zero, _mm512_setzero_ps()));
    }
    if (chunks_per_group == 1) return;
    for (int64_t c = v.n / kChunk - 1; c >= 0; c--) {
        scales[c] = scales[c / chunks_per_group];
        zeros[c] = zeros[c / chunks_per_group];
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

// a · scale of a batch of 4-bit vectors as multiples, of two digits of a byte each, of a step that each chunk has for
// itself.
struct Factors {
    int32_t quads[2][kBatch / 4][kMaxChunks];    // by digit, the higher first: of four vectors each, side by side
    float steps[kMaxChunks], shares[kMaxChunks]; // shares: of the zero points
};

// Four vectors' digits side by side: the lowest bytes of 32-bit numbers.
inline __m512i side_by_side(const __m512i *digits) {
    const __m512i byte = _mm512_set1_epi32(0xff);
    const __m512i two =
        _mm512_or_si512(_mm512_and_si512(digits[0], byte), _mm512_slli_epi32(_mm512_and_si512(digits[1], byte), 8));
    const __m512i other = _mm512_or_si512(_mm512_and_si512(digits[2], byte), _mm512_slli_epi32(digits[3], 8));
    return _mm512_or_si512(two, _mm512_slli_epi32(other, 16));
}

// 16 chunks from c on, zeros behind the last one. False if a factor is not finite.
inline bool make_factors(const floe_vector &v, const Stored *w, const float *a, int count, int64_t c, Factors &out) {
    constexpr float kMost = 127 * 128;
    const int64_t chunks = v.n / kChunk;
    __m512 factors[kBatch], largest = _mm512_setzero_ps(), finite = _mm512_setzero_ps();
    for (int r = 0; r < count; r++) {
        factors[r] = _mm512_mul_ps(_mm512_set1_ps(a[r]), scales16(v, w[r], c, chunks - c));
        largest = _mm512_max_ps(_mm512_abs_ps(factors[r]), largest); // of two that are not ordered, the second
        finite = _mm512_add_ps(finite, _mm512_sub_ps(factors[r], factors[r])); // 0, or not a number
    }
    if (_mm512_cmp_ps_mask(finite, _mm512_setzero_ps(), _CMP_EQ_OQ) != 0xffff) return false;
    // Nothing, and not a division by it, where all factors are too small for a step.
    const __mmask16 some = _mm512_cmp_ps_mask(largest, _mm512_set1_ps(1e-30f), _CMP_GT_OQ);
    const __m512 step = _mm512_maskz_mul_ps(some, largest, _mm512_set1_ps(1.0f / kMost));
    const __m512 inverse = _mm512_maskz_div_ps(some, _mm512_set1_ps(kMost), largest);
    __m512 share = _mm512_setzero_ps();
    __m512i high[kBatch] = {}, low[kBatch] = {};
    for (int r = 0; r < count; r++) {
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(factors[r], inverse));
        share = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole), zeros16(v, w[r], c, chunks - c), share);
        high[r] = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(64)), 7);
        low[r] = _mm512_sub_epi32(whole, _mm512_slli_epi32(high[r], 7));
    }
    for (int r = 0; r < kBatch; r += 4) {
        _mm512_storeu_si512(out.quads[0][r / 4] + c, side_by_side(high + r));
        _mm512_storeu_si512(out.quads[1][r / 4] + c, side_by_side(low + r));
    }
    _mm512_storeu_ps(out.steps + c, step);
    _mm512_storeu_ps(out.shares + c, _mm512_mul_ps(share, step));
    return true;
}

// What two chunks have, each in half of the lanes.
inline __m512i each_half(const int32_t *p) { return _mm512_mask_set1_epi32(_mm512_set1_epi32(p[0]), 0xff00, p[1]); }

// Two chunks of all vectors onto y, or the last one: the codes of four vectors stand side by side in 32 bits, so that
// one multiplication adds up all four.
template <bool FULL, int CHUNKS = 2>
inline void add_two(const Stored *w, int count, int64_t c, const Factors &factors, float *y) {
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    __m512i sums[2][2][4]; // by digit, the lower and upper codes (these times 16), of every four bytes of a lane's 16
    FLOE_UNROLL for (int d = 0; d < 2; d++) FLOE_UNROLL for (int k = 0; k < 2; k++)
        FLOE_UNROLL for (int j = 0; j < 4; j++) sums[d][k][j] = _mm512_setzero_si512();
    FLOE_UNROLL for (int r = 0; r < (FULL ? kBatch : count); r += 4) {
        __m512i rows[4];
        FLOE_UNROLL for (int i = 0; i < 4; i++) {
            const uint8_t *const codes = w[FULL || r + i < count ? r + i : r].codes + 32 * c; // too many are times 0
            rows[i] = CHUNKS == 2 ? load(codes) : _mm512_maskz_loadu_epi8(0xffffffff, codes);
        }
        const __m512i low[2] = {_mm512_unpacklo_epi8(rows[0], rows[1]), _mm512_unpacklo_epi8(rows[2], rows[3])};
        const __m512i high[2] = {_mm512_unpackhi_epi8(rows[0], rows[1]), _mm512_unpackhi_epi8(rows[2], rows[3])};
        const __m512i quads[4] = {_mm512_unpacklo_epi16(low[0], low[1]), _mm512_unpackhi_epi16(low[0], low[1]),
                                  _mm512_unpacklo_epi16(high[0], high[1]), _mm512_unpackhi_epi16(high[0], high[1])};
        __m512i factor[2];
        FLOE_UNROLL for (int d = 0; d < 2; d++) factor[d] = each_half(factors.quads[d][r / 4] + c);
        FLOE_UNROLL for (int j = 0; j < 4; j++) {
            const __m512i lower = _mm512_and_si512(quads[j], nibble), upper = _mm512_andnot_si512(nibble, quads[j]);
            FLOE_UNROLL for (int d = 0; d < 2; d++) {
                sums[d][0][j] = _mm512_dpbusd_epi32(sums[d][0][j], lower, factor[d]);
                sums[d][1][j] = _mm512_dpbusd_epi32(sums[d][1][j], upper, factor[d]);
            }
        }
    }
    const __m512 step[2] = {_mm512_set1_ps(factors.steps[c]), _mm512_set1_ps(factors.steps[c + 1])};
    FLOE_UNROLL for (int k = 0; k < 2; k++) {
        __m512i whole[4];
        FLOE_UNROLL for (int j = 0; j < 4; j++) whole[j] =
            _mm512_add_epi32(_mm512_slli_epi32(sums[0][k][j], 7), sums[1][k][j]);
        const __m512 scale[2] = {k ? _mm512_mul_ps(step[0], _mm512_set1_ps(1.0f / 16)) : step[0],
                                 k ? _mm512_mul_ps(step[1], _mm512_set1_ps(1.0f / 16)) : step[1]};
        // A lane of each to a lane of one.
        const __m512i pairs[4] = {
            _mm512_shuffle_i32x4(whole[0], whole[1], 0x44), _mm512_shuffle_i32x4(whole[2], whole[3], 0x44),
            _mm512_shuffle_i32x4(whole[0], whole[1], 0xee), _mm512_shuffle_i32x4(whole[2], whole[3], 0xee)};
        FLOE_UNROLL for (int h = 0; h < CHUNKS; h++) {
            const __m512i lanes[2] = {_mm512_shuffle_i32x4(pairs[2 * h], pairs[2 * h + 1], 0x88),
                                      _mm512_shuffle_i32x4(pairs[2 * h], pairs[2 * h + 1], 0xdd)};
            FLOE_UNROLL for (int i = 0; i < 2; i++) {
                float *const out = y + kChunk * h + 32 * k + 16 * i;
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_cvtepi32_ps(lanes[i]), scale[h], _mm512_loadu_ps(out)));
            }
        }
    }
}

// 4-bit vectors with a scale per chunk, in integers. False, with nothing added, if a factor is not finite.
bool axpy_nibbles(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *bias,
                  const Ahead *ahead) {
    const int64_t chunks = v.n / kChunk;
    Factors factors;
    for (int64_t c = 0; c < chunks; c += 16) // kMaxChunks is a multiple of it
        if (!make_factors(v, w, a, count, c, factors)) return false;
    for (int64_t c = 0; c < chunks; c++) bias[c] -= factors.shares[c];
    Pace paces[kBatch];
    for (int r = 0; r < count; r++) paces[r] = Pace(ahead[r], chunks / 2);
    int64_t c = 0;
    for (; c + 2 <= chunks; c += 2, y += 2 * kChunk) {
        for (int r = 0; r < count; r++) paces[r].step();
        if (count == kBatch) add_two<true>(w, count, c, factors, y);
        else add_two<false>(w, count, c, factors, y);
    }
    if (c < chunks) add_two<false, 1>(w, count, c, factors, y);
    return true;
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

void axpy(const floe_vector &v, const Stored *w, const float *a, int count, int digits, float *y, float *bias,
          uint8_t *scratch, const Ahead *ahead) {
    if (v.bits == 16) return axpy16(v, w, a, count, y, ahead);
    if (!chunked(v)) return generic_axpy(v, w, a, count, 2, y, bias, scratch, ahead);
    if (v.bits == 4 && v.group == kChunk && digits < 3 && axpy_nibbles(v, w, a, count, y, bias, ahead)) return;
    switch (v.bits) {
    case 2: return axpy_codes<2>(v, w, a, count, y, bias, ahead);
    case 3: return axpy_codes<3>(v, w, a, count, y, bias, ahead);
    case 4: return axpy_codes<4>(v, w, a, count, y, bias, ahead);
    default: return axpy_codes<8>(v, w, a, count, y, bias, ahead);
    }
}

void finish(const floe_vector &v, float *y, const float *bias) {
    if (v.bits < 4 || !chunked(v)) return; // others leave nothing there
    for (int64_t i = 0; i < v.n; i += 16)
        _mm512_storeu_ps(y + i, _mm512_add_ps(_mm512_loadu_ps(y + i), _mm512_set1_ps(bias[i / kChunk])));
}

} // namespace
} // namespace floe
