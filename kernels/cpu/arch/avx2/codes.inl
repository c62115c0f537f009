// How AVX2 reads codes and scales; included by row.cpp.
// A step is what is multiplied at once: two chunks of up to 4 bits, one in each lane of the registers, or one of 8
// bits. Eight chunks make a section, whose scales fill one register.

namespace floe {
namespace {

constexpr int64_t kMaxChunks = kMaxChunked / kChunk;
constexpr int64_t kSection = 8; // chunks

inline __m256i load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
inline __m128i load128(const void *p) { return _mm_loadu_si128((const __m128i *)p); }
inline __m256i bytes8(const uint8_t *p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
inline float half(const uint8_t *p) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(load16(p)))); }

// How codes of a width fill registers (arch/row_generic.inl: Fill) and memory.
template <int BITS> struct Width {
    static constexpr int kPlanes = BITS == 8 ? 1 : 4;
    static constexpr int kChunks = BITS == 8 ? 1 : 2;                        // in a step
    static constexpr int kChunkBytes = BITS == 8 ? 64 : BITS == 4 ? 32 : 16; // of 3-bit codes, their lower bits
};

// Where chunk c of a vector lies, and the upper bits of 3-bit codes.
template <int BITS> inline const uint8_t *chunk_at(const uint8_t *p, int64_t c) {
    return BITS == 3 ? p + c / 4 * 96 + c % 4 * 16 : p + c * Width<BITS>::kChunkBytes;
}

inline const uint8_t *top_at(const uint8_t *p, int64_t c, int64_t chunks) {
    const int64_t here = chunks - c / 4 * 4 < 4 ? chunks % 4 : 4; // chunks in this block
    return p + c / 4 * 96 + here * 16 + c % 4 * 8;
}

inline __m256i both_lanes(__m128i first, __m128i second) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}

// The 4-bit codes of a step as bytes, plane by plane. Without a second chunk, zeros stand for it.
inline void nibble_planes(const uint8_t *p, bool second, __m256i *codes) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    FLOE_UNROLL for (int k = 0; k < 2; k++) {
        const __m256i raw = both_lanes(load128(p + 16 * k), second ? load128(p + 32 + 16 * k) : _mm_setzero_si128());
        codes[k] = _mm256_and_si256(raw, nibble);
        codes[2 + k] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibble);
    }
}

// The same of 2 or 3 bits.
template <int BITS> inline void unpack_planes(__m256i raw, __m128i top, __m256i *codes) {
    const __m256i nibble = _mm256_set1_epi8(0x0f);
    if (BITS == 2) {
        const __m256i mask = _mm256_set1_epi8(3);
        codes[0] = _mm256_and_si256(raw, mask);
        codes[1] = _mm256_and_si256(_mm256_srli_epi16(raw, 2), mask);
        codes[2] = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
        codes[3] = _mm256_and_si256(_mm256_srli_epi16(raw, 6), mask);
    } else {
        // A chunk's upper bits are 8 bytes: bit 2k belongs to the first 8 of a plane's 16 codes, bit 2k + 1 to the
        // rest. Once they are all at 2k, planes 0 and 2 are put together in nibbles, likewise 1 and 3.
        const __m256i both = _mm256_broadcastsi128_si256(top);
        const __m256i twice = _mm256_castpd_si256(_mm256_permute_pd(_mm256_castsi256_pd(both), 12));
        const __m256i upper = _mm256_srlv_epi64(twice, _mm256_setr_epi64x(0, 1, 0, 1));
        const __m256i low = _mm256_set1_epi8(0x33), high = _mm256_set1_epi8(0x44);
        const __m256i even =
            _mm256_or_si256(_mm256_and_si256(raw, low), _mm256_and_si256(_mm256_slli_epi16(upper, 2), high));
        const __m256i odd =
            _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(raw, 2), low), _mm256_and_si256(upper, high));
        codes[0] = _mm256_and_si256(even, nibble);
        codes[1] = _mm256_and_si256(odd, nibble);
        codes[2] = _mm256_and_si256(_mm256_srli_epi16(even, 4), nibble);
        codes[3] = _mm256_and_si256(_mm256_srli_epi16(odd, 4), nibble);
    }
}

