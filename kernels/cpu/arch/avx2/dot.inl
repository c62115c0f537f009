// Products of stored vectors with tokens in AVX2; included by row.cpp.
// Codes of up to 4 bits are multiplied with the 8-bit digits of x and added in 16 bits; 8-bit codes, which would
// overflow there, with x in 16 bits, or as floats where x must keep its precision.

namespace floe {
namespace {

constexpr int kTokens = 4; // at a time: their sums, scales and the codes of a step fill the registers

// So few are multiplied each by itself, with the noise that it has alone: answers computed together stay what they are.
constexpr int kAlone = FLOE_MOST_TOGETHER;

inline float sum8(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// Integer sums of a step with one token: plane k of digit d lies at digits(d, k). 16-bit sums of 8 products of 15 and
// 127 do not overflow.
template <int BITS, int DIGITS, class Digits> inline __m256 step_sum(const __m256i *codes, Digits digits) {
    if (BITS == 8) {
        __m256i total = _mm256_madd_epi16(codes[0], load(digits(0, 0)));
        FLOE_UNROLL for (int j = 1; j < 4; j++) total =
            _mm256_add_epi32(total, _mm256_madd_epi16(codes[j], load(digits(0, j))));
        return _mm256_cvtepi32_ps(total);
    }
    __m256i total = _mm256_setzero_si256();
    FLOE_UNROLL for (int d = 0; d < DIGITS; d++) {
        __m256i a = _mm256_maddubs_epi16(codes[0], load(digits(d, 0)));
        FLOE_UNROLL for (int k = 1; k < Width<BITS>::kPlanes; k++) a =
            _mm256_add_epi16(a, _mm256_maddubs_epi16(codes[k], load(digits(d, k))));
        a = _mm256_madd_epi16(a, _mm256_set1_epi16((short)(1 << (7 * (DIGITS - 1 - d)))));
        total = d ? _mm256_add_epi32(total, a) : a;
    }
    return _mm256_cvtepi32_ps(total);
}

// Number k, which is a constant, everywhere: of all, or within each lane of its own.
template <bool WHOLE> inline __m256 spread(__m256 v, int64_t k) {
    if (WHOLE) v = k < 4 ? _mm256_permute2f128_ps(v, v, 0x00) : _mm256_permute2f128_ps(v, v, 0x11);
    switch (k % 4) {
    case 0: return _mm256_permute_ps(v, 0x00);
    case 1: return _mm256_permute_ps(v, 0x55);
    case 2: return _mm256_permute_ps(v, 0xaa);
    default: return _mm256_permute_ps(v, 0xff);
    }
}

// Where a token's digits for the step that begins with chunk c lie, counted from those of its section.
template <int BITS, int DIGITS> inline int64_t step_digits(int64_t c) {
    constexpr int64_t kChunks = Width<BITS>::kPlanes, kStride = DIGITS * kChunks * kChunk; // of a 64-byte register
    return BITS == 8 ? c * 2 * kChunk : c / kChunks * kStride + c % kChunks / Width<BITS>::kChunks * 32;
}

// From one digit to the next in a register of them, and from one plane to the next.
template <int BITS> constexpr int64_t digit_stride() { return Width<BITS>::kPlanes * kChunk; }
template <int BITS> constexpr int64_t plane_stride() { return BITS == 8 ? 32 : kChunk; }

// A section from chunk `start` on (shorter unless FULL) of a vector with TOKENS tokens, added to total[token].
template <int BITS, int DIGITS, int TOKENS, bool FULL>
inline void add_section(const floe_vector &v, const Stored &w, const Token *const *tokens, int64_t start,
                        __m256 *total) {
    constexpr int64_t kChunks = Width<BITS>::kChunks;
    const uint8_t *p = chunk_at<BITS>(w.codes, start);
    const int8_t *digits[TOKENS];
    __m256 scale, zero, scales[TOKENS];
    alignas(32) float single[TOKENS][kSection];
    section_scales<BITS, FULL>(v, w, start, &scale, &zero);
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
        digits[t] = tokens[t]->digits + start / kSection * step_digits<BITS, DIGITS>(kSection);
        scales[t] = _mm256_mul_ps(scale, _mm256_loadu_ps(tokens[t]->scale + start));
        total[t] = _mm256_fnmadd_ps(zero, _mm256_loadu_ps(tokens[t]->sums + start), total[t]);
        if (kChunks == 1) _mm256_store_ps(single[t], scales[t]);
    }
    FLOE_UNROLL for (int64_t c = 0; c < kSection; c += kChunks) {
        const int64_t here = v.n / kChunk - start;
        if (!FULL && c >= here) break;
        __m256i codes[4];
        step_codes<BITS, FULL>(p, c, here, codes);
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            const __m256 factor = kChunks == 1 ? _mm256_broadcast_ss(single[t] + c)
                                               : _mm256_permutevar_ps(scales[t], _mm256_set1_epi32((int)(c / 2)));
            const int8_t *at = digits[t] + step_digits<BITS, DIGITS>(c);
            const __m256 sum = step_sum<BITS, DIGITS>(
                codes, [at](int d, int k) { return at + d * digit_stride<BITS>() + k * plane_stride<BITS>(); });
            total[t] = _mm256_fmadd_ps(sum, factor, total[t]);
        }
    }
}

// Sections `from`..`to` (in chunks) of one vector, onto sums[token].
template <int BITS, int DIGITS, int TOKENS>
inline void add_sections(const floe_vector &v, const Stored &w, const Token *const *tokens, int64_t from, int64_t to,
                         __m256 *sums, Pace &pace) {
    __m256 total[TOKENS];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) total[t] = sums[t];
    for (; from + kSection <= to; from += kSection) {
        pace.step();
        add_section<BITS, DIGITS, TOKENS, true>(v, w, tokens, from, total);
    }
    if (from < to) add_section<BITS, DIGITS, TOKENS, false>(v, w, tokens, from, total);
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[t] = total[t];
}

