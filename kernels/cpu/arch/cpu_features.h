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

} // namespace floe