// The codes of the step that begins with chunk c, which is a constant, of those that start at p. `here`: how many
// chunks there are, unless it is FULL and there are whole blocks of them; a step's second chunk may be missing.
template <int BITS, bool FULL> inline void step_codes(const uint8_t *p, int64_t c, int64_t here, __m256i *planes) {
    const uint8_t *top = BITS == 3 ? top_at(p, c, FULL ? kSection : here) : nullptr;
    p = chunk_at<BITS>(p, c);
    if (BITS == 8) { // as 16-bit numbers
        FLOE_UNROLL for (int j = 0; j < 4; j++) planes[j] = _mm256_cvtepu8_epi16(load128(p + 16 * j));
    } else if (BITS == 4) {
        nibble_planes(p, FULL || here - c > 1, planes);
    } else if (FULL || here - c > 1) {
        unpack_planes<BITS>(load(p), BITS == 3 ? load128(top) : __m128i(), planes);
    } else {
        const __m128i upper = BITS == 3 ? _mm_loadl_epi64((const __m128i *)top) : __m128i();
        unpack_planes<BITS>(_mm256_zextsi128_si256(load128(p)), upper, planes);
    }
}

// Codes of one chunk as 32-bit numbers, eight at a time: use(j, q) gets values 8j...
template <int BITS, class Use> inline void each_eight(const uint8_t *p, const uint8_t *top, Use use) {
    if (BITS == 8) {
        FLOE_UNROLL for (int j = 0; j < 8; j++) use(j, bytes8(p + 8 * j));
    } else if (BITS == 4) {
        const __m256i nibble = _mm256_set1_epi32(0x0f);
        FLOE_UNROLL for (int j = 0; j < 4; j++) {
            const __m256i q = bytes8(p + 8 * j);
            use(j, _mm256_and_si256(q, nibble));
            use(4 + j, _mm256_srli_epi32(q, 4));
        }
    } else {
        const __m256i low = _mm256_set1_epi32(3), high = _mm256_set1_epi32(4);
        __m256i upper = BITS == 3 ? _mm256_slli_epi32(bytes8(top), 2) : __m256i();
        FLOE_UNROLL for (int j = 0; j < 2; j++) {
            const __m256i q = bytes8(p + 8 * j);
            FLOE_UNROLL for (int k = 0; k < 4; k++) {
                __m256i code = _mm256_and_si256(_mm256_srli_epi32(q, 2 * k), low);
                if (BITS == 3)
                    code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(upper, 2 * k + j), high));
                use(2 * k + j, code);
            }
        }
    }
}

// Where chunk i of a section has its place among the scales: with two chunks in a step, the even ones stand in the
// lower lane and the odd ones in the upper lane, so that one permutation within lanes serves both.
template <int BITS> inline int64_t place_of(int64_t i) { return Width<BITS>::kChunks == 2 ? i / 2 + i % 2 * 4 : i; }

// Eight scales, or zeros, of SIZE bytes each (floe_vector.scale_bytes).
template <int SIZE> inline __m256 eight_scales(__m128i raw) {
    if (SIZE == 1)
        raw = _mm_add_epi16(_mm_slli_epi16(_mm_cvtepu8_epi16(raw), kScaleShift), _mm_set1_epi16(kLeastScale));
    return _mm256_cvtph_ps(raw);
}

template <int SIZE> inline __m256 eight_zeros(__m128i raw, float step) {
    if (SIZE != 1) return _mm256_cvtph_ps(raw);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(raw)), _mm256_set1_ps(step));
}

template <int SIZE> inline __m128i eight_at(const uint8_t *p) {
    return SIZE == 1 ? _mm_loadl_epi64((const __m128i *)p) : load128(p);
}

template <class Word> inline uint64_t word_at(const uint8_t *p) {
    Word word;
    memcpy(&word, p, sizeof word);
    return word;
}

