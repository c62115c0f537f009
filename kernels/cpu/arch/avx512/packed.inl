// Vectors side by side, and their products with many tokens, in AVX-512 VNNI; included by row.cpp.
// A lane is a vector, so a chunk of 64 codes is added up before it meets its scale, and nothing is added across lanes.

namespace floe {
namespace {

// 16 registers of 32-bit numbers, rows and columns exchanged.
inline void transpose(const __m512i *rows, __m512i *out) {
    __m512i pairs[16], quads[16];
    FLOE_UNROLL for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    FLOE_UNROLL for (int i = 0; i < 16; i += 4) FLOE_UNROLL for (int j = 0; j < 2; j++) {
        quads[i + 2 * j] = _mm512_unpacklo_epi64(pairs[i + j], pairs[i + 2 + j]);
        quads[i + 2 * j + 1] = _mm512_unpackhi_epi64(pairs[i + j], pairs[i + 2 + j]);
    }
    FLOE_UNROLL for (int j = 0; j < 4; j++) {
        const __m512i low = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88);
        const __m512i high = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xdd);
        const __m512i others = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88);
        const __m512i last = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xdd);
        out[j] = _mm512_shuffle_i32x4(low, others, 0x88);
        out[4 + j] = _mm512_shuffle_i32x4(high, last, 0x88);
        out[8 + j] = _mm512_shuffle_i32x4(low, others, 0xdd);
        out[12 + j] = _mm512_shuffle_i32x4(high, last, 0xdd);
    }
}

// 16 of the vectors, into the first half of the registers or the second one.
template <int BITS> void pack_half(const floe_vector &v, const Stored *w, int rows, int64_t half, const Packed &out) {
    using W = Width<BITS>;
    constexpr int kQuads = 16 / W::kChunks; // of a plane, of each chunk
    const int64_t chunks = v.n / kChunk;
    __m512i given[16], found[16];
    for (int64_t c = 0; c < chunks; c += 16) {
        __m512 scales[16], zeros[16];
        for (int r = 0; r < 16; r++) {
            scales[r] = zeros[r] = _mm512_setzero_ps();
            if (r < rows) chunk_scales<false>(v, w[r], c, scales + r, zeros + r);
        }
        for (int zero = 0; zero < 2; zero++) {
            float *const to = (zero ? out.zeros : out.scales) + c * kSide + 16 * half;
            for (int r = 0; r < 16; r++) given[r] = _mm512_castps_si512(zero ? zeros[r] : scales[r]);
            transpose(given, found);
            for (int64_t i = 0; i < 16 && c + i < chunks; i++) _mm512_storeu_si512(to + i * kSide, found[i]);
        }
    }
    for (int64_t c = 0; c < chunks; c += W::kChunks) {
        __m512i planes[16][W::kPlanes];
        for (int r = 0; r < 16; r++) {
            if (r < rows) unpack_planes<BITS, false>(w[r].codes + c / W::kChunks * W::kBytes, chunks - c, planes[r]);
            else FLOE_UNROLL for (int k = 0; k < W::kPlanes; k++) planes[r][k] = _mm512_setzero_si512();
        }
        for (int k = 0; k < W::kPlanes; k++) {
            FLOE_UNROLL for (int r = 0; r < 16; r++) given[r] = planes[r][k];
            transpose(given, found);
            FLOE_UNROLL for (int i = 0; i < 16; i++) if (c + i / kQuads < chunks)
                _mm512_storeu_si512(out.quad(c + i / kQuads, k * kQuads + i % kQuads) + 64 * half, found[i]);
        }
    }
}

void pack(const floe_vector &v, const Stored *w, int rows, uint8_t *memory) {
    const Packed out(v, memory);
    for (int half = 0; half < 2; half++) {
        const int first = 16 * half < rows ? 16 * half : rows, here = rows - first < 16 ? rows - first : 16;
        switch (v.bits) {
        case 2: pack_half<2>(v, w + first, here, half, out); break;
        case 3: pack_half<3>(v, w + first, here, half, out); break;
        case 4: pack_half<4>(v, w + first, here, half, out); break;
        default: pack_half<8>(v, w + first, here, half, out); break;
        }
    }
}

