// Products of stored vectors with tokens in AVX-512 VNNI; included by row.cpp.

namespace floe {
namespace {

// 16 chunks from `start` on (fewer unless FULL) of ROWS vectors with TOKENS tokens, added to sums[row][token]. A
// vector's codes are isolated once for all tokens, and a token's digits loaded once for all vectors. `paces`, if there
// are any, go a step with each register of codes.
template <int BITS, int DIGITS, int ROWS, int TOKENS, bool FULL>
inline void add_section(const floe_vector &v, const Stored *w, const Token *const *tokens, int64_t start,
                        __m512 (&total)[ROWS][TOKENS], Pace *paces) {
    using W = Width<BITS>;
    constexpr int kPlanes = W::kPlanes, kStride = DIGITS * kPlanes * kChunk;
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const int64_t count = FULL ? 16 : v.n / kChunk - start;
    __m512 scales[ROWS][TOKENS];
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) {
        __m512 scale, zero;
        chunk_scales<FULL>(v, w[r], start, &scale, &zero);
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            scales[r][t] = _mm512_mul_ps(scale, _mm512_loadu_ps(tokens[t]->scale + start));
            total[r][t] = _mm512_fnmadd_ps(zero, _mm512_loadu_ps(tokens[t]->sums + start), total[r][t]);
        }
    }
    __m512i which = _mm512_srli_epi32(lanes, BITS == 8 ? 4 : BITS == 4 ? 3 : 2);
    int64_t bytes = start / W::kChunks * W::kBytes, offset = start / W::kChunks * kStride;
    for (int64_t c = 0; c < count; c += W::kChunks, bytes += W::kBytes, offset += kStride) {
        if (paces != nullptr) FLOE_UNROLL for (int r = 0; r < ROWS; r++) paces[r].step();
        __m512i codes[ROWS][kPlanes];
        if (FULL || c + W::kChunks <= count)
            FLOE_UNROLL for (int r = 0; r < ROWS; r++) unpack_planes<BITS, true>(w[r].codes + bytes, 0, codes[r]);
        else
            FLOE_UNROLL for (int r = 0; r < ROWS; r++)
                unpack_planes<BITS, false>(w[r].codes + bytes, count - c, codes[r]);
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            const int8_t *digits = tokens[t]->digits + offset;
            // With several planes, a sum of its own for each digit: in one long chain the multipliers would wait.
            __m512i a[ROWS][DIGITS];
            FLOE_UNROLL for (int d = 0; d < DIGITS; d++) {
                FLOE_UNROLL for (int r = 0; r < ROWS; r++) a[r][d] =
                    d && kPlanes == 1 ? _mm512_slli_epi32(a[r][d - 1], 7) : _mm512_setzero_si512();
                FLOE_UNROLL for (int k = 0; k < kPlanes; k++) {
                    __m512i x = load(digits + (d * kPlanes + k) * kChunk);
                    FLOE_IN_REGISTER(x);
                    FLOE_UNROLL for (int r = 0; r < ROWS; r++) a[r][d] = _mm512_dpbusd_epi32(a[r][d], codes[r][k], x);
                }
            }
            FLOE_UNROLL for (int r = 0; r < ROWS; r++) {
                __m512i sum = a[r][kPlanes == 1 ? DIGITS - 1 : 0];
                FLOE_UNROLL for (int d = 1; d < DIGITS && kPlanes > 1; d++) sum =
                    _mm512_add_epi32(_mm512_slli_epi32(sum, 7), a[r][d]);
                total[r][t] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_permutexvar_ps(which, scales[r][t]), total[r][t]);
            }
        }
        which = _mm512_add_epi32(which, _mm512_set1_epi32(W::kChunks));
    }
}

// Whole vectors with one or two tokens, as they come from memory.
template <int BITS, int DIGITS, int ROWS, int TOKENS, bool FINE = false>
inline void dot_rows(const floe_vector &v, const Stored *w, const Token *const *tokens, float (*out)[kBatch],
                     Pace *paces) {
    __m512 total[ROWS][TOKENS];
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) total[r][t] =
        _mm512_setzero_ps();
    const int64_t chunks = v.n / kChunk, full = chunks / 16 * 16;
    for (int64_t start = 0; start < full; start += 16) {
        FLOE_UNROLL for (int r = 0; r < ROWS && !FINE; r++) paces[r].step();
        add_section<BITS, DIGITS, ROWS, TOKENS, true>(v, w, tokens, start, total, FINE ? paces : nullptr);
    }
    if (full < chunks) add_section<BITS, DIGITS, ROWS, TOKENS, false>(v, w, tokens, full, total, nullptr);
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) out[r][t] =
        _mm512_reduce_add_ps(total[r][t]);
}

// One section of up to four tokens, onto sums[row][token].
template <int BITS, int DIGITS, int ROWS, int TOKENS>
inline void add_tokens(const floe_vector &v, const Stored *w, const Token *const *tokens, int64_t start,
                       __m512 *const *sums, int first) {
    __m512 total[ROWS][TOKENS];
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) total[r][t] =
        sums[r][first + t];
    if (start + 16 <= v.n / kChunk)
        add_section<BITS, DIGITS, ROWS, TOKENS, true>(v, w, tokens + first, start, total, nullptr);
    else add_section<BITS, DIGITS, ROWS, TOKENS, false>(v, w, tokens + first, start, total, nullptr);
    FLOE_UNROLL for (int r = 0; r < ROWS; r++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[r][first + t] =
        total[r][t];
}

