// Row operations without any instruction set: what every processor can run.

#include "row_generic.inl"

namespace floe {
namespace {

void prepare(const floe_vector &v, Token &token) {
    token.digit_count = 0;
    plain_sums(v, token);
}

void finish(const floe_vector &, float *, const float *) {}

void copy(uint8_t *to, const uint8_t *from, int64_t bytes) { memcpy(to, from, (size_t)bytes); }

uint64_t read(const uint8_t *from, int64_t bytes, const uint8_t *ahead) {
    uint64_t lanes[8] = {};
    int64_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        FLOE_PREFETCH(ahead + i);
        uint64_t words[8];
        memcpy(words, from + i, 64);
        for (int l = 0; l < 8; l++) lanes[l] ^= words[l];
    }
    for (; i < bytes; i++) lanes[0] ^= from[i];
    for (int l = 1; l < 8; l++) lanes[0] ^= lanes[l];
    return lanes[0];
}

const RowOps table = {
    "portable",         prepare, generic_dot, generic_axpy, finish, generic_expand, generic_add_products,
    generic_add_active, copy,    read};

} // namespace

const RowOps *portable_ops() { return &table; }

} // namespace floe
