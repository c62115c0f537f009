// A gated delta rule in place of attention, of one token.
#pragma once

#include "parts.h"

namespace floe {

// Whether its sizes fit each other and the layer.
bool is_delta(const floe_dense_layer &layer, const floe_delta &d);

// Bytes of scratch of a token.
int64_t delta_bytes(const floe_dense_layer &layer);

// qkv as projected from x (hidden), overwritten -> out (heads · D). states: two, see `floe_place`.
int step_delta(const floe_dense_layer &layer, int64_t position, float *states, const float *x, int threads,
               uint8_t *memory, float *qkv, float *out);

} // namespace floe
