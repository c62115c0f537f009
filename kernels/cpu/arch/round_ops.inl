// Rounding with grids by least squares, whose errors are passed on, in plain C++; included by every round.cpp (see
// round_ops.h). kLanes, a register's width in floats, is the including file's.

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-trapping-math")
#endif

#include <string.h>

#include "floe.h"
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
constexpr int64_t kTile = kLanes == 16 ? 4 : 2; // registers' width of a tile of sums
constexpr int64_t kPad = 64;                    // lines side by side are a multiple of this
constexpr int64_t kPart = 128;                  // places whose errors stay in the nearest cache
constexpr float kClips[] = {1.0f, 0.85f, 0.7f}; // these and the steps: as reference.py has them
constexpr int kSteps = 6;

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
    float means[kWide], best[kWide] = {};
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

// `rows` sums of a tile's columns.
template <int rows>
void add_tile(const float *lower, int64_t pitch, const float *errors, int64_t before, int64_t width, float *target) {
    Lanes sum[rows][kTile];
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < kTile; t++) sum[r][t] = load(target + r * width + t * kStep);
    for (int64_t p = 0; p < before; p++) {
        Lanes error[kTile];
        for (int t = 0; t < kTile; t++) error[t] = load(errors + p * width + t * kStep);
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < kTile; t++) sum[r][t] += lower[r * pitch + p] * error[t];
    }
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < kTile; t++) store(target + r * width + t * kStep, sum[r][t]);
}

// target (rows, width) += lower (rows, pitch) · errors (before, width).
void add(const float *lower, int64_t pitch, const float *errors, int64_t before, int64_t rows, int64_t width,
         float *target) {
    for (int64_t first = 0; first < before; first += kPart) {
        const int64_t part = before - first < kPart ? before - first : kPart;
        for (int64_t column = 0; column < width; column += kTile * kStep)
            for (int64_t r = 0; r < rows;) {
                const float *from = lower + r * pitch + first, *error = errors + first * width + column;
                float *to = target + r * width + column;
                if (rows - r >= 6) add_tile<6>(from, pitch, error, part, width, to), r += 6;
                else if (rows - r >= 4) add_tile<4>(from, pitch, error, part, width, to), r += 4;
                else add_tile<1>(from, pitch, error, part, width, to), r += 1;
            }
    }
}

inline int64_t padded_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// A block's scratch: the numbers that the step in hand aims at, as they were, and the errors of all places so far.
struct Desk {
    int64_t width, most, floats;
    float *aim, *own, *values, *even, *scale, *zero, *errors;

    Desk(const RoundBlock &b, float *at) : floats(0) {
        width = padded_to(b.lines, kPad), most = padded_to(b.lines > b.step ? b.lines : b.step, kPad);
        const auto next = [&](int64_t count) { return floats += count, at ? at + floats - count : nullptr; };
        aim = next(b.step * width), own = next(b.step * width), values = next(kWide * most);
        even = next(most), scale = next(most), zero = next(most);
        errors = next(width * (b.lower16 ? (b.places + 1) / 2 : b.places));
    }
};

int64_t scratch(const RoundBlock &b) { return Desk(b, nullptr).floats; }

inline float number(const void *matrix, int64_t at, int32_t kind) {
    if (kind == FLOE_FLOAT32) return ((const float *)matrix)[at];
    const uint16_t bits = ((const uint16_t *)matrix)[at];
    return kind == FLOE_BFLOAT16 ? bits_to_float((uint32_t)bits << 16) : half_to_float(bits);
}