// What one vector and one token have come to: the products of codes, and the share of the zero points.
struct Sum {
    __m256 total, shift;
};

// Whole sections `from`..`to` (in chunks) of one vector with a few tokens: what a decode step consists of. Codes and
// scales are unpacked once, and each token is added up as if it were alone. Like add_section with a scale per chunk,
// but with few enough numbers alive: all of one token stay in registers.
template <int BITS, int DIGITS, int SIZE, int TOKENS>
FLOE_NOINLINE void add_few(const Stored &w, const Token *const *tokens, int64_t from, int64_t to, Sum *so_far,
                           Pace &pace) {
    constexpr int64_t kChunks = Width<BITS>::kChunks, kRegister = BITS == 8 ? 1 : Width<BITS>::kPlanes;
    constexpr int kDigits = BITS == 8 ? 1 : DIGITS;
    const uint8_t *p = chunk_at<BITS>(w.codes, from), *scales = w.scale + SIZE * from;
    const uint8_t *zeros = w.zero + SIZE * from;
    const int8_t *digits = tokens[0]->digits + from / kSection * step_digits<BITS, DIGITS>(kSection);
    const float *steps = tokens[0]->scale + from, *sums = tokens[0]->sums + from, *const end = tokens[0]->scale + to;
    int64_t apart[TOKENS]; // of the first token's tables and another's: one number serves all of them
    __m256 total[TOKENS], shift[TOKENS];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
        apart[t] = tokens[t]->digits - tokens[0]->digits;
        if (t) FLOE_ADDRESS(apart[t]);
        total[t] = from ? so_far[t].total : _mm256_setzero_ps();
        shift[t] = from ? so_far[t].shift : _mm256_setzero_ps();
    }
    const auto of = [&](const float *table, int t) {
        return _mm256_loadu_ps((const float *)((const char *)table + apart[t]));
    };
    while (steps < end) {
        const __m256 scale = eight_scales<SIZE>(placed<BITS, SIZE>(scales));
        const __m256 zero = eight_zeros<SIZE>(placed<BITS, SIZE>(zeros), (float)(1 << BITS) / 256);
        const __m256 share = _mm256_mul_ps(scale, zero);
        __m256 own[TOKENS];
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            shift[t] = _mm256_fmadd_ps(share, of(sums, t), shift[t]);
            own[t] = _mm256_mul_ps(scale, of(steps, t));
        }
        pace.step();
        // Addresses of registers of digits, and in their middle: displacements that take one byte, since Zen's cache of
        // decoded instructions has few places for longer ones.
        FLOE_UNROLL for (int64_t c = 0; c < kSection; c += kRegister) {
            const uint8_t *codes_at = chunk_at<BITS>(p, c);
            FLOE_ADDRESS(codes_at);
            const int8_t *at[kDigits];
            FLOE_UNROLL for (int d = 0; d < kDigits; d++) {
                at[d] = digits + step_digits<BITS, DIGITS>(c) + d * digit_stride<BITS>() + 128;
                FLOE_ADDRESS(at[d]);
            }
            FLOE_UNROLL for (int64_t i = 0; i < kRegister; i += kChunks) {
                __m256i codes[4];
                step_codes<BITS, true>(codes_at, i, kSection, codes);
                const int64_t place = kChunks == 1 ? c + i : (c + i) / 2;
                FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
                    const __m256 sum = step_sum<BITS, DIGITS>(codes, [&](int d, int k) {
                        return at[d] + apart[t] + k * plane_stride<BITS>() + i / kChunks * 32 - 128;
                    });
                    total[t] = _mm256_fmadd_ps(sum, spread<kChunks == 1>(own[t], place), total[t]);
                    if (TOKENS > 1) FLOE_AFTER(total[t], at[0]);
                }
            }
        }
        p = chunk_at<BITS>(p, kSection);
        digits += step_digits<BITS, DIGITS>(kSection);
        scales += SIZE * kSection;
        zeros += SIZE * kSection;
        steps += kSection;
        sums += kSection;
    }
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) so_far[t] = {total[t], shift[t]};
}