// PLANES: of a token's digits (row_generic.inl: Fill).
template <int PLANES, int DIGITS, int TOKENS>
void packed_tokens(const floe_vector &v, const Packed &w, const Token *const *tokens, int rows, float *const *out) {
    constexpr int kPiece = kChunk / PLANES;
    __m512 totals[2][TOKENS];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) totals[0][t] = totals[1][t] = _mm512_setzero_ps();
    for (int64_t c = 0; c < v.n / kChunk; c++) {
        const int64_t offset = c / PLANES * DIGITS * PLANES * kChunk + c % PLANES * kPiece;
        const uint8_t *const codes = w.quad(c, 0);
        __m512i sums[2][TOKENS];
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[0][t] = sums[1][t] = _mm512_setzero_si512();
        FLOE_UNROLL for (int d = 0; d < DIGITS; d++) {
            if (d)
                FLOE_UNROLL for (int h = 0; h < 2; h++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[h][t] =
                    _mm512_slli_epi32(sums[h][t], 7);
            FLOE_UNROLL for (int k = 0; k < PLANES; k++) FLOE_UNROLL for (int i = 0; i < kPiece; i += 4) {
                const uint8_t *const quad = codes + (k * kPiece + i) * kSide;
                const __m512i low = load(quad), high = load(quad + 64);
                FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
                    int32_t digits;
                    memcpy(&digits, tokens[t]->digits + offset + (d * PLANES + k) * kChunk + i, 4);
                    __m512i x = _mm512_set1_epi32(digits);
                    FLOE_IN_REGISTER(x);
                    sums[0][t] = _mm512_dpbusd_epi32(sums[0][t], low, x);
                    sums[1][t] = _mm512_dpbusd_epi32(sums[1][t], high, x);
                }
            }
        }
        FLOE_UNROLL for (int h = 0; h < 2; h++) {
            const __m512 scale = _mm512_loadu_ps(w.scales + c * kSide + 16 * h);
            const __m512 zero = _mm512_loadu_ps(w.zeros + c * kSide + 16 * h);
            FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
                const __m512 factor = _mm512_mul_ps(scale, _mm512_set1_ps(tokens[t]->scale[c]));
                totals[h][t] = _mm512_fnmadd_ps(zero, _mm512_set1_ps(tokens[t]->sums[c]), totals[h][t]);
                totals[h][t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[h][t]), factor, totals[h][t]);
            }
        }
    }
    FLOE_UNROLL for (int h = 0; h < 2; h++) FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
        const int64_t left = rows - 16 * h;
        if (left > 0) _mm512_mask_storeu_ps(out[t] + 16 * h, first(left), totals[h][t]);
    }
}

template <int PLANES, int DIGITS>
void packed_all(const floe_vector &v, const Packed &w, const Token *const *tokens, int64_t count, int rows,
                float *const *out) {
    int64_t t = 0;
    for (; t + 6 <= count; t += 6) packed_tokens<PLANES, DIGITS, 6>(v, w, tokens + t, rows, out + t);
    for (; t + 2 <= count; t += 2) packed_tokens<PLANES, DIGITS, 2>(v, w, tokens + t, rows, out + t);
    if (t < count) packed_tokens<PLANES, DIGITS, 1>(v, w, tokens + t, rows, out + t);
}

void dot_packed(const floe_vector &v, const uint8_t *packed, const Token *const *tokens, int64_t count, int rows,
                float *const *out) {
    const Packed w(v, (uint8_t *)packed);
    const int planes = v.bits == 8 ? 1 : v.bits == 4 ? 2 : 4;
    switch (tokens[0]->digit_count * 16 + planes) {
    case 1 * 16 + 1: return packed_all<1, 1>(v, w, tokens, count, rows, out);
    case 1 * 16 + 2: return packed_all<2, 1>(v, w, tokens, count, rows, out);
    case 1 * 16 + 4: return packed_all<4, 1>(v, w, tokens, count, rows, out);
    case 2 * 16 + 1: return packed_all<1, 2>(v, w, tokens, count, rows, out);
    case 2 * 16 + 2: return packed_all<2, 2>(v, w, tokens, count, rows, out);
    case 2 * 16 + 4: return packed_all<4, 2>(v, w, tokens, count, rows, out);
    case 3 * 16 + 2: return packed_all<2, 3>(v, w, tokens, count, rows, out);
    default: return packed_all<4, 3>(v, w, tokens, count, rows, out);
    }
}

// 64 codes of 8 bits with three digits do not fit a 32-bit sum.
int64_t packs_from(const floe_vector &v, int digits) {
    if (!chunked(v) || (v.bits == 8 && digits == 3)) return kNever;
    return digits == 1 ? 10 : 6;
}

} // namespace
} // namespace floe
