// What a token's mixer takes and gives, one file each. Each has a check of its sizes, and the bytes of scratch that a
// token needs if it needs any.
#pragma once

#include "parts.h"

namespace floe {

// Attention: given (first.rows) as projected, overwritten -> out (out.row.n). The token's keys and values are stored.
bool is_attention(const floe_dense_layer &layer);
int64_t attention_bytes(const floe_dense_layer &layer, int64_t position, int threads);
int attend(const floe_dense_layer &layer, const floe_place &place, uint8_t *kv, int digits, int threads,
           uint8_t *memory, float *given, float *out);

// A gated delta rule: given as projected from x (hidden), overwritten -> out (heads · D). states: see `floe_place`.
bool is_delta(const floe_dense_layer &layer);
int64_t delta_bytes(const floe_dense_layer &layer);
int step_delta(const floe_dense_layer &layer, const floe_place &place, float *states, const float *x, int threads,
               uint8_t *memory, float *given, float *out);

// A short convolution: given (3 H), as projected -> out (H). states: see `floe_place`.
bool is_convolution(const floe_dense_layer &layer);
void step_convolution(const floe_dense_layer &layer, const floe_place &place, float *states, const float *given,
                      float *out);

} // namespace floe
