// The rest of the C interface: what packing computes. See floe.h.
#ifndef FLOE_PACK_H
#define FLOE_PACK_H

#include "floe_offload.h"

#ifdef __cplusplus
extern "C" {
#endif

// Some rows of numbers that are rounded one after the other. each_row: whether every row has a grid for each `group` of
// its columns; else there is one for each column. factor_pitch: from one row of the factor to the next. scale_bytes: in
// which scales and zeros will be stored (floe_vector).
typedef struct {
    int64_t rows, columns, group, factor_pitch;
    int32_t bits, each_row, scale_bytes;
} floe_rounding;

// Fits the grids by least squares, each error of a column weighted by `weight` (rows, adding up to 1; NULL for
// each_row), and rounds; what a row's codes leave over, divided by the factor's diagonal, times its row of the factor
// (rows, rows; upper triangular) is taken from those after it, and stays in `left` (rows, columns). Fills codes, alike,
// and scale and zero (grids of a row, or 1, below each other), which can be stored so or are not finite.
FLOE_API int floe_round_rows(const floe_rounding *rounding, FLOE_OPTIONAL const float *weight, const float *factor,
                             int threads, float *left, uint8_t *codes, float *scale, float *zero);

#ifdef __cplusplus
}
#endif

#endif
