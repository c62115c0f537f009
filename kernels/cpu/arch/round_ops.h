// What one thread does to round weights (models/packing/rounding.py). Each instruction set brings a table (round.cpp);
// the rule of row_ops.h about external linkage holds for those files too.
#pragma once

#include <stdint.h>

namespace floe {

constexpr int64_t kMostGroup = 256; // numbers that share a grid

// Lines of numbers that are rounded side by side, each number after those before it in its line. A number of the
// matrix, its code and its value lie at along · place + across · line; one of both is 1.
struct RoundBlock {
    int64_t places, lines, step; // of a line; side by side; places whose grids are fitted at once
    int64_t along, across;
    bool each_place;         // a grid for each place, of all these lines; else one for each line, of `step` places
    float top;               // the largest code
    bool bytes;              // whether grids are held in bytes, else in float16
    const float *weight;     // (places) of errors where grids are of lines; those of a step add up to 1
    const float *lower;      // (places, places) lower triangular: by how much the errors before it change a number
    const uint16_t *lower16; // the same as bfloat16, rows of `pitch16`; NULL where this CPU multiplies float32
    int64_t pitch16;
    const void *matrix;
    int32_t matrix_kind, values_kind; // FLOE_FLOAT32 ...
    uint8_t *codes;
    void *values; // what the codes stand for; NULL if nobody asks
    float *scale, *zero;
    int64_t grid_along, grid_across; // from one place, or step, to the next, and from line to line
};

struct RoundOps {
    const char *name;

    // Floats of scratch that `round` needs.
    int64_t (*scratch)(const RoundBlock &block);
    void (*round)(const RoundBlock &block, float *scratch);

    // target (rows, columns) += lower (rows, pitch; bfloat16) · errors (before, columns), which lie in pairs of
    // bfloat16, those of two places side by side. columns are a multiple of 64. NULL where there is no instruction.
    void (*add16)(const uint16_t *lower, int64_t pitch, const uint32_t *errors, int64_t before, int64_t rows,
                  int64_t columns, float *target);
};

const RoundOps *round_portable();
const RoundOps *round_avx2();
const RoundOps *round_avx512();

} // namespace floe