using AddFew = void (*)(const Stored &, const Token *const *, int64_t, int64_t, Sum *, Pace &);

// add_few, by how many tokens there are.
template <int BITS, int DIGITS, int SIZE> inline AddFew add_so_many(int count) {
    constexpr AddFew kAll[kAlone] = {add_few<BITS, DIGITS, SIZE, 1>, add_few<BITS, DIGITS, SIZE, 2>,
                                     add_few<BITS, DIGITS, SIZE, 3>, add_few<BITS, DIGITS, SIZE, 4>};
    return kAll[count - 1];
}

// The chunks behind whole sections, from `start` on, of one vector with a few tokens, added to total[token].
template <int BITS, int DIGITS>
FLOE_NOINLINE void add_rest(const floe_vector &v, const Stored &w, const Token *const *tokens, int count, int64_t start,
                            __m256 *total) {
    switch (count) {
    case 4: return add_section<BITS, DIGITS, 4, false>(v, w, tokens, start, total);
    case 3: return add_section<BITS, DIGITS, 3, false>(v, w, tokens, start, total);
    case 2: return add_section<BITS, DIGITS, 2, false>(v, w, tokens, start, total);
    case 1: return add_section<BITS, DIGITS, 1, false>(v, w, tokens, start, total);
    }
}

