// Vectors side by side, and their products with many tokens, in AVX2; included by row.cpp.
// A lane is a vector, so a chunk of 64 codes is added up before it meets its scale, and nothing is added across lanes.

namespace floe {
namespace {

// Eight registers of 32-bit numbers, rows and columns exchanged.
inline void transpose(const __m256i *rows, __m256i *out) {
    __m256i pairs[8], quads[8];
    FLOE_UNROLL for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    FLOE_UNROLL for (int i = 0; i < 8; i += 4) FLOE_UNROLL for (int j = 0; j < 2; j++) {
        quads[i + 2 * j] = _mm256_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
        quads[i + 2 * j + 1] = _mm256_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
    FLOE_UNROLL for (int j = 0; j < 4; j++) {
        out[j] = _mm256_permute2x128_si256(quads[j], quads[4 + j], 0x20);
        out[4 + j] = _mm256_permute2x128_si256(quads[j], quads[4 + j], 0x31);
    }
}

// Scales, or zeros times them, of eight vectors and of the section that begins with chunk c.
inline void section_scales(const floe_vector &v, const Stored *w, int rows, int64_t c, bool zeros, __m256i *out) {
    const int64_t per_group = v.group / kChunk, chunks = v.n / kChunk;
    for (int r = 0; r < 8; r++) {
        __m256 found = _mm256_setzero_ps();
        if (r < rows && per_group == 1 && c + kSection <= chunks) {
            found = scales8(v, w[r], c);
            if (zeros) found = _mm256_mul_ps(found, zeros8(v, w[r], c));
        } else if (r < rows) {
            float each[kSection] = {};
            for (int64_t i = c; i < c + kSection && i < chunks; i++)
                each[i - c] = scale_at(v, w[r], i / per_group) * (zeros ? zero_at(v, w[r], i / per_group) : 1);
            found = _mm256_loadu_ps(each);
        }
        out[r] = _mm256_castps_si256(found);
    }
}

// Eight of the vectors, into a quarter of what lies side by side.
template <int BITS> void pack_quarter(const floe_vector &v, const Stored *w, int rows, int64_t at, const Packed &out) {
    const int64_t chunks = v.n / kChunk;
    __m256i given[8], found[8];
    for (int64_t section = 0; section < chunks; section += kSection) {
        const int64_t here = chunks - section < kSection ? chunks - section : kSection;
        for (int zeros = 0; zeros < 2; zeros++) {
            section_scales(v, w, rows, section, zeros != 0, given);
            transpose(given, found);
            float *const to = (zeros ? out.zeros : out.scales) + section * kSide + 8 * at;
            for (int64_t i = 0; i < here; i++) _mm256_storeu_si256((__m256i *)(to + i * kSide), found[i]);
        }
        for (int64_t c = 0; c < here; c += 2) {
            __m256i planes[8][4];
            for (int r = 0; r < 8; r++) {
                if (r < rows) step_codes<BITS, false>(chunk_at<BITS>(w[r].codes, section), c, here, planes[r]);
                else FLOE_UNROLL for (int k = 0; k < 4; k++) planes[r][k] = _mm256_setzero_si256();
            }
            FLOE_UNROLL for (int k = 0; k < 4; k++) {
                FLOE_UNROLL for (int r = 0; r < 8; r++) given[r] = planes[r][k];
                transpose(given, found);
                FLOE_UNROLL for (int i = 0; i < 8; i++) if (c + i / 4 < here)
                    _mm256_storeu_si256((__m256i *)(out.quad(section + c + i / 4, 4 * k + i % 4) + 32 * at), found[i]);
            }
        }
    }
}

void pack(const floe_vector &v, const Stored *w, int rows, uint8_t *memory) {
    const Packed out(v, memory);
    for (int at = 0; at < kSide / 8; at++) {
        const int first = 8 * at < rows ? 8 * at : rows, here = rows - first < 8 ? rows - first : 8;
        switch (v.bits) {
        case 2: pack_quarter<2>(v, w + first, here, at, out); break;
        case 3: pack_quarter<3>(v, w + first, here, at, out); break;
        default: pack_quarter<4>(v, w + first, here, at, out); break;
        }
    }
}

// 16 of the vectors. Eight products of a pair of 4-bit codes with digits fit a 16-bit sum.
template <int DIGITS, int TOKENS>
void packed_tokens(const floe_vector &v, const Packed &w, const Token *const *tokens, int first, int rows,
                   float *const *out) {
    const __m256i ones = _mm256_set1_epi16(1);
    __m256 totals[2][TOKENS];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) totals[0][t] = totals[1][t] = _mm256_setzero_ps();
    for (int64_t c = 0; c < v.n / kChunk; c++) {
        const int64_t offset = c / 4 * DIGITS * 4 * kChunk + c % 4 * 16;
        const int64_t place = c / kSection * kSection + place_of<2>(c % kSection);
        const uint8_t *const codes = w.quad(c, 0) + 4 * first;
        __m256i sums[2][TOKENS];
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[0][t] = sums[1][t] = _mm256_setzero_si256();
        for (int d = 0; d < DIGITS; d++) {
            if (d)
                FLOE_UNROLL for (int h = 0; h < 2; h++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[h][t] =
                    _mm256_slli_epi32(sums[h][t], 7);
            for (int k = 0; k < 4; k += 2) {
                __m256i pairs[2][TOKENS];
                FLOE_UNROLL for (int i = 0; i < 8; i++) {
                    const uint8_t *const quad = codes + (4 * k + i) * 4 * kSide;
                    const __m256i low = load(quad), high = load(quad + 32);
                    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
                        int32_t digits;
                        memcpy(&digits, tokens[t]->digits + offset + (d * 4 + k + i / 4) * kChunk + i % 4 * 4, 4);
                        const __m256i x = _mm256_set1_epi32(digits);
                        const __m256i found[2] = {_mm256_maddubs_epi16(low, x), _mm256_maddubs_epi16(high, x)};
                        FLOE_UNROLL for (int h = 0; h < 2; h++) {
                            pairs[h][t] = i == 0 ? found[h] : _mm256_add_epi16(pairs[h][t], found[h]);
                            FLOE_NOW(pairs[h][t]);
                        }
                    }
                }
                FLOE_UNROLL for (int h = 0; h < 2; h++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[h][t] =
                    _mm256_add_epi32(sums[h][t], _mm256_madd_epi16(pairs[h][t], ones));
            }
        }
        FLOE_UNROLL for (int h = 0; h < 2; h++) {
            const __m256 scale = _mm256_loadu_ps(w.scales + c * kSide + first + 8 * h);
            const __m256 zero = _mm256_loadu_ps(w.zeros + c * kSide + first + 8 * h);
            FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
                const __m256 factor = _mm256_mul_ps(scale, _mm256_broadcast_ss(tokens[t]->scale + place));
                totals[h][t] = _mm256_fnmadd_ps(zero, _mm256_broadcast_ss(tokens[t]->sums + place), totals[h][t]);
                totals[h][t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[h][t]), factor, totals[h][t]);
            }
        }
    }
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
        float found[16];
        _mm256_storeu_ps(found, totals[0][t]);
        _mm256_storeu_ps(found + 8, totals[1][t]);
        memcpy(out[t] + first, found, 4 * (size_t)(rows - first < 16 ? rows - first : 16));
    }
}

template <int DIGITS>
void packed_all(const floe_vector &v, const Packed &w, const Token *const *tokens, int64_t count, int rows,
                float *const *out) {
    for (int first = 0; first < rows; first += 16) {
        int64_t t = 0;
        for (; t + 3 <= count; t += 3) packed_tokens<DIGITS, 3>(v, w, tokens + t, first, rows, out + t);
        for (; t < count; t++) packed_tokens<DIGITS, 1>(v, w, tokens + t, first, rows, out + t);
    }
}

void dot_packed(const floe_vector &v, const uint8_t *packed, const Token *const *tokens, int64_t count, int rows,
                float *const *out) {
    const Packed w(v, (uint8_t *)packed);
    switch (tokens[0]->digit_count) {
    case 1: return packed_all<1>(v, w, tokens, count, rows, out);
    case 2: return packed_all<2>(v, w, tokens, count, rows, out);
    default: return packed_all<3>(v, w, tokens, count, rows, out);
    }
}

int64_t packs_from(const floe_vector &v, int) { return chunked(v) && v.bits < 8 ? 5 : kNever; }

} // namespace
} // namespace floe
