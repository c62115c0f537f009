"""Rounding an expert's weights for the inputs that they meet on calibration text.

What rounding one weight leaves over is taken up by the weights that are rounded after it, as far as their inputs move
together: second-order compensation in a fixed order (GPTQ, arXiv 2210.17323). A group's grid is fitted by least squares
when its turn comes. At equal bits the models here lose 20 to 30 % less than by HQQ (BENCHMARKS.md, rounding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.operations import round_rows
from ..pack.quantize import HQQ_BITS, Codes, finite, quantize

DAMPING = 0.05  # of the usual input's mean square, added to each: the text is a sample
_DOWN_DAMPING = 0.3  # the same for hidden values: an expert sees a part of the text only
_USUAL = 99  # percent of the inputs, whose mean square is the usual one
_LEAST = 1 / 256  # of the largest weight in a group: that of each other
_TOGETHER = 2048  # neurons that take up each other's errors: what they need grows with the square
_CHUNK = 64  # neurons whose grids are fitted at once
_QUIET = 0.7  # share of an expert's hidden values that down is not rounded for
_SAMPLE = 1 << 16  # of hidden values, for that share


class Felt(NamedTuple):
    """How n inputs move together.

    Attributes:
        factor: (n, n) upper triangular U, with UᵀU the inverse of the damped second moments.
        weight: (n,) each input's mean square, in usual ones.
    """

    factor: Tensor
    weight: Tensor


def felt(x: Tensor, damping: float = DAMPING) -> Felt:
    """What rounding has to know of inputs x (T, n).

    Raises:
        ValueError: an input is not finite.
    """
    moments = x.float().T @ x.float()
    weight = moments.diagonal().clone()
    if not bool(weight.isfinite().all()):
        raise ValueError("calibration text gives them inputs that are not finite")
    # What is usual: a few inputs may dwarf all others.
    usual = weight.clamp_max(weight.kthvalue(-(-_USUAL * len(weight) // 100)).values).mean()
    size = usual if float(usual) else weight.mean().clamp_min(1e-30)
    moments, identity = moments / size, torch.eye(len(weight), device=x.device)
    while True:
        # Of the moments read backwards, so that the inverse's factor is the inverse of this one.
        lower, failed = torch.linalg.cholesky_ex((moments + damping * identity).flip(0, 1))
        if not int(failed):
            factor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
            return Felt(factor.contiguous(), weight / size)
        damping *= 10


class Feeling:
    """`felt` of inputs, once for the matrices that meet the same ones one after the other."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Felt] | None = None

    def __call__(self, x: Tensor) -> Felt:
        if self._last is None or self._last[0].data_ptr() != x.data_ptr() or self._last[0].shape != x.shape:
            self._last = x, felt(x)
        return self._last[1]


def round_for(inputs: Felt, matrix: Tensor, bits: int, group: int, *, short: bool = False) -> Codes:
    """Codes of a matrix (N, n) that n inputs meet, each row in groups of consecutive values.

    Errors pass along a row. HQQ makes codes of HQQ_BITS. short: for `VectorLayout.short`.

    Raises:
        ValueError: a value is not finite, or too large for its scale.
    """
    if bits == HQQ_BITS:
        return quantize(matrix, bits, group)
    factor, weight = (part.to(matrix.device) for part in inputs)
    weights = weight.split(group)
    codes, scale, zero = _passed_on(
        matrix.T,
        group,
        factor,
        lambda part, own, at: round_rows(part, own, bits, weight=_shares(weights[at]), short=short),
    )
    return Codes(*(part.T.clone(memory_format=torch.contiguous_format) for part in (codes, scale, zero)))


def round_down(hidden: Tensor, down: Tensor, bits: int, group: int, *, short: bool = False) -> Codes:
    """Codes of down columns (F, H) for the hidden values (T, F) that tokens give its neurons.

    Errors pass from a neuron to those after it, which are less important, within parts of `_TOGETHER`.

    Raises:
        ValueError: as `round_for`.
    """
    if bits == HQQ_BITS:
        return quantize(down, bits, group)
    parts: list[Codes] = []
    for rows, values in zip(down.split(_TOGETHER), _loud(hidden).split(_TOGETHER, dim=1), strict=True):
        factor = felt(values, _DOWN_DAMPING).factor.to(down.device)
        parts.append(
            _passed_on(rows, _CHUNK, factor, lambda part, own, _: round_rows(part, own, bits, group=group, short=short))
        )
    return Codes(*(torch.cat(column) for column in zip(*parts, strict=True)))


def _passed_on(
    rows: Tensor, step: int, factor: Tensor, rounded: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
) -> Codes:
    """Round rows (n, R), `step` of them at a time, each time with what those before left over.

    Args:
        rounded: of some rows, with their part of the factor and their number of steps.
    """
    finite(rows)
    left = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for at, start in enumerate(range(0, len(left), step)):
        part, later = left[start : start + step], start + step
        found.append(rounded(part, factor[start:later, start:later], at))
        left[later:].addmm_(factor[start:later, later:].T, part, alpha=-1)
    codes, scale, zero = (torch.cat(column).cpu() for column in zip(*found, strict=True))
    if not bool((scale.isfinite() & zero.isfinite()).all()):
        raise ValueError("the weights are too large for their scales")
    return Codes(codes, scale.half(), zero.half())


def _shares(weight: Tensor) -> Tensor:
    """Weights (G,) that add up to 1, none of them next to nothing."""
    weight = weight.clamp_min(max(_LEAST * float(weight.max()), 1e-6))
    return weight / weight.sum()


def _loud(hidden: Tensor) -> Tensor:
    """Hidden values (T, F) without those that are rather small: chats leave out such neurons."""
    sample = hidden.flatten()[:: max(1, hidden.numel() // _SAMPLE)].abs()
    least = sample.kthvalue(max(1, round(_QUIET * sample.numel()))).values
    return hidden.masked_fill(hidden.abs() < least, 0)