template <int BITS, int DIGITS, int ROWS>
inline void add_all_tokens(const floe_vector &v, const Stored *w, const Token *const *tokens, int count, int64_t start,
                           __m512 *const *sums) {
    int t = 0;
    for (; t + 4 <= count; t += 4) add_tokens<BITS, DIGITS, ROWS, 4>(v, w, tokens, start, sums, t);
    if (count - t == 3) add_tokens<BITS, DIGITS, ROWS, 3>(v, w, tokens, start, sums, t);
    if (count - t == 2) add_tokens<BITS, DIGITS, ROWS, 2>(v, w, tokens, start, sums, t);
    if (count - t == 1) add_tokens<BITS, DIGITS, ROWS, 1>(v, w, tokens, start, sums, t);
}

// Several tokens: section by section, so that the digits of all of them stay in the first cache.
template <int BITS, int DIGITS>
void dot_sections(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
                  float (*out)[kBatch], Pace *paces) {
    __m512 sums[kBatch][kBatch];
    __m512 *at[kBatch];
    for (int r = 0; r < rows; r++) {
        at[r] = sums[r];
        for (int t = 0; t < count; t++) sums[r][t] = _mm512_setzero_ps();
    }
    for (int64_t start = 0; start < v.n / kChunk; start += 16) {
        int r = 0;
        for (; r + 2 <= rows; r += 2) {
            paces[r].step();
            paces[r + 1].step();
            add_all_tokens<BITS, DIGITS, 2>(v, w + r, tokens, count, start, at + r);
        }
        if (r < rows) {
            paces[r].step();
            add_all_tokens<BITS, DIGITS, 1>(v, w + r, tokens, count, start, at + r);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < count; t++) out[r][t] = _mm512_reduce_add_ps(sums[r][t]);
}

// The same for the wanted products alone: each vector meets its own tokens.
template <int BITS, int DIGITS>
void dot_wanted(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
                const uint8_t *wanted, float (*out)[kBatch], Pace *paces) {
    __m512 sums[kBatch][kBatch];
    const Token *own[kBatch][kBatch];
    int counts[kBatch];
    for (int r = 0; r < rows; r++) {
        counts[r] = 0;
        for (int t = 0; t < count; t++) {
            sums[r][t] = _mm512_setzero_ps();
            if (is_wanted(wanted, r, t)) own[r][counts[r]++] = tokens[t];
        }
    }
    for (int64_t start = 0; start < v.n / kChunk; start += 16)
        for (int r = 0; r < rows; r++) {
            __m512 *const at = sums[r];
            paces[r].step();
            add_all_tokens<BITS, DIGITS, 1>(v, w + r, own[r], counts[r], start, &at);
        }
    for (int r = 0; r < rows; r++)
        for (int t = 0, i = 0; t < count; t++)
            if (is_wanted(wanted, r, t)) out[r][t] = _mm512_reduce_add_ps(sums[r][i++]);
}

template <int BITS, int DIGITS>
void dot_codes(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
               const uint8_t *wanted, float (*out)[kBatch], const Ahead *ahead) {
    int products = 0;
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < count; t++) products += is_wanted(wanted, r, t);
    // Vectors of records, which lie scattered, arrive sooner when several are read side by side, line by line; those of
    // a matrix, whose scales lie elsewhere, one after the other.
    const bool scattered = w->codes == w->scale + head_bytes(v);
    const int fine = scattered && BITS == 4 && DIGITS < 3 && count == 1 && wanted == nullptr ? rows / 4 * 4 : 0;
    const int64_t sections = v.n / kChunk / 16;
    Pace paces[kBatch];
    for (int r = 0; r < rows; r++)
        paces[r] = Pace(ahead[r], r < fine ? sections * 16 / Width<BITS>::kChunks : sections);
    // Two vectors at a time load half as often, which is worth more than leaving out a few products.
    if (wanted != nullptr && 4 * products < 3 * rows * count)
        return dot_wanted<BITS, DIGITS>(v, w, rows, tokens, count, wanted, out, paces);
    if (count > 2) return dot_sections<BITS, DIGITS>(v, w, rows, tokens, count, out, paces);
    int r = 0;
    for (; r < fine; r += 4) dot_rows<BITS, DIGITS, 4, 1, true>(v, w + r, tokens, out + r, paces + r);
    for (; r + 2 <= rows; r += 2) {
        if (count == 1) dot_rows<BITS, DIGITS, 2, 1>(v, w + r, tokens, out + r, paces + r);
        else dot_rows<BITS, DIGITS, 2, 2>(v, w + r, tokens, out + r, paces + r);
    }
    if (r == rows) return;
    if (count == 1) dot_rows<BITS, DIGITS, 1, 1>(v, w + r, tokens, out + r, paces + r);
    else dot_rows<BITS, DIGITS, 1, 2>(v, w + r, tokens, out + r, paces + r);
}

} // namespace
} // namespace floe
