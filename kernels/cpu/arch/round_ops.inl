// Rounding with grids by least squares, whose errors are passed on, in plain C++; included by every round.cpp (see
// round_ops.h). kLanes, a register's width in floats, is the including file's.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include <string.h>

#include "numbers.inl"
#include "round_ops.h"

namespace floe {
namespace {

#if defined(__GNUC__)
constexpr int64_t kStep = kLanes;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
#else
constexpr int64_t kStep = 1;
typedef float Lanes;
#endif

constexpr int64_t kWide = 2 * kStep;            // groups whose grids are fitted side by side
constexpr float kClips[] = {1.0f, 0.85f, 0.7f}; // these and the steps: as reference.py has them
constexpr int kSteps = 6;

inline int64_t padded(int64_t n) { return (n + kWide - 1) / kWide * kWide; }

inline Lanes load(const float *p) {
    Lanes lanes;
    memcpy(&lanes, p, sizeof lanes);
    return lanes;
}

inline void store(float *p, Lanes lanes) { memcpy(p, &lanes, sizeof lanes); }

inline Lanes all(float value) { return Lanes{} + value; }

// The nearest integer from 0 to top; NaN becomes 0. 1.5 · 2^23: adding it rounds.
inline Lanes nearest(Lanes value, Lanes top) {
    const Lanes none = {};
    value = value > none ? value : none;
    value = value < top ? value : top;
    return (value + 12582912.0f) - 12582912.0f;
}

// A grid of codes: numbers are scale · code + offset, or scale · (code - zero).
struct Grid {
    Lanes scale[2], offset[2];
};

// One step of the fit: the least squares for the codes that the grid gives.
inline void improve(Grid &grid, const float *values, int64_t count, const float *weight, const Lanes *mean, Lanes top) {
    Lanes factor[2], code[2] = {}, square[2] = {}, product[2] = {};
    for (int h = 0; h < 2; h++) factor[h] = 1.0f / grid.scale[h];
    for (int64_t i = 0; i < count; i++)
        for (int h = 0; h < 2; h++) {
            const Lanes value = load(values + i * kWide + h * kStep);
            const Lanes found = nearest((value - grid.offset[h]) * factor[h], top), part = found * weight[i];
            code[h] += part;
            square[h] += part * found;
            product[h] += part * value;
        }
    for (int h = 0; h < 2; h++) {
        const Lanes spread = square[h] - code[h] * code[h], along = product[h] - code[h] * mean[h];
        const Lanes none = {}, little = all(1e-9f), some = spread > little ? spread : little;
        Lanes scale = spread > little ? along / some : none; // kept where there is nothing to fit
        scale = scale > none ? scale : none;
        const Lanes offset = mean[h] - scale * code[h];
        grid.offset[h] = scale > none ? offset : grid.offset[h];
        grid.scale[h] = scale > none ? scale : grid.scale[h];
    }
}

// As float16 can hold it; of numbers that are nearly one, and far from 0, the mean. What is not finite stays so.
inline void hold(float &scale, float &zero, float offset, float mean) {
    scale = half_to_float(float_to_half(scale + (mean - mean)));
    zero = half_to_float(float_to_half(-offset / scale));
    if (scale > 0 && zero - zero == 0) return;
    scale = scale - scale == 0 ? 1.0f : scale;
    zero = -half_to_float(float_to_half(mean));
}

// As bytes can hold it (codes.scale_of_byte): the scale below it, or the one above, about the same middle. A grid that
// begins above 0, or ends below it, is drawn out to there.
inline void hold_bytes(float &scale, float &zero, float offset, float mean, float top, bool above) {
    const float end = offset + scale * top, steps = 256 / (top + 1);
    if (offset > 0) scale = end / top, offset = 0;
    else if (end < 0) scale = -offset / top, offset = -scale * top;
    const float middle = offset + scale * (top * 0.5f);
    const int32_t below = ((int32_t)float_to_half(scale) - kLeastScale) >> kScaleShift;
    const int32_t kept = (below < 0 ? 0 : below > 255 ? 255 : below) + above;
    // What is not finite, or too large, becomes no number.
    mean = scale <= half_to_float(half_of_byte(255)) ? mean - mean : bits_to_float(0x7fc00000u);
    scale = half_to_float(half_of_byte((uint8_t)(kept > 255 ? 255 : kept))) + mean;
    const float place = top * 0.5f - middle / scale, step = place * steps;
    zero = (float)(int32_t)((step > 0 ? step < 255 ? step : 255 : 0) + 0.5f) / steps;
}

// The sum of a grid's weighted squared errors.
inline Lanes lost(const float *values, int64_t count, const float *weight, Lanes s, Lanes z, Lanes top) {
    const Lanes factor = 1.0f / s;
    Lanes sum = {};
    for (int64_t i = 0; i < count; i++) {
        const Lanes value = load(values + i * kWide);
        const Lanes wrong = value - s * (nearest(value * factor + z, top) - z);
        sum += wrong * wrong * weight[i];
    }
    return sum;
}

// Of kWide groups side by side: values (count, kWide).
void fit(const float *values, int64_t count, const float *weight, float top, bool bytes, float *scales, float *zeros) {
    Lanes low[2], high[2], mean[2] = {};
    for (int h = 0; h < 2; h++) low[h] = high[h] = load(values + h * kStep);
    for (int64_t i = 0; i < count; i++)
        for (int h = 0; h < 2; h++) {
            const Lanes value = load(values + i * kWide + h * kStep);
            low[h] = value < low[h] ? value : low[h];
            high[h] = value > high[h] ? value : high[h];
            mean[h] += value * weight[i];
        }
    float means[kWide], best[kWide];
    for (int h = 0; h < 2; h++) store(means + h * kStep, mean[h]);
    for (const float clip : kClips) {
        Grid grid;
        for (int h = 0; h < 2; h++) {
            const Lanes scale = (high[h] - low[h]) * (clip / top), least = all(1e-12f);
            grid.scale[h] = scale > least ? scale : least;
            grid.offset[h] = (low[h] + high[h]) * 0.5f - grid.scale[h] * (top * 0.5f);
        }
        for (int step = 0; step < kSteps; step++) improve(grid, values, count, weight, mean, all(top));
        float fitted[kWide], offset[kWide], scale[kWide], zero[kWide], error[kWide];
        for (int h = 0; h < 2; h++) store(fitted + h * kStep, grid.scale[h]), store(offset + h * kStep, grid.offset[h]);
        for (int above = 0; above < (bytes ? 2 : 1); above++) {
            for (int64_t l = 0; l < kWide; l++) {
                scale[l] = fitted[l];
                if (bytes) hold_bytes(scale[l], zero[l], offset[l], means[l], top, above != 0);
                else hold(scale[l], zero[l], offset[l], means[l]);
            }
            for (int h = 0; h < 2; h++)
                store(error + h * kStep, lost(values + h * kStep, count, weight, load(scale + h * kStep),
                                              load(zero + h * kStep), all(top)));
            for (int64_t l = 0; l < kWide; l++)
                if ((clip == kClips[0] && above == 0) || error[l] < best[l])
                    best[l] = error[l], scales[l] = scale[l], zeros[l] = zero[l];
        }
    }
}

int64_t scratch(int64_t rows, int64_t columns) {
    const int64_t most = padded(rows > columns ? rows : columns);
    return rows * padded(columns) + (kWide + 3) * most;
}

void round_block(const RoundBlock &b, float *scratch) {
    const int64_t width = padded(b.columns), most = padded(b.rows > b.columns ? b.rows : b.columns);
    const int64_t grids = b.each_row ? b.rows : b.columns, count = b.each_row ? b.columns : b.rows;
    float *left = scratch, *values = left + b.rows * width, *even = values + kWide * most, *scale = even + most;
    float *zero = scale + most;
    const Lanes top = all(b.top);
    for (int64_t r = 0; r < b.rows; r++) {
        memcpy(left + r * width, b.left + r * b.pitch, (size_t)b.columns * sizeof(float));
        memset(left + r * width + b.columns, 0, (size_t)(width - b.columns) * sizeof(float));
    }
    for (int64_t i = 0; b.each_row && i < count; i++) even[i] = 1.0f / (float)count;
    for (int64_t g = 0; g < grids; g += kWide) {
        for (int64_t i = 0; i < count; i++)
            for (int64_t l = 0; l < kWide; l++) {
                const int64_t grid = g + l < grids ? g + l : g;
                values[i * kWide + l] = b.each_row ? left[grid * width + i] : left[i * width + grid];
            }
        fit(values, count, b.each_row ? even : b.weight, b.top, b.bytes, scale + g, zero + g);
    }
    for (int64_t g = 0; g < grids; g++) {
        b.scale[g * (b.each_row ? b.grid_pitch : 1)] = scale[g];
        b.zero[g * (b.each_row ? b.grid_pitch : 1)] = zero[g];
    }
    for (int64_t r = 0; r < b.rows; r++) {
        float *row = left + r * width;
        const float inverse = 1.0f / b.factor[r * b.factor_pitch + r];
        for (int64_t i = 0; i < width; i += kStep) {
            const Lanes s = b.each_row ? all(scale[r]) : load(scale + i),
                        z = b.each_row ? all(zero[r]) : load(zero + i);
            const Lanes value = load(row + i), code = nearest(value / s + z, top);
            store(row + i, (value - s * (code - z)) * inverse);
            float codes[kStep];
            store(codes, code);
            for (int64_t l = 0; l < kStep && i + l < b.columns; l++) b.codes[r * b.pitch + i + l] = (uint8_t)codes[l];
        }
        for (int64_t later = r + 1; later < b.rows; later++) {
            const float share = b.factor[r * b.factor_pitch + later];
            for (int64_t i = 0; i < width; i += kStep)
                store(left + later * width + i, load(left + later * width + i) - share * load(row + i));
        }
        memcpy(b.left + r * b.pitch, row, (size_t)b.columns * sizeof(float));
    }
}

} // namespace
} // namespace floe
