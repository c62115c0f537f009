// Which row operations this processor can run.
#pragma once

#include "row_ops.h"

namespace floe {

struct Choice {
    const RowOps *ops;
    const char *reason;
};

// The fastest instruction set here, or the one named; ops is nullptr where it is unknown, not built or not supported.
Choice choose_ops(const char *name);

// Whether this processor multiplies bfloat16 by AVX-512.
bool has_bfloat16();

} // namespace floe