// 1 to 15 bytes, and zeros behind them; nothing behind them is read.
inline __m128i bytes_at(const uint8_t *p, int64_t bytes) {
    if (bytes > 8)
        return _mm_set_epi64x((int64_t)(word_at<uint64_t>(p + bytes - 8) >> (8 * (16 - bytes))),
                              (int64_t)word_at<uint64_t>(p));
    uint64_t low = p[0];
    if (bytes == 8) low = word_at<uint64_t>(p);
    else if (bytes >= 4) low = word_at<uint32_t>(p) | word_at<uint32_t>(p + bytes - 4) << (8 * (bytes - 4));
    else if (bytes >= 2) low = word_at<uint16_t>(p) | word_at<uint16_t>(p + bytes - 2) << (8 * (bytes - 2));
    return _mm_cvtsi64_si128((int64_t)low);
}

// Of groups g to g + 7.
inline __m256 scales8(const floe_vector &v, const Stored &w, int64_t g) {
    return v.scale_bytes == 1 ? eight_scales<1>(eight_at<1>(w.scale + g))
                              : eight_scales<2>(eight_at<2>(w.scale + 2 * g));
}

inline __m256 zeros8(const floe_vector &v, const Stored &w, int64_t g) {
    return v.scale_bytes == 1 ? eight_zeros<1>(eight_at<1>(w.zero + g), zero_step(v))
                              : eight_zeros<2>(eight_at<2>(w.zero + 2 * g), 0);
}

// Those of a section whose chunks have one each, in the chunks' places.
template <int BITS, int SIZE> inline __m128i placed(__m128i raw) {
    if (Width<BITS>::kChunks != 2) return raw;
    if (SIZE == 1) return _mm_shuffle_epi8(raw, _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 0, 2, 4, 6, 1, 3, 5, 7));
    return _mm_shuffle_epi8(raw, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}

template <int BITS, int SIZE> inline __m128i placed(const uint8_t *p) { return placed<BITS, SIZE>(eight_at<SIZE>(p)); }

// Scales and zeros of the groups that a section's chunks belong to, in the chunks' places; zero behind the last chunk.
template <int BITS>
FLOE_NOINLINE void gather_scales(const floe_vector &v, const Stored &w, int64_t start, __m256 *scale, __m256 *zero) {
    const int64_t per_group = v.group / kChunk, here = v.n / kChunk - start;
    float scales[kSection] = {}, zeros[kSection] = {};
    for (int64_t i = 0; i < kSection && i < here; i++) {
        scales[place_of<BITS>(i)] = scale_at(v, w, (start + i) / per_group);
        zeros[place_of<BITS>(i)] = zero_at(v, w, (start + i) / per_group);
    }
    *scale = _mm256_loadu_ps(scales);
    *zero = _mm256_loadu_ps(zeros);
}

// Scales and zeros of a section whose chunks have one each.
template <int BITS, int SIZE, bool FULL>
inline void read_scales(const floe_vector &v, const Stored &w, int64_t start, __m256 *scale, __m256 *zero) {
    const uint8_t *const scales = w.scale + SIZE * start, *const zeros = w.zero + SIZE * start;
    const int64_t bytes = SIZE * (v.n / kChunk - start); // if not FULL
    *scale = eight_scales<SIZE>(placed<BITS, SIZE>(FULL ? eight_at<SIZE>(scales) : bytes_at(scales, bytes)));
    *zero = eight_zeros<SIZE>(placed<BITS, SIZE>(FULL ? eight_at<SIZE>(zeros) : bytes_at(zeros, bytes)), zero_step(v));
}

// Scales of a section's chunks in their places, and scale · zero. What stands behind the last chunk is finite: the
// token's tables have zeros there.
template <int BITS, bool FULL>
inline void section_scales(const floe_vector &v, const Stored &w, int64_t start, __m256 *scale, __m256 *zero) {
    if (v.group != kChunk) gather_scales<BITS>(v, w, start, scale, zero);
    else if (v.scale_bytes == 1) read_scales<BITS, 1, FULL>(v, w, start, scale, zero);
    else read_scales<BITS, 2, FULL>(v, w, start, scale, zero);
    *zero = _mm256_mul_ps(*scale, *zero);
}

} // namespace
} // namespace floe
