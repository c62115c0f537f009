// A short convolution in place of attention, of one token.
#include "mixers.h"

#include <string.h>

namespace floe {

bool is_convolution(const floe_dense_layer &l) {
    return l.convolution->taps >= 2 && is_shape(l.first, 3 * l.hidden, l.hidden) && is_shape(l.out, l.hidden, l.hidden);
}

void step_convolution(const floe_dense_layer &l, const floe_place &place, float *states, const float *given,
                      float *out) {
    const floe_convolution &c = *l.convolution;
    const int64_t width = l.hidden, kept = (c.taps - 1) * width;
    const float *const before = states + place.position % place.states * kept, *const x = given + 2 * width;
    float *const after = states + (place.position + 1) % place.states * kept, *const own = after + kept - width;
    memcpy(after, before + width, (size_t)(4 * (kept - width)));
    for (int64_t i = 0; i < width; i++) own[i] = given[i] * x[i];
    for (int64_t i = 0; i < width; i++) out[i] = c.bias == nullptr ? 0 : c.bias[i];
    for (int64_t t = 0; t < c.taps; t++) {
        const float *const row = t + 1 < c.taps ? before + t * width : own, *const factors = c.conv + t * width;
        for (int64_t i = 0; i < width; i++) out[i] += factors[i] * row[i];
    }
    for (int64_t i = 0; i < width; i++) out[i] *= given[width + i];
}

} // namespace floe
