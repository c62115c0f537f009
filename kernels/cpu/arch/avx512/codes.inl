// How AVX-512 reads codes and scales; included by row.cpp.
// Codes are multiplied as they are, 64 at a time, with the 8-bit digits of x. Each register holds several groups side
// by side (layouts.py), so one conversion and one multiply-add with the scales serve all of them: 256 two-bit codes
// take 7 operations to isolate, 4 per digit and a few to add up.

#if defined(__GNUC__)
#define FLOE_UNROLL _Pragma("GCC unroll 16")
// Loaded once: the compiler would rather load it again for each use.
#define FLOE_IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define FLOE_UNROLL
#define FLOE_IN_REGISTER(x)
#endif

namespace floe {
namespace {

inline __m512i load(const void *p) { return _mm512_loadu_si512(p); }

inline __mmask16 first(int64_t count) { return count >= 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1); }

// Scales, or zeros, of 16 groups from g on; of `here` if there are fewer, and zeros behind them.
inline __m512 scales16(const floe_vector &v, const Stored &w, int64_t g, int64_t here) {
    if (v.scale_bytes != 1) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(here), w.scale + 2 * g));
    const __m128i bytes = _mm_maskz_loadu_epi8(first(here), w.scale + g);
    const __m256i above = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), kScaleShift);
    return _mm512_maskz_cvtph_ps(first(here), _mm256_add_epi16(above, _mm256_set1_epi16(kLeastScale)));
}

inline __m512 zeros16(const floe_vector &v, const Stored &w, int64_t g, int64_t here) {
    if (v.scale_bytes != 1) return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(here), w.zero + 2 * g));
    const __m128i bytes = _mm_maskz_loadu_epi8(first(here), w.zero + g);
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes)), _mm512_set1_ps(zero_step(v)));
}

// How codes of a width fill registers (arch/row_generic.inl: Fill) and memory.
template <int BITS> struct Width {
    static constexpr int kPlanes = BITS == 8 ? 1 : BITS == 4 ? 2 : 4, kChunks = kPlanes;
    static constexpr int kChunkBytes = BITS == 8 ? 64 : BITS == 4 ? 32 : 16; // of 3-bit codes, their lower bits
    static constexpr int kBytes = BITS == 3 ? 96 : 64;
};

// Where chunk c of a vector lies, and the upper bits of 3-bit codes.
template <int BITS> inline const uint8_t *chunk_at(const uint8_t *p, int64_t c) {
    return BITS == 3 ? p + c / 4 * 96 + c % 4 * 16 : p + c * Width<BITS>::kChunkBytes;
}

inline const uint8_t *top_at(const uint8_t *p, int64_t c, int64_t chunks) {
    const int64_t here = chunks - c / 4 * 4 < 4 ? chunks % 4 : 4; // chunks in this block
    return p + c / 4 * 96 + here * 16 + c % 4 * 8;
}

// The codes of one register, plane by plane. `here`: how many chunks it has, if it is not FULL.
template <int BITS, bool FULL> inline void unpack_planes(const uint8_t *p, int64_t here, __m512i *codes) {
    using W = Width<BITS>;
    if (here > W::kChunks) here = W::kChunks;
    const __m512i raw = FULL ? load(p) : _mm512_maskz_loadu_epi8(~(__mmask64)0 >> (64 - here * W::kChunkBytes), p);
    if (BITS == 8) {
        codes[0] = raw;
    } else if (BITS == 4) {
        const __m512i mask = _mm512_set1_epi8(0x0f);
        codes[0] = _mm512_and_si512(raw, mask);
        codes[1] = _mm512_and_si512(_mm512_srli_epi16(raw, 4), mask);
    } else if (BITS == 2) {
        const __m512i mask = _mm512_set1_epi8(3);
        codes[0] = _mm512_and_si512(raw, mask);
        FLOE_UNROLL for (int k = 1; k < 4; k++) codes[k] = _mm512_and_si512(_mm512_srli_epi16(raw, 2 * k), mask);
    } else {
        // A chunk's upper bits are 8 bytes: bit 2k of them belongs to the first 8 of a plane's 16 codes, 2k + 1 to the
        // rest. So each byte of `upper` has plane k's bit at 2k, and what shifts bring from its neighbours is masked.
        const __m256i top = FULL ? _mm256_loadu_si256((const __m256i *)(p + 64))
                                 : _mm256_maskz_loadu_epi8(~(__mmask32)0 >> (32 - here * 8), p + here * 16);
        const __m512i twice =
            _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 0, 1, 1, 2, 2, 3, 3), _mm512_castsi256_si512(top));
        const __m512i upper = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 1, 0, 1, 0, 1, 0, 1));
        // Two planes' codes in the halves of each byte: lower bits where the mask is set, else the upper one.
        const __m512i lower = _mm512_set1_epi8(0x33), three = _mm512_set1_epi8(7);
        const __m512i even = _mm512_ternarylogic_epi32(lower, raw, _mm512_slli_epi16(upper, 2), 0xca);
        const __m512i odd = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(raw, 2), upper, 0xca);
        codes[0] = _mm512_and_si512(even, three);
        codes[1] = _mm512_and_si512(odd, three);
        codes[2] = _mm512_and_si512(_mm512_srli_epi16(even, 4), three);
        codes[3] = _mm512_and_si512(_mm512_srli_epi16(odd, 4), three);
    }
}

// Scales of 16 chunks from c on, and scale · zero; zero behind the last chunk.
template <bool FULL>
inline void chunk_scales(const floe_vector &v, const Stored &w, int64_t c, __m512 *scale, __m512 *zero) {
    const int64_t per_group = v.group / kChunk, here = v.n / kChunk - c;
    if (per_group == 1) {
        *scale = scales16(v, w, c, FULL ? 16 : here);
        *zero = zeros16(v, w, c, FULL ? 16 : here);
    } else {
        float s[16] = {}, z[16] = {};
        for (int64_t i = 0; i < 16 && i < here; i++) {
            s[i] = scale_at(v, w, (c + i) / per_group);
            z[i] = zero_at(v, w, (c + i) / per_group);
        }
        *scale = _mm512_loadu_ps(s);
        *zero = _mm512_loadu_ps(z);
    }
    *zero = _mm512_mul_ps(*scale, *zero);
}

inline __m512 wide(const uint8_t *p, __mmask16 here, bool bfloat16) {
    const __m256i raw = _mm256_maskz_loadu_epi16(here, p);
    if (bfloat16) return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
    return _mm512_cvtph_ps(raw);
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

} // namespace
} // namespace floe