// Up to kBatch vectors with up to kAlone tokens, one after the other; those of records, which lie scattered, side by
// side, section by section: so they arrive sooner.
template <int BITS, int DIGITS>
void dot_few(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
             const uint8_t *wanted, float (*out)[kBatch], const Ahead *ahead) {
    const int64_t chunks = v.n / kChunk, whole = chunks / kSection * kSection;
    const bool scattered = w->codes == w->scale + head_bytes(v), bytes = BITS < 8 && v.scale_bytes == 1;
    const auto add_of = [bytes](int n) {
        return bytes ? add_so_many<BITS, DIGITS, 1>(n) : add_so_many<BITS, DIGITS, 2>(n);
    };
    const int64_t span = scattered ? kSection : whole;
    Sum sums[kBatch][kAlone];
    Pace paces[kBatch];
    struct {
        const Token *const *tokens, *some[kAlone];
        int count;
        AddFew add;
    } mine[kBatch]; // each vector meets its own tokens
    for (int r = 0; r < rows; r++) {
        paces[r] = Pace(ahead[r], chunks / kSection);
        mine[r].tokens = tokens, mine[r].count = count;
        if (wanted != nullptr) {
            mine[r].tokens = mine[r].some, mine[r].count = 0;
            for (int t = 0; t < count; t++)
                if (is_wanted(wanted, r, t)) mine[r].some[mine[r].count++] = tokens[t];
        }
        if (mine[r].count > 0) mine[r].add = add_of(mine[r].count);
    }
    for (int64_t from = 0; from < whole; from += span)
        for (int r = 0; r < rows; r++)
            if (mine[r].count > 0) mine[r].add(w[r], mine[r].tokens, from, from + span, sums[r], paces[r]);
    for (int r = 0; r < rows; r++) {
        __m256 total[kAlone];
        for (int i = 0; i < mine[r].count; i++)
            total[i] = whole ? _mm256_sub_ps(sums[r][i].total, sums[r][i].shift) : _mm256_setzero_ps();
        if (whole < chunks) add_rest<BITS, DIGITS>(v, w[r], mine[r].tokens, mine[r].count, whole, total);
        for (int t = 0, i = 0; t < count; t++)
            if (is_wanted(wanted, r, t)) out[r][t] = sum8(total[i++]);
    }
}

template <int BITS, int DIGITS>
void dot_codes(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
               const uint8_t *wanted, float (*out)[kBatch], const Ahead *ahead) {
    if (count <= kAlone && v.group == kChunk)
        return dot_few<BITS, DIGITS>(v, w, rows, tokens, count, wanted, out, ahead);
    __m256 sums[kBatch][kBatch];
    const Token *own[kBatch][kBatch]; // each vector meets its own tokens
    int counts[kBatch];
    Pace paces[kBatch];
    const int64_t chunks = v.n / kChunk;
    for (int r = 0; r < rows; r++) {
        paces[r] = Pace(ahead[r], chunks / kSection);
        counts[r] = 0;
        for (int t = 0; t < count; t++) {
            if (!is_wanted(wanted, r, t)) continue;
            sums[r][counts[r]] = _mm256_setzero_ps();
            own[r][counts[r]++] = tokens[t];
        }
    }
    // One or two tokens' digits stay in the first cache as they are; those of more only section by section.
    const int64_t span = count > 2 ? kSection : chunks;
    for (int64_t from = 0; from < chunks; from += span) {
        const int64_t to = from + span < chunks ? from + span : chunks;
        for (int r = 0; r < rows; r++) {
            Pace done, *pace = paces + r;
            int t = 0;
            for (; t + kTokens <= counts[r]; t += kTokens, pace = &done)
                add_sections<BITS, DIGITS, kTokens>(v, w[r], own[r] + t, from, to, sums[r] + t, *pace);
            switch (counts[r] - t) {
            case 3: add_sections<BITS, DIGITS, 3>(v, w[r], own[r] + t, from, to, sums[r] + t, *pace); break;
            case 2: add_sections<BITS, DIGITS, 2>(v, w[r], own[r] + t, from, to, sums[r] + t, *pace); break;
            case 1: add_sections<BITS, DIGITS, 1>(v, w[r], own[r] + t, from, to, sums[r] + t, *pace); break;
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0, i = 0; t < count; t++)
            if (is_wanted(wanted, r, t)) out[r][t] = sum8(sums[r][i++]);
}

// 8-bit codes of a chunked vector with up to kTokens tokens in floats. kLanes: sums of a token, so that none waits for
// the one before.
template <int TOKENS, int kLanes>
void dot_bytes(const floe_vector &v, const Stored &w, const Token *const *tokens, float *out, Ahead ahead) {
    Pace pace(ahead, v.n / v.group);
    __m256 sums[TOKENS];
    float zeros[TOKENS] = {};
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[t] = _mm256_setzero_ps();
    for (int64_t g = 0; g < v.n / v.group; g++) {
        const int64_t start = g * v.group;
        const float scale = half(w.scale + 2 * g), zero = scale * half(w.zero + 2 * g);
        __m256 a[TOKENS][kLanes];
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) FLOE_UNROLL for (int j = 0; j < kLanes; j++) a[t][j] =
            _mm256_setzero_ps();
        pace.step();
        for (int64_t i = start; i < start + v.group; i += 8 * kLanes) {
            FLOE_UNROLL for (int j = 0; j < kLanes; j++) {
                const __m256 q = _mm256_cvtepi32_ps(bytes8(w.codes + i + 8 * j));
                FLOE_UNROLL for (int t = 0; t < TOKENS; t++) a[t][j] =
                    _mm256_fmadd_ps(q, _mm256_loadu_ps(tokens[t]->x + i + 8 * j), a[t][j]);
            }
        }
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) {
            __m256 sum = _mm256_add_ps(a[t][0], a[t][1]);
            if (kLanes == 4) sum = _mm256_add_ps(sum, _mm256_add_ps(a[t][kLanes - 2], a[t][kLanes - 1]));
            sums[t] = _mm256_fmadd_ps(sum, _mm256_set1_ps(scale), sums[t]);
            zeros[t] += zero * tokens[t]->sums[g];
        }
    }
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) out[t] = sum8(sums[t]) - zeros[t];
}

