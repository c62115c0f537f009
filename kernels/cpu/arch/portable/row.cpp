// Row operations without any instruction set: what every processor can run.

#include "arch/row_generic.inl"

namespace floe {
namespace {

void prepare(const floe_vector &v, Token &token) {
    if (token.digit_count == 1 && chunked(v)) return chunked_prepare(v, token, {1, 1});
    token.digit_count = 0;
    plain_sums(v, token);
}

// One token's product, in integers, with codes that are unpacked already.
float digit_dot(const floe_vector &v, const Stored &w, const Token &token, const uint8_t *codes) {
    const int64_t per_group = v.group / kChunk;
    float total = 0;
    for (int64_t c = 0; c < v.n / kChunk; c++, codes += kChunk) {
        const int8_t *x = token.digits + c * kChunk;
        int32_t sum = 0;
        for (int64_t i = 0; i < kChunk; i++) sum += (int16_t)codes[i] * (int16_t)x[i];
        const float scale = scale_at(v, w, c / per_group), zero = zero_at(v, w, c / per_group);
        total += scale * ((float)sum * token.scale[c] - zero * token.sums[c]);
    }
    return total;
}

void dot(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count, const uint8_t *wanted,
         float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead) {
    if (tokens[0]->digit_count == 0) return generic_dot(v, w, rows, tokens, count, wanted, out, scratch, ahead);
    for (int r = 0; r < rows; r++) {
        Pace(ahead[r], 0);
        unpack(v.bits, v.n, w[r].codes, scratch);
        for (int t = 0; t < count; t++)
            if (is_wanted(wanted, r, t)) out[r][t] = digit_dot(v, w[r], *tokens[t], scratch);
    }
}

int64_t packs_from(const floe_vector &, int) { return kNever; }

void finish(const floe_vector &, float *, const float *) {}

void copy(uint8_t *const *to, const uint8_t *const *from, const uint8_t *const *, int count, int64_t bytes) {
    for (int r = 0; r < count; r++) memcpy(to[r], from[r], (size_t)bytes);
}

uint64_t read(const uint8_t *const *from, const uint8_t *const *ahead, int count, int64_t bytes) {
    uint64_t lanes[8] = {};
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64)
        for (int r = 0; r < count; r++) {
            FLOE_PREFETCH(ahead[r] + i);
            uint64_t words[8];
            memcpy(words, from[r] + i, 64);
            for (int l = 0; l < 8; l++) lanes[l] ^= words[l];
        }
    for (; i < bytes; i++)
        for (int r = 0; r < count; r++) lanes[0] ^= from[r][i];
    for (int l = 1; l < 8; l++) lanes[0] ^= lanes[l];
    return lanes[0];
}

const RowOps table = {"portable",
                      prepare,
                      dot,
                      packs_from,
                      nullptr,
                      nullptr,
                      generic_axpy,
                      finish,
                      generic_expand,
                      generic_add_products,
                      generic_add_active,
                      copy,
                      read};

} // namespace

const RowOps *portable_ops() { return &table; }

} // namespace floe
