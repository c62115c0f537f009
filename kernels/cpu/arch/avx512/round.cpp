// Rounding of weights for AVX-512.

#if (defined(__x86_64__) || defined(_M_X64)) && !defined(FLOE_WITHOUT_AVX512)

#include <stdint.h>

namespace {
constexpr int64_t kLanes = 16;
}

#include "arch/round_ops.inl"

namespace floe {
namespace {

const RoundOps table = {"avx512", scratch, round_block};

} // namespace

const RoundOps *round_avx512() { return &table; }

} // namespace floe

#else

#include "arch/round_ops.h"

namespace floe {
const RoundOps *round_avx512() { return nullptr; }
} // namespace floe

#endif
