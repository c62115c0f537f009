// Sixteen slots of a pool at a time. Lists are compacted in registers: to compress into memory takes Zen 4 ten times as
// long as to write whole registers of which only the front counts.
#include "arch/row_ops.h"

// A test that cannot run them leaves them out, since they take longest to compile.
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(FLOE_WITHOUT_AVX512)

#include <immintrin.h>

namespace floe {
namespace {

int64_t classify(const int32_t *table, const int32_t *neurons, int64_t start, int64_t end, int32_t first,
                 const Presence &out, int64_t *here, int64_t *gone) {
    int64_t present = *here, absent = *gone;
    const __m512i offset = _mm512_set1_epi32(first), zero = _mm512_setzero_si512();
    __m512i at = _mm512_add_epi32(_mm512_set1_epi32((int)start),
                                  _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (; start + 16 <= end; start += 16) {
        const __m512i neuron = _mm512_loadu_si512(neurons + start);
        const __m512i slot = _mm512_i32gather_epi32(neuron, table, 4);
        const __mmask16 missing = _mm512_cmplt_epi32_mask(slot, zero), there = (__mmask16)~missing;
        _mm512_storeu_si512(out.here_at + present, _mm512_maskz_compress_epi32(there, at));
        _mm512_storeu_si512(out.slots + present, _mm512_maskz_compress_epi32(there, slot));
        _mm512_storeu_si512(out.gone_at + absent, _mm512_maskz_compress_epi32(missing, at));
        _mm512_storeu_si512(out.keys + absent, _mm512_maskz_compress_epi32(missing, _mm512_add_epi32(neuron, offset)));
        const int64_t count = _mm_popcnt_u32(missing);
        absent += count;
        present += 16 - count;
        at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
    }
    *here = present;
    *gone = absent;
    return start;
}

int64_t look(const floe_cell *cells, const Worths &by, int64_t slot, int64_t end, uint64_t *rows, int64_t *count,
             int64_t *ready) {
    int64_t listed = *count, seen = 0;
    const __m512i finds = _mm512_set1_epi32(by.finds), is_ready = _mm512_set1_epi32(by.ready);
    const __m512i limit = _mm512_set1_epi32((int)by.limit), positive = _mm512_set1_epi32(INT32_MAX);
    const __m512i factor = _mm512_set1_epi64((long long)by.expert_factor), zero = _mm512_setzero_si512();
    const __m128i shift = _mm_cvtsi32_si128(by.expert_shift);
    const __m512 least = _mm512_set1_ps(by.prefetch_worth);
    // Of two registers of four cells each: their first and second words, and their third and fourth.
    const __m512i front = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
    const __m512i back = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
    __m512i places = _mm512_add_epi32(_mm512_set1_epi32((int)slot),
                                      _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
    for (; slot + 16 <= end; slot += 16) {
        const floe_cell *c = cells + slot;
        const __m512i a = _mm512_loadu_si512(c), b = _mm512_loadu_si512(c + 4);
        const __m512i d = _mm512_loadu_si512(c + 8), e = _mm512_loadu_si512(c + 12);
        const __m512i low = _mm512_permutex2var_epi32(a, front, b), high = _mm512_permutex2var_epi32(d, front, e);
        const __m512i low_back = _mm512_permutex2var_epi32(a, back, b);
        const __m512i high_back = _mm512_permutex2var_epi32(d, back, e);
        const __m512i state = _mm512_shuffle_i64x2(low, high, 0x44), key = _mm512_shuffle_i64x2(low, high, 0xee);
        const __m512i mark = _mm512_shuffle_i64x2(low_back, high_back, 0x44);
        const __m512 mean = _mm512_castsi512_ps(_mm512_shuffle_i64x2(low_back, high_back, 0xee));
        const __m512i even = _mm512_srl_epi64(_mm512_mul_epu32(key, factor), shift);
        const __m512i odd = _mm512_srl_epi64(_mm512_mul_epu32(_mm512_srli_epi64(key, 32), factor), shift);
        const __m512i expert = _mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
        const __m512 factors = _mm512_i32gather_ps(expert, by.factors, 4);
        const __m512 worth = _mm512_mul_ps(mean, factors);
        const __mmask16 promised = _mm512_cmpgt_epi32_mask(_mm512_sub_epi32(mark, finds), zero);
        const __m512i order =
            _mm512_and_si512(_mm512_castps_si512(_mm512_mask_max_ps(worth, promised, least, worth)), positive);
        const __mmask16 may_go = (__mmask16)~_mm512_movepi32_mask(_mm512_castps_si512(factors));
        const __mmask16 loose = _mm512_mask_cmpeq_epi32_mask(may_go, state, is_ready);
        const __mmask16 fits = _mm512_mask_cmplt_epi32_mask(loose, order, limit);
        seen += _mm_popcnt_u32(loose);
        const __m512i orders = _mm512_maskz_compress_epi32(fits, order);
        const __m512i slots = _mm512_maskz_compress_epi32(fits, places);
        // A pair is a worth and its slot.
        const __m512i index = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        const __m512i upper = _mm512_add_epi32(index, _mm512_set1_epi32(8));
        _mm512_storeu_si512(rows + listed, _mm512_permutex2var_epi32(orders, index, slots));
        _mm512_storeu_si512(rows + listed + 8, _mm512_permutex2var_epi32(orders, upper, slots));
        listed += _mm_popcnt_u32(fits);
        places = _mm512_add_epi32(places, _mm512_set1_epi32(16));
    }
    *count = listed;
    *ready += seen;
    return slot;
}

const PoolOps ops = {classify, look};

} // namespace

const PoolOps *avx512_pool() { return &ops; }

} // namespace floe

#else

namespace floe {
const PoolOps *avx512_pool() { return nullptr; }
} // namespace floe

#endif
