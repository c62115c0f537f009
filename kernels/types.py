"""What operations are given and give: (token, expert) calls, thresholds, active neurons, and rounded matrices."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

X_BITS = (22, 15, 8)  # the precisions of x that an operation may be asked to keep (kernels/operations.py)
SCRATCH = 64 << 20  # bytes of a card's memory that a product of many tokens may take besides its result
_DIGITS = {22: 3, 15: 2, 8: 1}  # by `x_bits`


def digits_of(x: Tensor, x_bits: int) -> int:
    """8-bit digits that x is cut into, two at most of 16-bit floats, which have fewer than 15 bits."""
    digits = _DIGITS[x_bits]
    return digits if x.dtype in (torch.float32, torch.float64) else min(digits, 2)


@dataclass(frozen=True, slots=True)
class Calls:
    """P pairs of a token and an expert that computes it.

    Attributes:
        tokens: (P,) int64, which row of x. experts: (P,) int64. weights: (P,) the router's weight of each call.
    """

    tokens: Tensor
    experts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True)
class Active:
    """The active neurons of P calls, call after call.

    Attributes:
        offsets: (P + 1,) int64 on the CPU; call p owns neurons[offsets[p]:offsets[p + 1]].
        neurons: (N,) int64 or int32, no neuron twice within a call. values: (N,) the signal v of each.
    """

    offsets: Tensor
    neurons: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """The thresholds of neurons in each expert of a layer, or in each half: (E,) float32 each, at a rule's shares.

    Attributes:
        signal: of |v|, the signal. product: of |h|, an expert's hidden value; None where no down half is skipped. late:
            of |v| for rows that are not on the device; None where every row is waited for. least: (parts,) float64, the
            rule's `drop` and the larger of `drop` and `major`, where they may change in place: a captured call reads
            them; None for those of the rule. native: what `cpu/native.py` made of them.
    """

    signal: Tensor
    product: Tensor | None = None
    late: Tensor | None = None
    least: Tensor | None = None
    native: Any = field(init=False, repr=False, compare=False, default=None)


@dataclass(frozen=True, slots=True)
class Work:
    """The work for a router's choice: P calls, token by token, choice by choice, part by part.

    Attributes:
        thresholds: (P,) float32 for |v|, infinite for a call that is left out: it has no active neurons, and its
            weights are not read. products, late: (P,) as in `Limits`.
    """

    calls: Calls
    thresholds: Tensor
    products: Tensor | None = None
    late: Tensor | None = None

    def part(self, which: Tensor | slice) -> Work:
        """Some of the calls: bool (P,), positions or a slice."""
        calls = Calls(self.calls.tokens[which], self.calls.experts[which], self.calls.weights[which])
        products, late = (None if limits is None else limits[which] for limits in (self.products, self.late))
        return Work(calls, self.thresholds[which], products, late)


@dataclass(frozen=True)
class Feedback:
    """How the errors of codes are fed back into the numbers behind them in a line (`kernels.round_matrix`).

    Attributes:
        lower: (n, n) float32, lower triangular: number m takes up lower[m] · the errors of those before it.
    """

    lower: Tensor

    @cached_property
    def half(self) -> Tensor:
        """The same in bfloat16, padded to even rows, for processors that multiply it much faster."""
        return F.pad(self.lower, (0, len(self.lower) % 2)).bfloat16()


class Rounded(NamedTuple):
    """A matrix (N, n) as codes: (code - zero) · scale.

    Attributes:
        codes: (N, n) uint8. scale, zero: (N, n / group) float32. values: (N, n) what they stand for, if asked for.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    values: Tensor | None
