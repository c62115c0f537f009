// Rounding of weights without any instruction set: what every processor can run.

#include <stdint.h>

namespace {
constexpr int64_t kLanes = 4; // what x86-64 and ARM64 all have
}

#include "arch/round_ops.inl"

namespace floe {
namespace {

void round_block(const RoundBlock &block, float *scratch) { round_with(block, scratch, *round_portable()); }

const RoundOps table = {"portable", scratch, round_block, nullptr};

} // namespace

const RoundOps *round_portable() { return &table; }

} // namespace floe