inline __m256 wide(const uint8_t *p, bool bfloat16) {
    if (bfloat16) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
    return _mm256_cvtph_ps(load128(p));
}

// 16-bit values with up to kTokens tokens.
template <int TOKENS>
void dot_halves(const floe_vector &v, const Stored &w, const Token *const *tokens, float *out, Ahead ahead) {
    const bool bfloat16 = v.bfloat16 != 0;
    Pace pace(ahead, v.n / 16);
    __m256 sums[TOKENS][2];
    float rest[TOKENS] = {};
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[t][0] = sums[t][1] = _mm256_setzero_ps();
    int64_t i = 0;
    for (; i + 16 <= v.n; i += 16) {
        pace.step();
        FLOE_UNROLL for (int j = 0; j < 2; j++) {
            const __m256 q = wide(w.codes + 2 * (i + 8 * j), bfloat16);
            FLOE_UNROLL for (int t = 0; t < TOKENS; t++) sums[t][j] =
                _mm256_fmadd_ps(q, _mm256_loadu_ps(tokens[t]->x + i + 8 * j), sums[t][j]);
        }
    }
    for (; i < v.n; i++)
        FLOE_UNROLL for (int t = 0; t < TOKENS; t++) rest[t] +=
            wide16(load16(w.codes + 2 * i), v.bfloat16) * tokens[t]->x[i];
    FLOE_UNROLL for (int t = 0; t < TOKENS; t++) out[t] = rest[t] + sum8(_mm256_add_ps(sums[t][0], sums[t][1]));
}

// Vectors that go through floats. Few tokens have the sums of one alone, for which there are registers three times.
void dot_floats(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
                const uint8_t *wanted, float (*out)[kBatch], const Ahead *ahead) {
    using Dot = void (*)(const floe_vector &, const Stored &, const Token *const *, float *, Ahead);
    constexpr Dot kHalves[] = {dot_halves<1>, dot_halves<2>, dot_halves<3>, dot_halves<4>};
    constexpr Dot kFew[] = {dot_bytes<1, 4>, dot_bytes<2, 4>, dot_bytes<3, 4>};
    const bool halves = v.bits == 16;
    const int most = halves || count > kAlone ? 4 : 3;
    for (int r = 0; r < rows; r++) {
        const Token *own[kBatch];
        float found[kBatch];
        int mine = 0;
        for (int t = 0; t < count; t++)
            if (is_wanted(wanted, r, t)) own[mine++] = tokens[t];
        Ahead rest = ahead[r];
        for (int done = 0, now = 0; done < mine; done += now, rest.lines = 0) {
            now = mine - done < most ? mine - done : most;
            const Dot dot = halves ? kHalves[now - 1] : now == 4 ? dot_bytes<4, 2> : kFew[now - 1];
            dot(v, w[r], own + done, found + done, rest);
        }
        for (int t = 0, i = 0; t < count; t++)
            if (is_wanted(wanted, r, t)) out[r][t] = found[i++];
    }
}

} // namespace
} // namespace floe
