// Rounding of weights for AVX2 with FMA.

#if defined(__x86_64__) || defined(_M_X64)

#include <stdint.h>

namespace {
constexpr int64_t kLanes = 8;
}

#include "arch/round_ops.inl"

namespace floe {
namespace {

void round_block(const RoundBlock &block, float *scratch) { round_with(block, scratch, *round_avx2()); }

const RoundOps table = {"avx2", scratch, round_block, nullptr};

} // namespace

const RoundOps *round_avx2() { return &table; }

} // namespace floe

#else

#include "arch/round_ops.h"

namespace floe {
const RoundOps *round_avx2() { return nullptr; }
} // namespace floe

#endif
