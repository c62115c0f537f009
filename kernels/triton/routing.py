# Device code: its values have types only once Triton compiles it.
# pyright: basic, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
"""A router's choice for a few tokens, behind its logits: a warp for each token, which holds all scores in registers.

The best score is found as an integer that has its expert's number in the low half, so that one reduction tells both.
"""

from __future__ import annotations

import triton.language as tl

from .jit import device_code

_LEAST = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # below any score


@device_code()
def choose_kernel(
    logits, correction, factors, scores, index, weights, scale,
    EXPERTS: tl.constexpr, CHOICES: tl.constexpr, SIGMOID: tl.constexpr, CORRECTED: tl.constexpr,
    SHARES: tl.constexpr, FACTORS: tl.constexpr, SCORED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """logits (B, EXPERTS) -> index and weights (B, CHOICES) as `step.Router` has them, with SCORED also all scores.

    What is not a number is chosen first, as by torch.
    """
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    live = expert < EXPERTS
    logit = tl.load(logits + token * EXPERTS + expert, mask=live, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        share = tl.exp(logit - tl.max(logit, 0))
        score = share / tl.sum(share, 0)
    if SCORED:
        tl.store(scores + token * EXPERTS + expert, score, mask=live)
    ranked = score
    if CORRECTED:
        ranked += tl.load(correction + expert, mask=live, other=0.0).to(tl.float32)
    bits = ranked.to(tl.int32, bitcast=True)
    order = tl.where(ranked != ranked, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    left = tl.where(live, (order.to(tl.int64) << 32) | (BLOCK - 1 - expert), _LEAST)
    k = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH,), tl.int32)
    weight = tl.zeros((WIDTH,), tl.float32)
    for choice in tl.static_range(CHOICES):
        best = BLOCK - 1 - (tl.max(left, 0) & 0xFFFFFFFF).to(tl.int32)
        taken = expert == best
        left = tl.where(taken, _LEAST, left)
        found = tl.where(k == choice, best, found)
        weight = tl.where(k == choice, tl.sum(tl.where(taken, score, 0.0), 0), weight)
    if SHARES:
        weight /= tl.sum(weight, 0)
    weight *= scale
    within = k < CHOICES
    if FACTORS:
        weight *= tl.load(factors + found, mask=within, other=0.0).to(tl.float32)
    tl.store(index + token * CHOICES + k, found.to(tl.int64), mask=within)
    tl.store(weights + token * CHOICES + k, weight.to(weights.dtype.element_ty), mask=within)
