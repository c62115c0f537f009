// Rounding of weights while a model is packed (models/packing/rounding.py), in blocks of columns.
#include "arch/round_ops.h"
#include "buffers.h"
#include "expert_ops.h"
#include "floe_pack.h"
#include "thread_pool.h"

#include <string.h>

#include <atomic>

namespace floe {
namespace {

constexpr int64_t kMostRows = 256;
constexpr int64_t kColumns = 64; // of a block, where they have grids of their own

const RoundOps &round_ops() {
    const RoundOps *const all[] = {round_avx512(), round_avx2()};
    for (const RoundOps *ops : all)
        if (ops != nullptr && strcmp(ops->name, row_ops().name) == 0) return *ops;
    return *round_portable();
}

struct Rounded {
    const floe_rounding &r;
    const float *weight, *factor;
    float *left;
    uint8_t *codes;
    float *scale, *zero;
    std::atomic<bool> failed;

    int64_t wide() const { return r.each_row ? r.group : kColumns; }
    int64_t blocks() const { return (r.columns + wide() - 1) / wide(); }

    void round(int64_t item) {
        thread_local Buffer buffer;
        const RoundOps &ops = round_ops();
        const int64_t first = item * wide(), columns = r.columns - first < wide() ? r.columns - first : wide();
        float *scratch = (float *)buffer.take(ops.scratch(r.rows, columns) * (int64_t)sizeof(float));
        if (scratch == nullptr) {
            failed = true;
            return;
        }
        const int64_t grid = r.each_row ? item : first, pitch = r.each_row ? blocks() : r.columns;
        ops.round({r.rows, columns, r.columns, r.each_row != 0, (float)((1 << r.bits) - 1), r.scale_bytes == 1, weight,
                   factor, r.factor_pitch, left + first, codes + first, scale + grid, zero + grid, pitch},
                  scratch);
    }
};

} // namespace
} // namespace floe

using namespace floe;

int floe_round_rows(const floe_rounding *rounding, const float *weight, const float *factor, int threads, float *left,
                    uint8_t *codes, float *scale, float *zero) {
    const floe_rounding &r = *rounding;
    if (r.rows < 1 || r.rows > kMostRows || r.columns < 1 || r.bits < 1 || r.bits > 8) return FLOE_BAD_SHAPE;
    if (r.scale_bytes != 2 && (r.scale_bytes != 1 || r.bits > 4)) return FLOE_BAD_SHAPE;
    if (r.factor_pitch < r.rows || (r.each_row != 0) == (weight != nullptr)) return FLOE_BAD_SHAPE;
    if (r.each_row && (r.group < 1 || r.group > kMostRows || r.columns % r.group)) return FLOE_BAD_SHAPE;
    Rounded work = {r, weight, factor, left, codes, scale, zero, {false}};
    parallel_for(
        threads, work.blocks(), [](void *opaque, int64_t item, int) { ((Rounded *)opaque)->round(item); }, &work);
    return work.failed ? FLOE_NO_MEMORY : FLOE_OK;
}
