// sparse_swiglu: the active neurons' records, each read once: other · x, then the down column into y.
//
// A token's list of active neurons is cut into slices by its length alone; each slice has a sum of its own, and the
// sums are added in order. So the result depends neither on the number of threads nor on other tokens.
//
// Rows lie scattered, and the time to reach a row's first line exceeds the time to compute it. So while some rows are
// computed, others are prefetched line by line (RowOps' `ahead`).
#include "sparse_sum.h"
#include "thread_pool.h"

#include <string.h>

#include <algorithm>
#include <cmath>

namespace floe {
namespace {

constexpr int64_t kSlices = 24;   // enough that a thread that falls behind is caught up with
constexpr int64_t kMinRows = 16;  // in a slice: below that, zeroing and adding its sum would be felt
constexpr int64_t kColumns = 512; // of y, summed over the slices as one item

inline void prefetch_lines(const uint8_t *p, int64_t lines) {
    for (; lines > 0; lines--, p += 64) FLOE_PREFETCH(p);
}

// Rows whose down columns are to be added, kBatch at a time, so that sums are read and written once for as many. Of
// those behind the next batch, none or kBatch at most have been fetched.
struct Kept {
    Stored down[3 * kBatch];
    float a[3 * kBatch];
    int count = 0, fetched = 0;
    int64_t lines; // of a column

    explicit Kept(int64_t lines) : lines(lines) {}

    void push(const Stored &column, float factor) {
        a[count] = factor;
        down[count++] = column;
        if (fetched < kBatch) prefetch_lines(down[fetched++].scale, lines); // the first ones
    }

    // The size of the next batch, and what to fetch while it is added.
    int fetch(Ahead *ahead) {
        const int batch = count < kBatch ? count : kBatch, end = count < 2 * kBatch ? count : 2 * kBatch;
        for (int i = 0; fetched < end; i++) ahead[i] = {down[fetched++].scale, lines};
        return batch;
    }

