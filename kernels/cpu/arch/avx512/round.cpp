// Rounding of weights for AVX-512.

#if (defined(__x86_64__) || defined(_M_X64)) && !defined(FLOE_WITHOUT_AVX512)

#include <immintrin.h>
#include <stdint.h>

namespace {
constexpr int64_t kLanes = 16;
}

#include "arch/round_ops.inl"

namespace floe {
namespace {

#if !defined(__GNUC__) || defined(__clang__) || __GNUC__ >= 10
#if defined(__GNUC__)
#define FLOE_BFLOAT16_DOT __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#else
#define FLOE_BFLOAT16_DOT
#endif

template <int rows>
FLOE_BFLOAT16_DOT void add16_tile(const uint16_t *lower, int64_t pitch, const uint32_t *errors, int64_t pairs,
                                  int64_t columns, float *target) {
    __m512 sum[rows][4];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < 4; t++) sum[r][t] = _mm512_loadu_ps(target + r * columns + t * 16);
    for (int64_t p = 0; p < pairs; p++) {
        __m512i error[4];
        for (int t = 0; t < 4; t++) error[t] = _mm512_loadu_si512(errors + p * columns + t * 16);
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, lower + r * pitch + 2 * p, sizeof both);
            const __m512i share = _mm512_set1_epi32(both);
            for (int t = 0; t < 4; t++) sum[r][t] = _mm512_dpbf16_ps(sum[r][t], (__m512bh)share, (__m512bh)error[t]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < 4; t++) _mm512_storeu_ps(target + r * columns + t * 16, sum[r][t]);
}

void add16(const uint16_t *lower, int64_t pitch, const uint32_t *errors, int64_t before, int64_t rows, int64_t columns,
           float *target) {
    const int64_t pairs = (before + 1) / 2;
    for (int64_t column = 0; column < columns; column += 64)
        for (int64_t r = 0; r < rows;) {
            const uint16_t *from = lower + r * pitch;
            float *to = target + r * columns + column;
            if (rows - r >= 6) add16_tile<6>(from, pitch, errors + column, pairs, columns, to), r += 6;
            else if (rows - r >= 4) add16_tile<4>(from, pitch, errors + column, pairs, columns, to), r += 4;
            else add16_tile<1>(from, pitch, errors + column, pairs, columns, to), r += 1;
        }
}
#else
constexpr decltype(RoundOps::add16) add16 = nullptr;
#endif

void round_block(const RoundBlock &block, float *scratch) { round_with(block, scratch, *round_avx512()); }

const RoundOps table = {"avx512", scratch, round_block, add16};

} // namespace

const RoundOps *round_avx512() { return &table; }

} // namespace floe

#else

#include "arch/round_ops.h"

namespace floe {
const RoundOps *round_avx512() { return nullptr; }
} // namespace floe

#endif
