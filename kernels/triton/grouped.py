# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
"""Products of many tokens with all experts of a layer at once: calls sorted by expert, cut into tiles of one expert.

Each program finds its tile in device memory, so that the host waits for no count and launches as many kernels whatever
the number of experts. The grid has room for the worst case; a program without a tile leaves at once. Codes become
numbers on their way to the tensor cores.
"""

from __future__ import annotations

import triton.language as tl

from .codes import UNGATED, applied, load_float, load_tile
from .jit import device_code

DEEP = tl.constexpr(64)  # columns of weights at a time: a chunk of codes


@device_code()
def tile_of(starts, first, end, EXPERTS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr):
    """The expert of this program's tile, its calls (TOKENS,) among the sorted ones, and which of them exist; EXPERTS or
    more if there is no such tile. Of the sorted calls those from `first` to `end` have tiles.
    """
    lane = tl.arange(0, LANES)
    begins = tl.load(starts + lane, mask=lane < EXPERTS, other=0)
    ends = tl.load(starts + 1 + lane, mask=lane < EXPERTS, other=0)
    begins = tl.minimum(tl.maximum(begins, first), end)
    ends = tl.minimum(tl.maximum(ends, first), end)
    tiles = (ends - begins + TOKENS - 1) // TOKENS
    tile = tl.program_id(0)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
    inside = tile - tl.sum(tl.where(lane < expert, tiles, 0), 0)
    mine = lane == expert
    call = tl.sum(tl.where(mine, begins, 0), 0) + inside * TOKENS + tl.arange(0, TOKENS)
    return expert.to(tl.int64), call, call < tl.sum(tl.where(mine, ends, 0), 0)


@device_code()
def times(x, weights, CORES: tl.constexpr):
    """x (M, K) times weights (K, N) of float32: by tensor cores in x's 16 bits, or in float32."""
    if CORES:
        return tl.dot(x, weights.to(x.dtype))
    return tl.dot(x.to(tl.float32), weights.to(x.dtype).to(tl.float32), input_precision="ieee")


@device_code("first", "end")
def grouped_product_kernel(
    x, tokens, order, starts, q, scale, zero, bias, rows, magic, limits, products, places, h, counts, first, end,
    V: tl.constexpr, W: tl.constexpr, FUNCTION: tl.constexpr, OTHER_FUNCTION: tl.constexpr,
    BIASED: tl.constexpr, BIAS_AT: tl.constexpr, SECOND: tl.constexpr, CORES: tl.constexpr,
    EXPERTS: tl.constexpr, NEURONS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """h (end - first, NEURONS) of sorted calls: the products of both projections, 0 where a threshold is not reached.

    `order` says which calls the sorted ones are; places (P,) and counts (P, 2) are of the calls in their own order:
    where each is among the sorted ones, and its neurons, added to what is there. V, W: vectors of the signal and of the
    other projection; BIAS_AT: bytes from a record's start to the bias of the latter. ALONE: one expert, whose call i is
    of token i; then tokens, order, places and counts are not used.
    """
    expert, call, live = tile_of(starts, first, end, EXPERTS, TOKENS, LANES)
    if expert < EXPERTS:
        if ALONE:
            place = call.to(tl.int64)
            token = place
        else:
            place = tl.load(order + call, mask=live, other=0)
            if tl.program_id(1) == 0:
                tl.store(places + place, call, mask=live)
            token = tl.load(tokens + place, mask=live, other=0)
        n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        there = n < NEURONS
        row = expert * NEURONS + tl.minimum(n, NEURONS - 1)
        v = tl.zeros((TOKENS, ROWS), tl.float32)
        z = tl.zeros((TOKENS, ROWS), tl.float32)
        for start in range(0, V.n, DEEP):
            k = start + tl.arange(0, DEEP)
            part = tl.load(x + token[:, None] * V.n + k[None, :], mask=live[:, None] & (k < V.n)[None, :], other=0.0)
            v += times(part, tl.trans(load_tile(q, scale, zero, row, start, magic, V)), CORES)
            if OTHER_FUNCTION != UNGATED:
                z += times(part, tl.trans(load_tile(rows, rows, rows, row, start, magic, W)), CORES)
        if BIASED:
            v += tl.load(bias + row)[None, :]
            if OTHER_FUNCTION != UNGATED:
                z += load_float(rows, row * W.row + BIAS_AT, there)[None, :]
        v = applied(v, FUNCTION)
        both = v
        if OTHER_FUNCTION != UNGATED:
            both *= applied(z, OTHER_FUNCTION)
        real = live[:, None] & there[None, :]
        limit = tl.load(limits + place, mask=live, other=0.0)[:, None]
        active = real & ((tl.abs(v) < limit) == 0)  # what is not a number reaches it
        kept = active
        if SECOND:
            second = tl.load(products + place, mask=live, other=0.0)[:, None]
            kept = active & ((tl.abs(both) < second) == 0)
        both = tl.where(kept, both, 0.0).to(h.dtype.element_ty)
        tl.store(h + (call - first)[:, None] * NEURONS + n[None, :], both, mask=real)
        if not ALONE:
            tl.atomic_add(counts + 2 * place, tl.sum(active.to(tl.int32), 1).to(tl.int64), mask=live)
            tl.atomic_add(counts + 2 * place + 1, tl.sum(kept.to(tl.int32), 1).to(tl.int64), mask=live)


@device_code("first", "end")
def grouped_down_kernel(
    h, order, starts, rows, magic, weights, parts, first, end,
    D: tl.constexpr, CORES: tl.constexpr, EXPERTS: tl.constexpr, NEURONS: tl.constexpr,
    TOKENS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """parts (end - first, H) of sorted calls: h times down, weighted unless ALONE."""
    expert, call, live = tile_of(starts, first, end, EXPERTS, TOKENS, LANES)
    if expert < EXPERTS:
        start = tl.program_id(1) * DEEP
        column = start + tl.arange(0, DEEP)
        own = h + (call - first)[:, None] * NEURONS
        y = tl.zeros((TOKENS, DEEP), tl.float32)
        for begin in range(0, NEURONS, ROWS):
            n = begin + tl.arange(0, ROWS)
            there = n < NEURONS
            part = tl.load(own + n[None, :], mask=live[:, None] & there[None, :], other=0.0)
            row = expert * NEURONS + tl.minimum(n, NEURONS - 1)
            y += times(part, load_tile(rows, rows, rows, row, start, magic, D), CORES)
        if not ALONE:
            place = tl.load(order + call, mask=live, other=0)
            y *= tl.load(weights + place, mask=live, other=0.0).to(tl.float32)[:, None]
        at = (call - first)[:, None] * D.n + column[None, :]
        tl.store(parts + at, y.to(parts.dtype.element_ty), mask=live[:, None] & (column < D.n)[None, :])


@device_code("first", "end")
def grouped_sum_kernel(parts, order, starts, places, y, first, end, N: tl.constexpr, COLUMNS: tl.constexpr):
    """y (B, N) float32 plus the parts of each token's calls in a fixed order; `order` sorts calls by token."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < N
    total = tl.load(y + token * N + column, mask=within, other=0.0)
    for i in range(tl.load(starts + token), tl.load(starts + token + 1)):
        place = tl.load(places + tl.load(order + i))
        if (place >= first) & (place < end):
            total += tl.load(parts + (place - first) * N + column, mask=within, other=0.0).to(tl.float32)
    tl.store(y + token * N + column, total, mask=within)
