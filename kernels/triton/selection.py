# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false, reportGeneralTypeIssues=false
"""Applies a rule to a router's choice: one small program per token, so that one launch replaces ten; other programs of
the same launch spread x for what follows (`begin_kernel`).

Sums and limits are float64, as everywhere: a weight at its limit falls to the same side on the CPU and here.
"""

from __future__ import annotations

import triton.language as tl

from ..rule import MOST_EASE
from .codes import spread_chunks
from .jit import device_code

_MOST_EASE = tl.constexpr(MOST_EASE)


@device_code()
def select_kernel(
    index, weights, least, signal, product, late, tokens, experts, own, thresholds, products, lates,
    CHOICES: tl.constexpr, PARTS: tl.constexpr, WEIGHED: tl.constexpr, PRODUCT: tl.constexpr, LATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """index, weights (B, CHOICES) and least (PARTS,) float64 -> calls and their limits, (B, CHOICES, PARTS) each."""
    _select(
        index, weights, least, signal, product, late, tokens, experts, own, thresholds, products, lates,
        CHOICES, PARTS, WEIGHED, PRODUCT, LATE, BLOCK,
    )  # fmt: skip


@device_code()
def begin_kernel(
    index, weights, least, signal, product, tokens, experts, own, thresholds, products, counts, x, spread,
    CHOICES: tl.constexpr, PARTS: tl.constexpr, WEIGHED: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
    N: tl.constexpr, DIGITS: tl.constexpr, WORDS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """`select_kernel` by each token's first program, with counts (P, 2) at 0, and `spread_kernel` by the others."""
    part = tl.program_id(1)
    if part == 0:
        number = tl.arange(0, 2 * PARTS * BLOCK)
        at = tl.program_id(0).to(tl.int64) * (2 * PARTS * CHOICES) + number
        tl.store(counts + at, tl.zeros_like(at), mask=number < 2 * PARTS * CHOICES)
        _select(
            index, weights, least, signal, product, signal, tokens, experts, own, thresholds, products, products,
            CHOICES, PARTS, WEIGHED, PRODUCT, False, BLOCK,
        )  # fmt: skip
    else:
        spread_chunks(x, spread, tl.program_id(0).to(tl.int64), (part - 1) * CHUNKS, N, DIGITS, WORDS, CHUNKS)


@device_code()
def _select(
    index, weights, least, signal, product, late, tokens, experts, own, thresholds, products, lates,
    CHOICES: tl.constexpr, PARTS: tl.constexpr, WEIGHED: tl.constexpr, PRODUCT: tl.constexpr, LATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    live = k < CHOICES
    chosen = tl.load(index + token * CHOICES + k, mask=live, other=0)
    weight = tl.load(weights + token * CHOICES + k, mask=live, other=0.0)
    share = weight.to(tl.float64)
    mean = tl.sum(share, 0) / CHOICES
    if WEIGHED:
        ease = mean / tl.where(share == 0.0, 1.0, share)
        ease = tl.where((share == 0.0) | (ease > _MOST_EASE), _MOST_EASE, ease)  # what is not a number stays so
    for part in tl.static_range(PARTS):
        at = (token * CHOICES + k) * PARTS + part
        expert = chosen * PARTS + part
        limit = tl.load(signal + expert, mask=live, other=0.0)
        left_out = (share < tl.load(least + part) * mean) & (limit >= 0.0)
        if WEIGHED:
            limit = (limit.to(tl.float64) * ease).to(tl.float32)
        tl.store(tokens + at, tl.zeros_like(chosen) + token, mask=live)
        tl.store(experts + at, expert, mask=live)
        tl.store(own + at, weight, mask=live)
        tl.store(thresholds + at, tl.where(left_out, float("inf"), limit), mask=live)
        if PRODUCT:
            limit = tl.load(product + expert, mask=live, other=0.0)
            if WEIGHED:
                limit = (limit.to(tl.float64) * ease).to(tl.float32)
            tl.store(products + at, limit, mask=live)
        if LATE:
            limit = tl.load(late + expert, mask=live, other=0.0)
            if WEIGHED:
                limit = (limit.to(tl.float64) * ease).to(tl.float32)
            tl.store(lates + at, limit, mask=live)
