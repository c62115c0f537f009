// Rounding of weights while a model is packed (models/packing/rounding.py), in blocks of columns.
#include "arch/cpu_features.h"
#include "arch/round_ops.h"
#include "buffers.h"
#include "expert_ops.h"
#include "floe_pack.h"
#include "thread_pool.h"

#include <string.h>

#include <atomic>

namespace floe {
namespace {

constexpr int64_t kLines = 64, kStep = 64; // side by side, and of a line at once, where no grid says it

const RoundOps &round_ops() {
    const RoundOps *const all[] = {round_avx512(), round_avx2()};
    for (const RoundOps *ops : all)
        if (ops != nullptr && strcmp(ops->name, row_ops().name) == 0) return *ops;
    return *round_portable();
}

struct Rounded {
    const floe_rounding &r;
    RoundBlock all; // of the whole matrix
    std::atomic<bool> failed;

    int64_t wide() const { return r.down ? r.group : kLines; }
    int64_t blocks() const { return (all.lines + wide() - 1) / wide(); }

    void round(int64_t item) {
        thread_local Buffer buffer;
        const RoundOps &ops = round_ops();
        const int64_t line = item * wide(), at = line * all.across;
        RoundBlock b = all;
        b.lines = all.lines - line < wide() ? all.lines - line : wide();
        b.matrix = (const uint8_t *)all.matrix + at * (r.matrix_kind == FLOE_FLOAT32 ? 4 : 2);
        b.codes += at;
        if (b.values) b.values = (uint8_t *)all.values + at * (r.values_kind == FLOE_FLOAT32 ? 4 : 2);
        const int64_t grid = r.down ? item : line * all.grid_across;
        b.scale += grid, b.zero += grid;
        float *scratch = (float *)buffer.take(ops.scratch(b) * (int64_t)sizeof(float));
        if (scratch == nullptr) failed = true;
        else ops.round(b, scratch);
    }
};

} // namespace
} // namespace floe

using namespace floe;

int floe_rounds_by_bfloat16(void) { return has_bfloat16() && round_ops().add16 != nullptr; }

int floe_round_matrix(const floe_rounding *rounding, const float *weight, const float *lower, const void *lower16,
                      const void *matrix, int threads, uint8_t *codes, void *values, float *scale, float *zero) {
    const floe_rounding &r = *rounding;
    if (r.rows < 1 || r.columns < 1 || r.bits < 1 || r.bits > 8) return FLOE_BAD_SHAPE;
    if (r.scale_bytes != 2 && (r.scale_bytes != 1 || r.bits > 4)) return FLOE_BAD_SHAPE;
    if (r.group < 1 || r.group > kMostGroup || r.columns % r.group) return FLOE_BAD_SHAPE;
    if ((r.down != 0) == (weight != nullptr)) return FLOE_BAD_SHAPE;
    if (lower16 != nullptr && !floe_rounds_by_bfloat16()) return FLOE_BAD_SHAPE;
    const int64_t groups = r.columns / r.group;
    RoundBlock all = {};
    all.places = r.down ? r.rows : r.columns, all.lines = r.down ? r.columns : r.rows;
    all.along = r.down ? r.columns : 1, all.across = r.down ? 1 : r.columns;
    all.step = r.down ? kStep : r.group, all.each_place = r.down != 0;
    all.top = (float)((1 << r.bits) - 1), all.bytes = r.scale_bytes == 1, all.weight = weight;
    all.lower = lower, all.lower16 = (const uint16_t *)lower16, all.pitch16 = r.pitch16;
    all.matrix = matrix, all.matrix_kind = r.matrix_kind, all.codes = codes;
    all.values = values, all.values_kind = r.values_kind, all.scale = scale, all.zero = zero;
    all.grid_along = r.down ? groups : 1, all.grid_across = r.down ? 1 : groups;
    Rounded work = {r, all, {false}};
    parallel_for(
        threads, work.blocks(), [](void *opaque, int64_t item, int) { ((Rounded *)opaque)->round(item); }, &work);
    return work.failed ? FLOE_NO_MEMORY : FLOE_OK;
}
