// What the operations share: checks, and the state of the library.
#pragma once

#include "row_ops.h"

namespace floe {

const RowOps &row_ops();

// Bytes of the codes of one vector, or FLOE_BAD_SHAPE for a layout that does not exist.
int64_t code_bytes(const floe_vector &v);

inline int64_t groups_of(const floe_vector &v) { return v.bits == 16 ? 0 : v.n / v.group; }

inline bool in_range(const int64_t *index, int64_t count, int64_t end) {
    for (int64_t i = 0; i < count; i++)
        if (index[i] < 0 || index[i] >= end) return false;
    return true;
}

// Tables of one prepared token, and how many bytes they take in a buffer.
int64_t token_bytes(const floe_vector &v);
Token prepare_token(const floe_vector &v, const float *x, int digits, uint8_t *&memory);

} // namespace floe
