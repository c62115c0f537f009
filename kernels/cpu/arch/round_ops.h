// What one thread does to round weights (models/packing/rounding.py). Each instruction set brings a table (round.cpp);
// the rule of row_ops.h about external linkage holds for those files too.
#pragma once

#include <stdint.h>

namespace floe {

// Columns that are rounded by one thread; each row's numbers, and codes, lie `pitch` after those before it.
struct RoundBlock {
    int64_t rows, columns, pitch;
    bool each_row;       // a grid for each row, of all these columns; else one for each column, of all rows
    float top;           // the largest code
    bool bytes;          // whether grids are held in bytes, else in float16
    const float *weight; // of each row's errors where grids are of columns; they add up to 1
    const float *factor; // upper triangular
    int64_t factor_pitch;
    float *left; // becomes the errors, divided by the factor's diagonal
    uint8_t *codes;
    float *scale, *zero; // of columns: side by side; of rows: grid_pitch apart
    int64_t grid_pitch;
};

struct RoundOps {
    const char *name;

    // Floats of scratch that `round` needs for so many rows and columns.
    int64_t (*scratch)(int64_t rows, int64_t columns);
    void (*round)(const RoundBlock &block, float *scratch);
};

const RoundOps *round_portable();
const RoundOps *round_avx2();
const RoundOps *round_avx512();

} // namespace floe
