// The rest of the C interface: what packing computes. See floe.h.
#ifndef FLOE_PACK_H
#define FLOE_PACK_H

#include "floe_offload.h"

#ifdef __cplusplus
extern "C" {
#endif

// A matrix (rows, columns; `matrix_kind`: FLOE_FLOAT32 ...) whose rows have a grid for each `group` of their columns.
// What one number's code leaves over goes to those after it: of its row, or, if `down`, of its column. scale_bytes: in
// which scales and zeros will be stored (floe_vector). values_kind: FLOE_FLOAT32 or FLOE_BFLOAT16.
typedef struct {
    int64_t rows, columns, group, pitch16;
    int32_t bits, down, scale_bytes, matrix_kind, values_kind;
} floe_rounding;

// Whether `floe_round_matrix` uses `lower16` here.
FLOE_API int floe_rounds_by_bfloat16(void);

// Fits grids by least squares when their turn comes, each error weighted by `weight` (columns; those of a group add up
// to 1; NULL if `down`), and rounds. lower (n, n; lower triangular): what is added to a number, of the errors before
// it; lower16: the same as bfloat16, rows `pitch16` apart, used for those of other steps. Fills codes, values (what
// codes stand for), like the matrix, and scale and zero (rows, columns / group), which can be stored so or are not
// finite.
FLOE_API int floe_round_matrix(const floe_rounding *rounding, FLOE_OPTIONAL const float *weight, const float *lower,
                               FLOE_OPTIONAL const void *lower16, const void *matrix, int threads, uint8_t *codes,
                               FLOE_OPTIONAL void *values, float *scale, float *zero);

#ifdef __cplusplus
}
#endif

#endif
