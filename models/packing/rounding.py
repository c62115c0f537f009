"""Rounding an expert's weights for the inputs that they meet on calibration text.

What rounding one weight leaves over is taken up by the weights that are rounded after it, as far as their inputs move
together: second-order compensation in a fixed order (GPTQ, arXiv 2210.17323; in the form of LDLQ, arXiv 2307.13304).
A group's grid is fitted by least squares when its turn comes. At equal bits the models here lose 20 to 30 % less than
by HQQ (tests/bench/LOG.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.operations import Feedback, Rounded, round_matrix
from ..pack.quantize import MOST_BITS, Codes, finite, quantize

DAMPING = 0.05  # of the usual input's mean square, added to each: the text is a sample
_DOWN_DAMPING = 0.3  # the same for hidden values: an expert sees a part of the text only
_USUAL = 99  # percent of the inputs, whose mean square is the usual one
_LEAST = 1 / 256  # of the largest weight in a group: that of each other
_TOGETHER = 1024  # neurons that take up each other's errors: what they need grows with the square
_QUIET = 0.7  # share of an expert's hidden values that down is not rounded for
_SAMPLE = 1 << 16  # of hidden values, for that share


class Hessian(NamedTuple):
    """The damped second moments of n inputs: the Hessian of a linear layer's squared error (GPTQ, arXiv 2210.17323).

    Attributes:
        feedback: by M, unit upper triangular, of M D Mᵀ, the damped second moments.
        weight: (n,) each input's mean square, in usual ones.
    """

    feedback: Feedback
    weight: Tensor


def hessian(x: Tensor, damping: float = DAMPING) -> Hessian:
    """What rounding has to know of inputs x (T, n).

    Raises:
        ValueError: an input is not finite.
    """
    x = x.float()
    moments = x.T @ x
    weight = moments.diagonal().clone()
    if not bool(weight.isfinite().all()):
        raise ValueError("calibration text gives them inputs that are not finite")
    # What is usual: a few inputs may dwarf all others.
    usual = weight.clamp_max(weight.kthvalue(-(-_USUAL * len(weight) // 100)).values).mean()
    size = usual if float(usual) else weight.mean().clamp_min(1e-30)
    moments = moments.div_(size).flip(0, 1)  # read backwards, so that its lower factor is the upper one of M
    while True:
        moments.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(moments)
        if not int(failed):
            lower = factor.div_(factor.diagonal().clone()).T.flip(0, 1)
            return Hessian(Feedback(lower.contiguous()), weight / size)
        damping *= 10


class Hessians:
    """`hessian` of inputs, once for the matrices that meet the same ones one after the other."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, Hessian] | None = None

    def __call__(self, x: Tensor) -> Hessian:
        if self._last is None or self._last[0].data_ptr() != x.data_ptr() or self._last[0].shape != x.shape:
            self._last = x, hessian(x)
        return self._last[1]


def round_for(
    inputs: Hessian, matrix: Tensor, bits: int, group: int, *, short: bool = False, values: torch.dtype | None = None
) -> Codes:
    """Codes of a matrix (N, n) that n inputs meet, each row in groups of consecutive values.

    Errors pass along a row. `quantize` makes codes of MOST_BITS. short: for `VectorLayout.short`. values: see `Codes`.

    Raises:
        ValueError: a value is not finite, or too large for its scale.
    """
    if bits == MOST_BITS:
        return quantize(matrix, bits, group, values)
    weight = inputs.weight.view(-1, group)
    weight = weight.maximum((_LEAST * weight.amax(1, keepdim=True)).clamp_min(1e-6))
    weight = (weight / weight.sum(1, keepdim=True)).flatten().to(matrix.device)
    feedback = Feedback(inputs.feedback.lower.to(matrix.device)) if matrix.is_cuda else inputs.feedback
    return _codes(matrix, round_matrix(matrix, feedback, bits, group, weight=weight, short=short, values=values))


def round_down(
    hidden: Tensor, down: Tensor, bits: int, group: int, *, short: bool = False, values: torch.dtype | None = None
) -> Codes:
    """Codes of down columns (F, H) for the hidden values (T, F) that tokens give its neurons.

    Errors pass from a neuron to those after it, which are less important, within parts of `_TOGETHER`.

    Raises:
        ValueError: as `round_for`.
    """
    if bits == MOST_BITS:
        return quantize(down, bits, group, values)
    parts: list[Codes] = []
    for rows, given in zip(down.split(_TOGETHER), _loud(hidden).split(_TOGETHER, dim=1), strict=True):
        feedback = hessian(given, _DOWN_DAMPING).feedback
        parts.append(_codes(rows, round_matrix(rows, feedback, bits, group, short=short, values=values)))
    codes, scale, zero, found = zip(*parts, strict=True)
    return Codes(torch.cat(codes), torch.cat(scale), torch.cat(zero), None if values is None else torch.cat(found))


def _codes(matrix: Tensor, made: Rounded) -> Codes:
    if not bool((made.scale.isfinite() & made.zero.isfinite()).all()):
        finite(matrix)
        raise ValueError("the weights are too large for their scales")
    codes, scale, zero, values = made
    return Codes(codes.cpu(), scale.half().cpu(), zero.half().cpu(), None if values is None else values.cpu())


def _loud(hidden: Tensor) -> Tensor:
    """Hidden values (T, F) without those that are rather small: chats leave out such neurons."""
    sample = hidden.flatten()[:: max(1, hidden.numel() // _SAMPLE)].abs()
    least = sample.kthvalue(max(1, round(_QUIET * sample.numel()))).values
    return hidden.masked_fill(hidden.abs() < least, 0)
