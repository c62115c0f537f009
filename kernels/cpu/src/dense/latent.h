// Attention through a latent vector, of one token.
#pragma once

#include "parts.h"

namespace floe {

// Whether its sizes fit each other and the layer.
bool is_latent(const floe_dense_layer &layer, const floe_latent &l);

// Keys are never made: queries go through the matrix that would make them, and what they have seen through that of
// values (DeepSeek-V2, section 2.1.2).
class Latent {
  public:
    // Of the memory that it takes.
    static int64_t bytes(const floe_dense_layer &layer, int threads);

    // joined: queries or their vector, then the token's, as projected.
    Latent(const floe_dense_layer &layer, const float *rope, int digits, int threads, float *joined, uint8_t *memory);

    // Fills queries, and the token's vector and key.
    int prepare();

    // Fills `out` by what heads have seen, (heads, rank).
    int release(const float *seen);

    float *vector;  // of the token, and the key behind it: what is stored
    float *queries; // (heads, D) for what is stored
    float *out;     // (heads, value)

  private:
    int64_t made_at(int64_t head) const { return head * (l_.still + l_.value); }
    static void absorb(void *opaque, int64_t head, int worker);
    static void make_values(void *opaque, int64_t head, int worker);

    const floe_dense_layer &layer_;
    const floe_latent &l_;
    const float *rope_;
    int digits_, threads_;
    float *joined_, *asked_; // queries as projected: (heads, still + turned)
    uint8_t *scratch_;       // of each thread
    const float *seen_ = nullptr;
    int32_t failed_ = FLOE_OK;
};

} // namespace floe
