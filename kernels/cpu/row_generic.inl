// Row operations in plain C++, for any group, length and width; included by every row_*.cpp (see row_ops.h).
// Loops run over 16 independent sums, which compilers turn into vector code without reordering anything else.

#include <string.h>

#include "row_ops.h"

namespace floe {
namespace {

inline float bits_to_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}

inline uint32_t float_to_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

inline uint16_t load16(const uint8_t *p) {
    uint16_t u;
    memcpy(&u, p, 2);
    return u;
}

inline float half_to_float(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    // Shifted into float32's fields the exponent is short by 112; multiplying restores it, subnormals included.
    const float small = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u); // 2^112
    const uint32_t value = magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : float_to_bits(small);
    return bits_to_float(value | (uint32_t)(h & 0x8000u) << 16);
}

inline float wide16(uint16_t u, int32_t bfloat16) {
    return bfloat16 ? bits_to_float((uint32_t)u << 16) : half_to_float(u);
}

// Prefetching spread evenly over the steps of a loop; what does not divide goes first. Few instructions: at small
// widths they are a visible part of the loop.
struct Pace {
    const uint8_t *at;
    int64_t lines; // at each step

    Pace(const Ahead &ahead, int64_t steps) : at(ahead.at), lines(steps > 0 ? ahead.lines / steps : 0) {
        for (int64_t rest = ahead.lines - lines * steps; rest > 0; rest--, at += 64) FLOE_PREFETCH(at);
    }
    Pace() : at(nullptr), lines(0) {}

    void step() {
        if (lines == 1) {
            FLOE_PREFETCH(at);
            at += 64;
            return;
        }
        for (int64_t i = 0; i < lines; i++, at += 64) FLOE_PREFETCH(at);
    }
};

inline int64_t group_count(const floe_vector &v) { return v.bits == 16 ? 0 : v.n / v.group; }

inline int64_t plane_bytes(int64_t n, int bits) { return (n * bits + 7) / 8; }

// One block of `n` codes in `size` bytes: code i is in byte i % size, at bit `bits` * (i / size).
inline void unpack_plane(const uint8_t *p, int64_t n, int bits, uint8_t *out) {
    const int64_t size = plane_bytes(n, bits);
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    for (int64_t start = 0, shift = 0; start < n; start += size, shift += bits) {
        const int64_t count = n - start < size ? n - start : size;
        for (int64_t i = 0; i < count; i++) out[start + i] = (uint8_t)(p[i] >> shift) & mask;
    }
}

inline void add_top_bit(const uint8_t *p, int64_t n, uint8_t *out) {
    const int64_t size = plane_bytes(n, 1);
    for (int64_t start = 0, shift = 0; start < n; start += size, shift++) {
        const int64_t count = n - start < size ? n - start : size;
        for (int64_t i = 0; i < count; i++) out[start + i] |= (uint8_t)(((p[i] >> shift) & 1) << 2);
    }
}

inline int64_t block_values(int bits) { return bits == 3 ? 256 : 512 / bits; }

// Codes `start`..n, where `start` is the first of a block whose bytes begin at p.
inline void unpack_from(const floe_vector &v, const uint8_t *p, int64_t start, uint8_t *out) {
    const int64_t block = block_values(v.bits);
    for (; start < v.n; start += block) {
        const int64_t count = v.n - start < block ? v.n - start : block;
        if (v.bits == 8) {
            memcpy(out, p, (size_t)count);
            p += count;
        } else if (v.bits == 3) {
            unpack_plane(p, count, 2, out);
            p += plane_bytes(count, 2);
            add_top_bit(p, count, out);
            p += plane_bytes(count, 1);
        } else {
            unpack_plane(p, count, v.bits, out);
            p += plane_bytes(count, v.bits);
        }
        out += count;
    }
}

inline float sum16(const float *lanes) {
    float total = 0;
    for (int l = 0; l < 16; l++) total += lanes[l];
    return total;
}

inline float plain_dot16(const floe_vector &v, const uint8_t *p, const float *x) {
    float lanes[16] = {};
    int64_t i = 0;
    for (; i + 16 <= v.n; i += 16)
        for (int l = 0; l < 16; l++) lanes[l] += wide16(load16(p + 2 * (i + l)), v.bfloat16) * x[i + l];
    for (; i < v.n; i++) lanes[i & 15] += wide16(load16(p + 2 * i), v.bfloat16) * x[i];
    return sum16(lanes);
}

