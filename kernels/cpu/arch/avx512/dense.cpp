// A decode step's dense operations for AVX-512.

// A test that cannot run them leaves them out, since they take longest to compile.
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(FLOE_WITHOUT_AVX512)

#include <stdint.h>

namespace {
constexpr int64_t kLanes = 16;
}

#include "arch/dense_ops.inl"

namespace floe {
namespace {

const DenseOps table = {"avx512", multiply, attend, keep, delta, add_product, exponentials};

} // namespace

const DenseOps *dense_avx512() { return &table; }

} // namespace floe

#else

#include "arch/dense_ops.h"

namespace floe {
const DenseOps *dense_avx512() { return nullptr; }
} // namespace floe

#endif
