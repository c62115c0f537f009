// A decode step's dense operations without any instruction set: what every processor can run.

#include <stdint.h>

namespace {
constexpr int64_t kLanes = 4; // what x86-64 and ARM64 all have
}

#include "arch/dense_ops.inl"

namespace floe {
namespace {

const DenseOps table = {"portable", multiply, attend, keep, delta, add_product, exponentials};

} // namespace

const DenseOps *dense_portable() { return &table; }

} // namespace floe
