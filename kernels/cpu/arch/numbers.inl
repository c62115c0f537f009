// Numbers as bits, and float16; included by files that each compile it for their own instruction set (see row_ops.h).
#pragma once

#include <stdint.h>
#include <string.h>

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

// By whole numbers below float16's least normal one: shifted into float32's fields such a number is one that threads
// read as zero (WithoutDenormals in thread_pool.cpp).
inline float half_to_float(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    const uint32_t least = float_to_bits((float)magnitude * bits_to_float(0x33800000u)); // 2^-24
    const uint32_t normal = (magnitude << 13) + (112u << 23), beyond = (magnitude << 13) | 0x7f800000u;
    const uint32_t value = magnitude < 0x0400u ? least : magnitude < 0x7c00u ? normal : beyond;
    return bits_to_float(value | (uint32_t)(h & 0x8000u) << 16);
}

// A scale of one byte as float16: four bits of its exponent and as many of its fraction (codes.scale_of_byte).
constexpr int kScaleShift = 6;
constexpr uint16_t kLeastScale = 0x0800; // 2^-13

inline uint16_t half_of_byte(uint8_t byte) { return (uint16_t)((byte << kScaleShift) + kLeastScale); }

// The nearest, and of two as near the even one; what is too large becomes infinite.
inline uint16_t float_to_half(float f) {
    const uint32_t bits = float_to_bits(f), magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) { // NaN
        half = 0x7e00u;
    } else if (magnitude >= 0x47800000u) { // 2^16 and more
        half = 0x7c00u;
    } else if (magnitude < 0x38800000u) { // below 2^-14: adding 0.5 rounds to float16's smallest step
        half = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
    } else {
        half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return (uint16_t)(half | ((bits >> 16) & 0x8000u));
}

} // namespace
} // namespace floe