    void pop(int batch) {
        for (int i = batch; i < count; i++) {
            down[i - batch] = down[i];
            a[i - batch] = a[i];
        }
        count -= batch;
        fetched -= batch;
    }
};

} // namespace

void SparseSum::compute(int64_t item, int worker) {
    const SparseSum &c = *this;
    const RowOps &ops = row_ops();
    const Slice &slice = c.slices[item];
    const floe_rows &stored_rows = c.rows;
    const floe_vector &down = stored_rows.down;
    const Token *token = gated(stored_rows) ? c.prepared + c.calls.token[slice.call] : nullptr;
    const int64_t first_row = c.calls.expert[slice.call] * stored_rows.neurons, row_bytes = stored_rows.row_bytes;
    const float weight = c.calls.weight[slice.call];
    const float threshold = c.calls.product == nullptr ? 0.0f : c.calls.product[slice.call];
    uint8_t *scratch = c.scratch + worker * c.scratch_bytes;
    float *sum = c.sums + item * down.n, *bias = c.bias + item * c.bias_stride;
    memset(sum, 0, (size_t)down.n * sizeof(float));
    memset(bias, 0, (size_t)c.bias_stride * sizeof(float));

    const int64_t biases = bias_at(stored_rows);
    const int64_t other_lines = (c.down_at + 63) / 64, down_lines = (row_bytes - c.down_at + 63) / 64;
    const auto row = [&](int64_t i) { return stored_rows.data + (first_row + c.active.neurons[i]) * row_bytes; };
    const auto batch_end = [&](int64_t start) { return start + kBatch < slice.end ? start + kBatch : slice.end; };

    // While rows of a batch are computed, those of the next one arrive; while down columns are added, those of the
    // next ones. So the memory always has as much to bring as is computed at the time.
    Kept kept(down_lines);
    int64_t kept_count = 0;
    for (int64_t i = slice.start; i < batch_end(slice.start); i++) prefetch_lines(row(i), other_lines);
    for (int64_t start = slice.start; start < slice.end; start += kBatch) {
        const int rows = (int)(batch_end(start) - start);
        Stored other[kBatch];
        Ahead ahead[kBatch] = {};
        float g[kBatch][kBatch] = {};
        for (int r = 0; r < rows && gated(stored_rows); r++) {
            other[r] = stored(stored_rows.other, row(start + r));
            if (start + kBatch + r < slice.end) ahead[r] = {row(start + kBatch + r), other_lines};
        }
        if (gated(stored_rows)) ops.dot(stored_rows.other, other, rows, &token, 1, nullptr, g, scratch, ahead);
        for (int r = 0; r < rows; r++) {
            const float product =
                applied(stored_rows.function, g[r][0] + bias_of(stored_rows, biases, row(start + r))) *
                c.active.values[start + r];
            if (std::fabs(product) < threshold) continue; // NaN goes on to the result
            kept_count++;
            if (product != 0) kept.push(stored(down, row(start + r) + c.down_at), weight * product);
        }
        while (kept.count >= 2 * kBatch || (kept.count > 0 && start + kBatch >= slice.end)) {
            Ahead next[kBatch] = {};
            const int batch = kept.fetch(next);
            ops.axpy(down, kept.down, kept.a, batch, c.digits, sum, bias, scratch, next);
            kept.pop(batch);
        }
    }
    ops.finish(down, sum, bias);
    slices[item].kept = kept_count; // once: neighbouring slices share a cache line
}

namespace {

// One token's columns item * kColumns ..., summed over the slices of its calls.
void add_slices(const SparseSum &c, int64_t item, float *y) {
    const int64_t width = c.rows.down.n, per_token = (width + kColumns - 1) / kColumns;
    const int64_t token = item / per_token, start = item % per_token * kColumns;
    const int64_t count = start + kColumns < width ? kColumns : width - start;
    float total[kColumns] = {};
    for (int64_t s = 0; s < c.slice_count; s++) {
        if (c.calls.token[c.slices[s].call] != token) continue;
        const float *part = c.sums + s * width + start;
        for (int64_t i = 0; i < count; i++) total[i] += part[i];
    }
    memcpy(y + token * width + start, total, (size_t)count * sizeof(float));
}

// Whether a neuron stands twice in one call. Ascending lists, the usual ones, answer by themselves.
int check_active(int64_t calls, const int64_t *offsets, const int32_t *active, int64_t neurons, Buffer &buffer) {
    if (offsets[0] != 0) return FLOE_BAD_INDEX;
    for (int64_t p = 0; p < calls; p++)
        if (offsets[p + 1] < offsets[p]) return FLOE_BAD_INDEX;
    if (!in_range(active, offsets[calls], neurons)) return FLOE_BAD_INDEX;
    for (int64_t p = 0; p < calls; p++) {
        bool ascending = true;
        for (int64_t i = offsets[p] + 1; i < offsets[p + 1]; i++) ascending &= active[i - 1] < active[i];
        if (ascending) continue;
        uint8_t *seen = buffer.take(neurons);
        if (seen == nullptr) return FLOE_NO_MEMORY;
        memset(seen, 0, (size_t)neurons);
        for (int64_t i = offsets[p]; i < offsets[p + 1]; i++) {
            if (seen[active[i]]) return FLOE_REPEATED;
            seen[active[i]] = 1;
        }
    }
    return FLOE_OK;
}

} // namespace

int SparseSum::prepare(const float *x, int64_t tokens, const floe_rows &of_rows, const floe_calls &of_calls,
                       const floe_active &of_active, int with_digits, int threads) {
    const floe_vector &other = of_rows.other, &down = of_rows.down;
    const int64_t *const offsets = of_active.offsets, count = of_calls.count, neurons = of_rows.neurons;
    const int64_t down_codes = code_bytes(down);
    if (other_bytes(of_rows) < 0 || down_codes < 0 || other.n != down.n || !is_function(of_rows.function) ||
        tokens < 0 || of_rows.experts < 0 || neurons < 0 || count < 0 || with_digits < 1 || with_digits > 3)
        return FLOE_BAD_SHAPE;
    down_at = floe::down_at(of_rows);
    if (of_rows.row_bytes < down_at + head_bytes(down) + down_codes) return FLOE_BAD_SHAPE;
    if (!in_range(of_calls.token, count, tokens) || !in_range(of_calls.expert, count, of_rows.experts))
        return FLOE_BAD_INDEX;
    if (const int error = check_active(count, offsets, of_active.neurons, neurons, buffer_)) return error;

    const int64_t width = down.n;
    // By each token's own neurons, so that its sums do not depend on the others.
    int64_t *const each = (int64_t *)sizes_.take(aligned(8 * tokens));
    if (each == nullptr) return FLOE_NO_MEMORY;
    std::fill_n(each, tokens, 0);
    for (int64_t p = 0; p < count; p++) each[of_calls.token[p]] += offsets[p + 1] - offsets[p];
    for (int64_t t = 0; t < tokens; t++) each[t] = std::max((each[t] + kSlices - 1) / kSlices, kMinRows);
    slice_count = 0;
    for (int64_t p = 0; p < count; p++) {
        const int64_t rows_each = each[of_calls.token[p]];
        slice_count += (offsets[p + 1] - offsets[p] + rows_each - 1) / rows_each;
    }
    bias_stride = aligned(4 * (groups_of(down) + width / kChunk + 16)) / 4;
    scratch_bytes = aligned(width + kChunk);
    uint8_t *memory = buffer_.take((gated(of_rows) ? tokens_bytes(other, tokens) : 0) +
                                   aligned((int64_t)sizeof(Slice) * slice_count) + aligned(4 * slice_count * width) +
                                   aligned(4 * slice_count * bias_stride) + threads * scratch_bytes);
    if (memory == nullptr) return FLOE_NO_MEMORY;
    prepared = gated(of_rows) ? prepare_tokens(other, x, tokens, with_digits, threads, memory) : nullptr;
    slices = carve<Slice>(memory, slice_count);
    int64_t filled = 0;
    for (int64_t p = 0; p < count; p++)
        for (int64_t start = offsets[p], rows_each = each[of_calls.token[p]]; start < offsets[p + 1];
             start += rows_each)
            slices[filled++] = {p, start, start + rows_each < offsets[p + 1] ? start + rows_each : offsets[p + 1], 0};
    sums = carve<float>(memory, slice_count * width);
    bias = carve<float>(memory, slice_count * bias_stride);
    scratch = memory;
    rows = of_rows;
    calls = of_calls;
    active = of_active;
    token_count = tokens;
    digits = with_digits;
    return FLOE_OK;
}

void SparseSum::add(int threads, float *y, int64_t *kept) const {
    struct Target {
        const SparseSum &sum;
        float *y;
    } target{*this, y};
    const auto work = [](void *to, int64_t item, int) { add_slices(((Target *)to)->sum, item, ((Target *)to)->y); };
    parallel_for(threads, token_count * ((rows.down.n + kColumns - 1) / kColumns), work, &target);
    for (int64_t p = 0; p < calls.count; p++) kept[p] = 0;
    for (int64_t s = 0; s < slice_count; s++) kept[slices[s].call] += slices[s].kept;
}

} // namespace floe

using namespace floe;

int floe_sparse_swiglu(const float *x, int64_t tokens, const floe_rows *rows, const floe_calls *calls,
                       const floe_active *active, int digits, int threads, float *y, int64_t *kept) {
    thread_local SparseSum sum;
    threads = threads < 1 ? 1 : threads < kMaxThreads ? threads : kMaxThreads;
    if (const int error = sum.prepare(x, tokens, *rows, *calls, *active, digits, threads)) return error;
    parallel_for(
        threads, sum.slice_count, [](void *it, int64_t item, int worker) { ((SparseSum *)it)->compute(item, worker); },
        &sum);
    sum.add(threads, y, kept);
    return FLOE_OK;
}