// The nearest, and of two as near the even one.
inline uint16_t bfloat16(float f) {
    const uint32_t bits = float_to_bits(f);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Of a step's numbers in the matrix, in the order in which they lie there: where each is on the desk.
struct Order {
    int64_t outer, inner, base, next, to, by;

    Order(const RoundBlock &b, const Desk &d, int64_t first, int64_t count) {
        const bool beside = b.across == 1;
        outer = beside ? count : b.lines, inner = beside ? b.lines : count;
        base = first * b.along, next = beside ? b.along : b.across;
        to = beside ? d.width : 1, by = beside ? 1 : d.width;
    }
};

template <int32_t kind> void take(const RoundBlock &b, const Order &order, float *own) {
    for (int64_t o = 0; o < order.outer; o++)
        for (int64_t i = 0; i < order.inner; i++)
            own[o * order.to + i * order.by] = number(b.matrix, order.base + o * order.next + i, kind);
}

// What each number of a step should become, but for what those before it in the step leave over.
void aim(const RoundBlock &b, const Desk &d, int64_t first, int64_t count, const RoundOps &ops) {
    memset(d.own, 0, (size_t)(count * d.width) * sizeof(float));
    const Order order(b, d, first, count);
    if (b.matrix_kind == FLOE_FLOAT32) take<FLOE_FLOAT32>(b, order, d.own);
    else if (b.matrix_kind == FLOE_BFLOAT16) take<FLOE_BFLOAT16>(b, order, d.own);
    else take<FLOE_FLOAT16>(b, order, d.own);
    memcpy(d.aim, d.own, (size_t)(count * d.width) * sizeof(float));
    if (b.lower16 != nullptr)
        ops.add16(b.lower16 + first * b.pitch16, b.pitch16, (const uint32_t *)d.errors, first, count, d.width, d.aim);
    else add(b.lower + first * b.places, b.places, d.errors, first, count, d.width, d.aim);
}

void fit_grids(const RoundBlock &b, const Desk &d, int64_t first, int64_t places) {
    const int64_t grids = b.each_place ? places : b.lines, count = b.each_place ? b.lines : places;
    for (int64_t i = 0; i < count; i++) d.even[i] = b.each_place ? 1.0f / (float)count : b.weight[first + i];
    for (int64_t g = 0; g < grids; g += kWide) {
        for (int64_t i = 0; i < count; i++)
            for (int64_t l = 0; l < kWide; l++) {
                const int64_t grid = g + l < grids ? g + l : g;
                d.values[i * kWide + l] = b.each_place ? d.aim[grid * d.width + i] : d.aim[i * d.width + grid];
            }
        fit(d.values, count, d.even, b.top, b.bytes, d.scale + g, d.zero + g);
    }
    for (int64_t g = 0; g < grids; g++) {
        const int64_t at =
            b.each_place ? (first + g) * b.grid_along : first / b.step * b.grid_along + g * b.grid_across;
        b.scale[at] = d.scale[g], b.zero[at] = d.zero[g];
    }
    for (int64_t g = grids; !b.each_place && g < d.width; g++) d.scale[g] = 1, d.zero[g] = 0;
}

// Rounds a step's numbers, place after place. own becomes the errors, aim the codes.
void round_step(const RoundBlock &b, const Desk &d, int64_t first, int64_t count) {
    const Lanes top = all(b.top);
    for (int64_t p = 0; p < count; p++) {
        float *aim = d.aim + p * d.width, *own = d.own + p * d.width;
        for (int64_t i = 0; i < d.width; i += kStep) {
            const Lanes s = b.each_place ? all(d.scale[p]) : load(d.scale + i),
                        z = b.each_place ? all(d.zero[p]) : load(d.zero + i);
            const Lanes code = nearest(load(aim + i) / s + z, top);
            store(own + i, load(own + i) - s * (code - z));
            store(aim + i, code);
        }
        for (int64_t i = b.lines; i < d.width; i++) own[i] = 0;
        for (int64_t later = p + 1; later < count; later++) {
            const float share = b.lower[(first + later) * b.places + first + p];
            for (int64_t i = 0; i < d.width; i += kStep)
                store(d.aim + later * d.width + i, load(d.aim + later * d.width + i) + share * load(own + i));
        }
    }
}

void note_errors(const RoundBlock &b, const Desk &d, int64_t first, int64_t count) {
    if (b.lower16 == nullptr) {
        memcpy(d.errors + first * d.width, d.own, (size_t)(count * d.width) * sizeof(float));
        return;
    }
    uint16_t *pairs = (uint16_t *)d.errors;
    for (int64_t p = first; p < first + count; p++) {
        uint16_t *to = pairs + p / 2 * 2 * d.width + p % 2;
        const float *own = d.own + (p - first) * d.width;
        for (int64_t i = 0; i < d.width; i++) to[2 * i] = bfloat16(own[i]);
    }
}

void give(const RoundBlock &b, const Desk &d, int64_t first, int64_t count) {
    const Order order(b, d, first, count);
    const bool outer = b.each_place == (b.across == 1); // whose grid it is: that of the outer loop, or the inner one
    for (int64_t o = 0; o < order.outer; o++)
        for (int64_t i = 0; i < order.inner; i++) {
            const float code = d.aim[o * order.to + i * order.by];
            const int64_t at = order.base + o * order.next + i, grid = outer ? o : i;
            b.codes[at] = (uint8_t)code;
            if (b.values == nullptr) continue;
            const float value = d.scale[grid] * (code - d.zero[grid]);
            if (b.values_kind == FLOE_FLOAT32) ((float *)b.values)[at] = value;
            else ((uint16_t *)b.values)[at] = bfloat16(value);
        }
}

void round_with(const RoundBlock &b, float *scratch, const RoundOps &ops) {
    const Desk desk(b, scratch);
    if (b.lower16 != nullptr) memset(desk.errors, 0, (size_t)((b.places + 1) / 2 * desk.width) * sizeof(float));
    for (int64_t first = 0; first < b.places; first += b.step) {
        const int64_t count = b.places - first < b.step ? b.places - first : b.step;
        aim(b, desk, first, count, ops);
        fit_grids(b, desk, first, count);
        round_step(b, desk, first, count);
        note_errors(b, desk, first, count);
        give(b, desk, first, count);
    }
}

} // namespace
} // namespace floe
