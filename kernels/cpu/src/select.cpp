// select: which calls a rule leaves of a router's choice, and what a neuron must reach in each.
#include "floe.h"

#include <cmath>

namespace {

constexpr double kMostEase = 1000.0; // kernels/rule.py: MOST_EASE

} // namespace

int floe_select(const floe_rule *rule, int64_t tokens, int64_t top_k, const int64_t *index, const float *weights,
                int64_t experts, const float *signal, const float *product, const float *late, int64_t *call_token,
                int64_t *call_expert, float *call_weight, float *thresholds, float *products, float *lates) {
    const int64_t parts = rule->parts;
    if (parts < 1 || parts > 2 || tokens < 0 || top_k < 0 || experts < 0 || experts % parts) return FLOE_BAD_SHAPE;
    const double least[2] = {rule->drop, rule->major > rule->drop ? rule->major : rule->drop};
    int64_t call = 0;
    for (int64_t t = 0; t < tokens; t++, index += top_k, weights += top_k) {
        double sum = 0;
        for (int64_t k = 0; k < top_k; k++) sum += weights[k];
        const double mean = sum / (double)top_k;
        for (int64_t k = 0; k < top_k; k++) {
            if (index[k] < 0 || index[k] >= experts / parts) return FLOE_BAD_INDEX;
            const double w = weights[k];
            double ease = 1;
            if (rule->weighed) {
                ease = w == 0 ? kMostEase : mean / w;
                if (ease > kMostEase) ease = kMostEase;
            }
            for (int64_t part = 0; part < parts; part++, call++) {
                const int64_t expert = parts * index[k] + part;
                call_token[call] = t;
                call_expert[call] = expert;
                call_weight[call] = weights[k];
                // A weight that is not a number stays, and is noticed.
                thresholds[call] = w < least[part] * mean ? INFINITY : (float)(signal[expert] * ease);
                if (products) products[call] = product ? (float)(product[expert] * ease) : 0;
                if (lates) lates[call] = late ? (float)(late[expert] * ease) : 0;
            }
        }
    }
    return FLOE_OK;
}
