# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
"""Attention of one token over the keys and values of those before it, however many: a captured launch serves them all.

The position and the address of the layer's entries are read from device memory, so neither a longer conversation nor
memory that has moved needs another launch. Positions are cut into splits, one program for each and each head of keys,
since one token has too few heads to fill a GPU; `combine_kernel` adds up their parts in a fixed order (as in
Flash-Decoding). The new token's own keys and values are not read back: the first split has them in registers.

Tensor cores multiply where they can (`Shape.cores`): the heads of queries of one head of keys are then a block of at
least 16 rows, most of them empty, and no sum goes across threads, which cost four times as long as the memory.

`load_entries`, `scaled` and `store_entry` alone know in which form entries are stored (`kernels/entries.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl

from ..entries import LARGEST as _LARGEST
from .jit import device_code

LARGEST = tl.constexpr(float(_LARGEST))
ROUNDING = tl.constexpr(12582912.0)  # 1.5 * 2^23: added and taken off again, it leaves the nearest integer


class Shape(NamedTuple):
    """How a layer attends; all of it becomes constants of the compiled kernel.

    Attributes:
        heads, kv_heads, dim, scale, eps, clip, window: as in `step.Heads`, without a clip or window 0. normed: whether
            queries and keys are normalized, 1 over each head, 2 over all of them. aligned: bytes that divide each
            layer's address. coded: whether entries are codes, see `kernels/entries.py`. value_heads: heads of values
            that are projected; 0 where keys are alone. v_normed, rope_at: as in `Heads`. gates: of the output,
            heads behind the queries. cores: whether tensor cores multiply, with queries and weights of 16 bits.
    """

    heads: int
    kv_heads: int
    dim: int
    scale: float
    eps: float
    clip: float
    window: int
    normed: int
    aligned: int
    coded: bool
    value_heads: int
    v_normed: bool
    rope_at: int
    gates: int
    cores: bool


@device_code()
def scales_of(entries, n, row, A: tl.constexpr):
    """Where the scale of one row of the codes of tokens n is."""
    rows: tl.constexpr = 2 * A.kv_heads
    at = n.to(tl.int64) * (rows * (A.dim + 2) // 2) + rows * A.dim // 2 + row
    return entries.to(tl.pointer_type(tl.float16)) + at


@device_code()
def scaled(x, entries, n, row, seen, A: tl.constexpr):
    """x (G, N) of one row of the entries of tokens n (N,), by the scales of their codes where they are codes."""
    if A.coded:
        x *= tl.load(scales_of(entries, n, row, A), mask=seen, other=0.0).to(tl.float32)[None, :]
    return x


@device_code()
def load_entries(entries, n, row, d, live, A: tl.constexpr):
    """Columns d (D,) of one row of the entries of tokens n (N,): (N, D) as stored, see `scaled`."""
    length: tl.constexpr = 2 * A.kv_heads * (A.dim + 2) if A.coded else 2 * A.kv_heads * A.dim
    return tl.load(entries + n.to(tl.int64)[:, None] * length + row * A.dim + d[None, :], mask=live, other=0)


@device_code()
def met(q, keys, A: tl.constexpr, CORES: tl.constexpr):
    """Products of queries (G, K) and what is stored of tokens (N, K): (G, N) float32. CORES: the type of numbers that
    tensor cores multiply.
    """
    if A.cores:
        return tl.dot(q.to(CORES), tl.trans(keys.to(CORES)))
    return tl.sum(q[:, None, :] * keys.to(tl.float32)[None, :, :], 2)


@device_code()
def gathered(weights, values, A: tl.constexpr, CORES: tl.constexpr):
    """The sums (G, K) of values (N, K), each by its weights (G, N), float32."""
    if A.cores:
        return tl.dot(weights.to(CORES), values.to(CORES))
    return tl.sum(weights[:, :, None] * values.to(tl.float32)[None, :, :], 1)


@device_code()
def store_entry(entries, n, row, d, value, live, A: tl.constexpr, STORED: tl.constexpr):
    """Write value (1, D) to one row of the entry of token n; returns it as it can be read back."""
    if A.coded:
        # What is not finite makes the sum, and so the scale, no number.
        scale = (tl.max(tl.abs(value), 1) / LARGEST + tl.sum(value * 0.0, 1)).to(tl.float16)
        factor = scale.to(tl.float32)[:, None]
        nearest = tl.where(factor > 0.0, value / factor, 0.0) + ROUNDING - ROUNDING
        codes = tl.minimum(tl.maximum(nearest, -LARGEST), LARGEST)
        at = n.to(tl.int64) * (2 * A.kv_heads * (A.dim + 2)) + row * A.dim + d[None, :]
        tl.store(entries + at, codes.to(STORED), mask=live)
        place = scales_of(entries, n, row, A) + tl.zeros((1,), tl.int32)
        tl.store(place, scale, mask=tl.max(live.to(tl.int32), 1) > 0)
        return codes * factor
    stored = value.to(STORED)
    at = (n.to(tl.int64) * (2 * A.kv_heads) + row) * A.dim + d[None, :]
    tl.store(entries + at, stored, mask=live)
    return stored.to(tl.float32)


@device_code()
def clipped(x, A: tl.constexpr):
    """x within the clip. What is not a number stays so."""
    if A.clip > 0.0:
        x = tl.where(x > A.clip, A.clip, tl.where(x < -A.clip, -A.clip, x))
    return x


@device_code()
def prepared(part, weight, head, d, live, HEADS: tl.constexpr, A: tl.constexpr, ALL: tl.constexpr):
    """Columns d of heads `head` (R,) of queries or keys, before rope: (R, D) float32."""
    x = tl.load(part + head[:, None] * A.dim + d[None, :], mask=live, other=0.0).to(tl.float32)
    if A.normed == 1:
        mean = tl.sum(x * x, 1) / A.dim
        own = tl.load(weight + d[None, :], mask=live, other=0.0).to(tl.float32)
        x = x / tl.sqrt(mean + A.eps)[:, None] * own
    if A.normed == 2:
        squares = tl.zeros((ALL,), tl.float32)
        for start in range(0, HEADS * A.dim, ALL):
            i = start + tl.arange(0, ALL)
            one = tl.load(part + i, mask=i < HEADS * A.dim, other=0.0).to(tl.float32)
            squares += one * one
        mean = tl.sum(squares, 0) / (HEADS * A.dim)
        own = tl.load(weight + head[:, None] * A.dim + d[None, :], mask=live, other=0.0).to(tl.float32)
        x = x / tl.sqrt(mean + A.eps) * own
    return clipped(x, A)


@device_code()
def turned(part, weight, head, d, live, rope, HEADS: tl.constexpr, A: tl.constexpr, ALL: tl.constexpr):
    """`prepared`, then rope by its row for the position: cosines, then sines whose first half is negated."""
    across = (d + A.dim // 2) % A.dim
    cos = tl.load(rope + d[None, :], mask=d[None, :] < A.dim, other=0.0).to(tl.float32)
    sin = tl.load(rope + A.dim + d[None, :], mask=d[None, :] < A.dim, other=0.0).to(tl.float32)
    x = prepared(part, weight, head, d, live, HEADS, A, ALL)
    return x * cos + prepared(part, weight, head, across, live, HEADS, A, ALL) * sin


@device_code()
def weighed(scores, seen, top):
    """Weights (G, N) of scores of tokens, 0 where they are not seen, what is left of the weights before them, and the
    largest score (G,) of all.
    """
    scores = tl.where(seen[None, :], scores, float("-inf"))
    highest = tl.maximum(top, tl.max(scores, 1))
    return tl.exp(scores - highest[:, None]), tl.exp(top - highest), highest


@device_code("layer")
def attend_kernel(
    qkv, rope, addresses, position, q_norm, k_norm, partial, sums, layer,
    A: tl.constexpr, STORED: tl.constexpr, CORES: tl.constexpr, SPLITS: tl.constexpr,
    GROUP: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """partial (heads, SPLITS, D) and sums (heads, SPLITS, 2): one split's weighted values, and the largest score and
    sum of the weights. The first split also stores the new token's keys and values.
    """
    key_head = tl.program_id(0)
    split = tl.program_id(1)
    group: tl.constexpr = A.heads // A.kv_heads
    aligned: tl.constexpr = A.aligned
    at = tl.load(position).to(tl.int32)
    entries = tl.multiple_of(tl.load(addresses + layer).to(tl.pointer_type(STORED)), aligned)
    d = tl.arange(0, COLUMNS)
    g = tl.arange(0, GROUP)
    within = d[None, :] < A.dim
    head = key_head * group + g
    live = (g < group)[:, None] & within
    row = rope + A.rope_at
    q = turned(qkv, q_norm, head, d, live, row, A.heads, A, ALL) * A.scale
    one = tl.zeros((1,), tl.int32) + key_head
    behind: tl.constexpr = A.heads + A.gates
    k = turned(qkv + behind * A.dim, k_norm, one, d, within, row, A.kv_heads, A, ALL)
    own = qkv + (behind + A.value_heads + key_head) * A.dim
    v = tl.load(own + d[None, :], mask=within, other=0.0).to(tl.float32)
    if A.v_normed:
        v = v / tl.sqrt(tl.sum(v * v, 1) / A.dim + A.eps)[:, None]
    mine = within & (tl.zeros((1, COLUMNS), tl.int32) + split == 0)
    k = store_entry(entries, at, key_head, d, k, mine, A, STORED)
    v = store_entry(entries, at, A.kv_heads + key_head, d, clipped(v, A), mine, A, STORED)
    # The new token is the first split's alone; the others begin with nothing.
    top = tl.where(split == 0, tl.sum(q * k, 1), float("-inf"))
    total = tl.where(split == 0, 1.0, tl.zeros((GROUP,), tl.float32))
    out = tl.where(split == 0, v, tl.zeros((GROUP, COLUMNS), tl.float32))
    first = at * 0
    if A.window > 0:
        first = tl.maximum(first, at + 1 - A.window)
    size = tl.cdiv(tl.cdiv(at - first, SPLITS), BLOCK) * BLOCK
    begin = first + split * size
    end = tl.minimum(at, begin + size)
    for start in range(begin, end, BLOCK):
        n = start + tl.arange(0, BLOCK)
        seen = n < end
        there = seen[:, None] & within
        keys = load_entries(entries, n, key_head, d, there, A)
        values = load_entries(entries, n, A.kv_heads + key_head, d, there, A)
        scores = scaled(met(q, keys, A, CORES), entries, n, key_head, seen, A)
        weights, fade, top = weighed(scores, seen, top)
        total = total * fade + tl.sum(weights, 1)
        weights = scaled(weights, entries, n, A.kv_heads + key_head, seen, A)
        out = out * fade[:, None] + gathered(weights, values, A, CORES)
    place = head * SPLITS + split
    tl.store(partial + place[:, None] * A.dim + d[None, :], out, mask=live)
    tl.store(sums + place * 2, top, mask=g < group)
    tl.store(sums + place * 2 + 1, total, mask=g < group)


@device_code()
def join_kernel(
    partial, sums, sinks, gates, y,
    DIM: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, SINKS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """y (heads * D): one head's splits, each by its share of the weights. sinks (heads): with SINKS, the score of one
    more token, which has no value. gates (heads * D): with GATED, y is multiplied by their sigmoids.
    """
    head = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, COLUMNS)
    place = head * SPLITS + split
    top = tl.load(sums + place * 2)
    highest = tl.max(top, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        highest = tl.maximum(highest, sink)
    share = tl.exp(top - highest)
    total = tl.sum(share * tl.load(sums + place * 2 + 1), 0)
    if SINKS:
        total += tl.exp(sink - highest)
    at = place[:, None] * DIM + d[None, :]
    parts = tl.load(partial + at, mask=(d < DIM)[None, :], other=0.0)
    out = tl.sum(share[:, None] * parts, 0) / total
    if GATED:
        out /= 1.0 + tl.exp(-tl.load(gates + head * DIM + d, mask=d < DIM, other=0.0).to(tl.float32))
    tl.store(y + head * DIM + d, out.to(y.dtype.element_ty), mask=d < DIM)
