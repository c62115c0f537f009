// Row operations in plain C++, for any group, length and width; included by every row_*.cpp (see row_ops.h).
// Loops run over 16 independent sums, which compilers turn into vector code without reordering anything else.

#include <string.h>

#include "numbers.inl"
#include "row_ops.h"

namespace floe {
namespace {

inline float wide16(uint16_t u, int32_t bfloat16) {
    return bfloat16 ? bits_to_float((uint32_t)u << 16) : half_to_float(u);
}

// Prefetching spread evenly over the steps of a loop; what does not divide goes first. Few instructions: at small
// widths they are a visible part of the loop.
struct Pace {
    const uint8_t *at;
    int64_t lines, more; // at each step, and of the first steps one more each: many at once would wait for each other

    Pace(const Ahead &ahead, int64_t steps)
        : at(ahead.at), lines(steps > 0 ? ahead.lines / steps : ahead.lines), more(ahead.lines - lines * steps) {
        if (steps > 0) return;
        more = 0;
        step();
        lines = 0;
    }
    Pace() : at(nullptr), lines(0), more(0) {}

    void step() {
        if (more > 0) {
            more--;
            FLOE_PREFETCH(at);
            at += 64;
        }
        for (int64_t i = 0; i < lines; i++, at += 64) FLOE_PREFETCH(at);
    }
};

// Of one group. A byte stands for a float16 (numbers.inl), or for a place among the codes in steps of 2^bits / 256.
inline float scale_at(const floe_vector &v, const Stored &w, int64_t g) {
    return half_to_float(v.scale_bytes == 1 ? half_of_byte(w.scale[g]) : load16(w.scale + 2 * g));
}

inline float zero_step(const floe_vector &v) { return (float)(1 << v.bits) / 256; }

inline float zero_at(const floe_vector &v, const Stored &w, int64_t g) {
    return v.scale_bytes == 1 ? (float)w.zero[g] * zero_step(v) : half_to_float(load16(w.zero + 2 * g));
}

inline int64_t group_count(const floe_vector &v) { return v.bits == 16 ? 0 : v.n / v.group; }

inline int64_t plane_bytes(int64_t n, int bits) { return (n * bits + 7) / 8; }

// Codes of one plane-packed run (layouts._pack_plane): chunks of 64, the last one possibly shorter. `put` is told each
// code's place.
template <class Put> inline void each_code(const uint8_t *p, int64_t n, int bits, Put put) {
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    for (int64_t chunk = 0; chunk < n; chunk += kChunk) {
        if (n - chunk >= kChunk) { // sizes that the compiler can turn into vectors
            const int64_t size = 8 * bits;
            for (int shift = 0; shift < 8; shift += bits)
                for (int64_t i = 0; i < size; i++)
                    put(chunk + shift / bits * size + i, (uint8_t)(p[i] >> shift) & mask);
            p += size;
            continue;
        }
        const int64_t size = plane_bytes(n - chunk, bits);
        for (int64_t i = chunk; i < n; i++)
            put(i, (uint8_t)(p[(i - chunk) % size] >> (bits * ((i - chunk) / size))) & mask);
    }
}

inline int64_t code_bytes_of(int64_t n, int bits) {
    if (bits != 3) return bits == 16 ? 2 * n : n / kChunk * (8 * bits) + plane_bytes(n % kChunk, bits);
    const int64_t rest = n % 256;
    return n / 256 * 96 + code_bytes_of(rest, 2) + code_bytes_of(rest, 1);
}

// n codes from p on, which is the start of a vector or a multiple of 256 codes behind it.
inline void unpack(int bits, int64_t n, const uint8_t *p, uint8_t *out) {
    if (bits == 8) {
        memcpy(out, p, (size_t)n);
    } else if (bits == 3) {
        for (int64_t start = 0; start < n; start += 256, out += 256) {
            const int64_t count = n - start < 256 ? n - start : 256;
            each_code(p, count, 2, [out](int64_t i, uint8_t code) { out[i] = code; });
            p += code_bytes_of(count, 2);
            each_code(p, count, 1, [out](int64_t i, uint8_t code) { out[i] |= (uint8_t)(code << 2); });
            p += code_bytes_of(count, 1);
        }
    } else if (bits == 4) {
        each_code(p, n, 4, [out](int64_t i, uint8_t code) { out[i] = code; });
    } else {
        each_code(p, n, 2, [out](int64_t i, uint8_t code) { out[i] = code; });
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

// One token's product with codes that are unpacked already.
inline float unpacked_dot(const floe_vector &v, const Stored &w, const Token &token, const uint8_t *codes) {
    const int64_t groups = group_count(v);
    float total = 0;
    for (int64_t g = 0; g < groups; g++) {
        const uint8_t *q = codes + g * v.group;
        const float *x = token.x + g * v.group;
        float lanes[16] = {};
        int64_t i = 0;
        for (; i + 16 <= v.group; i += 16)
            for (int l = 0; l < 16; l++) lanes[l] += (float)q[i + l] * x[i + l];
        for (; i < v.group; i++) lanes[i & 15] += (float)q[i] * x[i];
        total += scale_at(v, w, g) * (sum16(lanes) - zero_at(v, w, g) * token.sums[g]);
    }
    return total;
}

inline bool is_wanted(const uint8_t *wanted, int r, int t) { return wanted == nullptr || (wanted[r] >> t & 1); }

inline void generic_dot(const floe_vector &v, const Stored *w, int rows, const Token *const *tokens, int count,
                        const uint8_t *wanted, float (*out)[kBatch], uint8_t *scratch, const Ahead *ahead) {
    for (int r = 0; r < rows; r++) {
        Pace(ahead[r], 0);
        if (v.bits != 16) unpack(v.bits, v.n, w[r].codes, scratch);
        for (int t = 0; t < count; t++)
            if (is_wanted(wanted, r, t))
                out[r][t] = v.bits == 16 ? plain_dot16(v, w[r].codes, tokens[t]->x)
                                         : unpacked_dot(v, w[r], *tokens[t], scratch);
    }
}

inline void generic_axpy_one(const floe_vector &v, const Stored &w, float a, float *y, uint8_t *scratch) {
    const int64_t groups = group_count(v);
    if (v.bits == 16) {
        for (int64_t i = 0; i < v.n; i++) y[i] += a * wide16(load16(w.codes + 2 * i), v.bfloat16);
        return;
    }
    unpack(v.bits, v.n, w.codes, scratch);
    for (int64_t g = 0; g < groups; g++) {
        const float scale = a * scale_at(v, w, g), zero = zero_at(v, w, g);
        const uint8_t *q = scratch + g * v.group;
        float *out = y + g * v.group;
        for (int64_t i = 0; i < v.group; i++) out[i] += scale * ((float)q[i] - zero);
    }
}

inline void generic_axpy(const floe_vector &v, const Stored *w, const float *a, int count, int, float *y, float *,
                         uint8_t *scratch, const Ahead *ahead) {
    for (int r = 0; r < count; r++) {
        Pace(ahead[r], 0);
        generic_axpy_one(v, w[r], a[r], y, scratch);
    }
}

// Vectors side by side: four codes of each, one after the other; scales and zeros of each chunk.
struct Packed {
    uint8_t *codes;
    float *scales, *zeros;

    Packed(const floe_vector &v, uint8_t *memory)
        : codes(memory), scales((float *)(memory + v.n * kSide)), zeros(scales + v.n / kChunk * kSide) {}

    uint8_t *quad(int64_t chunk, int64_t i) const { return codes + (chunk * kChunk + 4 * i) * kSide; }
};

inline float *in_tile(float *first, int64_t column) { return first + column / kChunk * kTileBlock + column % kChunk; }

inline void generic_expand(const floe_vector &v, const Stored &w, int64_t from, int64_t to, float *out,
                           uint8_t *scratch) {
    if (v.bits == 16) {
        for (int64_t i = from; i < to; i++) *in_tile(out, i - from) = wide16(load16(w.codes + 2 * i), v.bfloat16);
        return;
    }
    unpack(v.bits, to - from, w.codes + code_bytes_of(from, v.bits), scratch);
    for (int64_t g = from / v.group; g * v.group < to; g++) {
        const float scale = scale_at(v, w, g), zero = zero_at(v, w, g);
        const int64_t start = g * v.group > from ? g * v.group : from;
        const int64_t end = (g + 1) * v.group < to ? (g + 1) * v.group : to;
        for (int64_t i = start; i < end; i++) *in_tile(out, i - from) = ((float)scratch[i - from] - zero) * scale;
    }
}

// The rest of a tile's columns behind whole blocks of 64, or all of them.
template <class Which>
inline void add_columns(const float *h, Which which, int64_t count, const float *tile, int64_t from, int64_t columns,
                        float *y) {
    for (int64_t n = 0; n < count; n++)
        for (int64_t i = from; i < columns; i++)
            y[i] += h[n] * tile[i / kChunk * kTileBlock + which(n) * kChunk + i % kChunk];
}

inline void generic_add_products(const float *h, const float *tile, int64_t neurons, int64_t columns, int64_t tokens,
                                 float *y, int64_t y_stride) {
    for (int64_t t = 0; t < tokens; t++)
        add_columns(h + t * kTile, [](int64_t n) { return n; }, neurons, tile, 0, columns, y + t * y_stride);
}

inline void generic_add_active(const float (*h)[kTile], const uint8_t (*which)[kTile], const uint8_t *counts,
                               const float *tile, int64_t columns, int64_t tokens, float *y, int64_t y_stride) {
    for (int64_t t = 0; t < tokens; t++)
        add_columns(
            h[t], [&](int64_t n) { return (int64_t)which[t][n]; }, counts[t], tile, 0, columns, y + t * y_stride);
}

// --- preparing x ---------------------------------------------------------------------------------------------

inline bool chunked(const floe_vector &v) { return v.bits < 16 && v.group % kChunk == 0 && v.n <= kMaxChunked; }

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
    const float largest = digits == 3 ? 127.0f * 16384.0f : digits == 2 ? 127.0f * 128.0f : 127.0f;
    const float step = bits_to_float(top) / largest;
    const float inverse = largest / bits_to_float(top);
    int32_t sum = 0;
    for (int i = 0; i < kChunk; i++) {
        // Adding 1.5 · 2^23 rounds to an integer, which is then in the low bits.
        const int32_t whole = (int32_t)(float_to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000u);
        int32_t rest = whole;
        for (int d = digits - 1; d > 0; d--) {
            const int32_t low = ((rest + 64) & 127) - 64;
            out[d * kChunk + i] = (int8_t)low;
            rest = (rest - low) >> 7;
        }
        out[i] = (int8_t)rest;
        sum += whole;
    }
    *scale = step;
    return step * (float)sum;
}

// How codes fill a 64-byte register: `chunks` side by side in each of `planes`; 3-bit codes as 2-bit ones.
struct Fill {
    int64_t chunks, planes;
};

inline void chunked_prepare(const floe_vector &v, Token &token, Fill fill) {
    const int64_t chunks = v.n / kChunk, registers = (chunks + fill.chunks - 1) / fill.chunks;
    const int64_t digits = token.digit_count, piece = kChunk / fill.planes, stride = digits * fill.planes * kChunk;
    memset(token.digits, 0, (size_t)(registers * stride));
    for (int64_t c = 0; c < (chunks + 15) / 16 * 16; c++) token.scale[c] = token.sums[c] = 0;
    for (int64_t c = 0; c < chunks; c++) {
        int8_t split[3 * kChunk];
        token.sums[c] = split_chunk(token.x + c * kChunk, (int)digits, split, token.scale + c);
        int8_t *out = token.digits + c / fill.chunks * stride + c % fill.chunks * piece;
        for (int64_t d = 0; d < digits; d++)
            for (int64_t k = 0; k < fill.planes; k++)
                memcpy(out + (d * fill.planes + k) * kChunk, split + d * kChunk + k * piece, (size_t)piece);
    }
}

} // namespace
} // namespace floe
