// select: which calls a rule leaves of a router's choice, and what a neuron must reach in each.
#include "floe.h"

#include <cmath>

namespace {

constexpr double kMostEase = 1000.0; // kernels/rule.py: MOST_EASE

} // namespace

int floe_select(const floe_rule *rule, const floe_limits *limits, int64_t tokens, int64_t top_k, const int64_t *index,
                const float *weights, const floe_calls *calls) {
    const floe_limits &l = *limits;
    const floe_calls &c = *calls;
    const int64_t parts = rule->parts;
    if (parts < 1 || parts > 2 || tokens < 0 || top_k < 0 || l.experts < 0 || l.experts % parts) return FLOE_BAD_SHAPE;
    if (c.count != tokens * top_k * parts || (c.count > 0 && c.threshold == nullptr)) return FLOE_BAD_SHAPE;
    const double least[2] = {rule->drop, rule->major > rule->drop ? rule->major : rule->drop};
    int64_t call = 0;
    for (int64_t t = 0; t < tokens; t++, index += top_k, weights += top_k) {
        double sum = 0;
        for (int64_t k = 0; k < top_k; k++) sum += weights[k];
        const double mean = sum / (double)top_k;
        for (int64_t k = 0; k < top_k; k++) {
            if (index[k] < 0 || index[k] >= l.experts / parts) return FLOE_BAD_INDEX;
            const double w = weights[k];
            double ease = 1;
            if (rule->weighed) {
                ease = w == 0 ? kMostEase : mean / w;
                if (ease > kMostEase) ease = kMostEase;
            }
            for (int64_t part = 0; part < parts; part++, call++) {
                const int64_t expert = parts * index[k] + part;
                c.token[call] = t;
                c.expert[call] = expert;
                c.weight[call] = weights[k];
                // A weight that is not a number stays, and is noticed; so does an expert with a negative limit.
                const bool left_out = w < least[part] * mean && l.signal[expert] >= 0;
                c.threshold[call] = left_out ? INFINITY : (float)(l.signal[expert] * ease);
                if (c.product) c.product[call] = l.product ? (float)(l.product[expert] * ease) : 0;
                if (c.late) c.late[call] = l.late ? (float)(l.late[expert] * ease) : 0;
            }
        }
    }
    return FLOE_OK;
}
