// A decode step's dense operations for AVX2 with FMA.

#if defined(__x86_64__) || defined(_M_X64)

#include <stdint.h>

namespace {
constexpr int64_t kLanes = 8;
}

#include "arch/dense_ops.inl"

namespace floe {
namespace {

const DenseOps table = {"avx2", multiply, attend, keep, delta, add_product, exponentials};

} // namespace

const DenseOps *dense_avx2() { return &table; }

} // namespace floe

#else

#include "arch/dense_ops.h"

namespace floe {
const DenseOps *dense_avx2() { return nullptr; }
} // namespace floe

#endif