inline float generic_dot(const floe_vector &v, const Stored &w, const Token &token, uint8_t *scratch, Ahead ahead) {
    const int64_t groups = group_count(v);
    Pace(ahead, 0);
    if (v.bits == 16) return plain_dot16(v, w.codes, token.x);
    unpack_from(v, w.codes, 0, scratch);
    float total = 0;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *q = scratch + g * v.group;
        const float *x = token.x + g * v.group;
        float lanes[16] = {};
        int64_t i = 0;
        for (; i + 16 <= v.group; i += 16)
            for (int l = 0; l < 16; l++) lanes[l] += (float)q[i + l] * x[i + l];
        for (; i < v.group; i++) lanes[i & 15] += (float)q[i] * x[i];
        const float zero = half_to_float(load16(w.zero + 2 * g));
        total += half_to_float(load16(w.scale + 2 * g)) * (sum16(lanes) - zero * token.sums[g]);
    }
    return total;
}

inline void generic_axpy_one(const floe_vector &v, const Stored &w, float a, float *y, uint8_t *scratch) {
    const int64_t groups = group_count(v);
    if (v.bits == 16) {
        for (int64_t i = 0; i < v.n; i++) y[i] += a * wide16(load16(w.codes + 2 * i), v.bfloat16);
        return;
    }
    unpack_from(v, w.codes, 0, scratch);
    for (int64_t g = 0; g < groups; g++) {
        const float scale = a * half_to_float(load16(w.scale + 2 * g));
        const float zero = half_to_float(load16(w.zero + 2 * g));
        const uint8_t *q = scratch + g * v.group;
        float *out = y + g * v.group;
        for (int64_t i = 0; i < v.group; i++) out[i] += scale * ((float)q[i] - zero);
    }
}

inline void generic_axpy(const floe_vector &v, const Stored *w, const float *a, int count, float *y, float *,
                         uint8_t *scratch, const Ahead *ahead) {
    for (int r = 0; r < count; r++) {
        Pace(ahead[r], 0);
        generic_axpy_one(v, w[r], a[r], y, scratch);
    }
}

// --- preparing x ---------------------------------------------------------------------------------------------

inline bool chunked(const floe_vector &v) {
    return v.bits < 16 && v.group % kChunk == 0 && v.n <= kMaxChunked;
}

inline void plain_sums(const floe_vector &v, Token &token) {
    for (int64_t g = 0; g < group_count(v); g++) {
        const float *x = token.x + g * v.group;
        float lanes[16] = {};
        for (int64_t i = 0; i < v.group; i++) lanes[i & 15] += x[i];
        token.sums[g] = sum16(lanes);
    }
}

// Cuts 64 values into digits; returns the sum of the values that the digits stand for.
inline float split_chunk(const float *x, int digits, int8_t *out, float *scale) {
    uint32_t top = 0; // compared as bits: NaN and infinity are the largest, and no float rule forbids vector code
    for (int i = 0; i < kChunk; i++) {
        const uint32_t u = float_to_bits(x[i]) & 0x7fffffffu;
        top = u > top ? u : top;
    }
    memset(out, 0, (size_t)(kChunk * digits));
    if (top >= 0x7f800000u || top < 0x0d800000u) { // not finite: the result is NaN; below 2^-100: nothing
        *scale = top >= 0x7f800000u ? bits_to_float(0x7fc00000u) : 0.0f;
        return *scale;
    }
    const float largest = digits == 3 ? 127.0f * 16384.0f : 127.0f * 128.0f;
    const float step = bits_to_float(top) / largest;
    const float inverse = largest / bits_to_float(top);
    int32_t sum = 0;
    for (int i = 0; i < kChunk; i++) {
        // Adding 1.5 · 2^23 rounds to an integer, which is then in the low bits.
        const int32_t whole = (int32_t)(float_to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000u);
        const int32_t lo = ((whole + 64) & 127) - 64;
        const int32_t rest = (whole - lo) >> 7;
        const int32_t mid = digits == 3 ? ((rest + 64) & 127) - 64 : rest;
        out[i] = (int8_t)(digits == 3 ? (rest - mid) >> 7 : mid);
        out[kChunk + i] = (int8_t)(digits == 3 ? mid : lo);
        if (digits == 3) out[2 * kChunk + i] = (int8_t)lo;
        sum += whole;
    }
    *scale = step;
    return step * (float)sum;
}

// `place(bits, k)`: by what the k-th chunk of a whole block is multiplied as this instruction set reads it.
inline void chunked_prepare(const floe_vector &v, Token &token, float (*place)(int bits, int64_t k)) {
    const int64_t block = block_values(v.bits), whole_blocks = v.n / block * block;
    for (int64_t g = 0; g < group_count(v); g++) token.sums[g] = 0;
    for (int64_t c = 0; c < v.n / kChunk; c++) {
        int8_t *digits = token.digits + c * token.digit_count * kChunk;
        token.sums[c * kChunk / v.group] += split_chunk(token.x + c * kChunk, token.digit_count, digits, token.scale + c);
        if (c * kChunk < whole_blocks) token.scale[c] /= place(v.bits, c % (block / kChunk));
    }
}

} // namespace
} // namespace floe
