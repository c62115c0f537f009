"""Operations that can be captured, with a host between them that decides where rows are: what the first finds goes to
memory that the host reads, what the second adds up is what the host has listed. `backend.py` has their fast forms.

Nothing is returned, all memory is the caller's, and nobody waits: counts are in memory too.
Shapes: B tokens, P calls, H hidden size, F neurons of an expert; lists have room for all P * F.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import Active, Calls
from .weights import ExpertRows, SignalWeights


@dataclass(frozen=True, slots=True)
class Listing:
    """Where active neurons are listed, call after call.

    Attributes:
        values: (P * F,) of x's dtype, on its device. offsets: (P + 1,) int64, neurons: (P * F,) int32, and copies: the
            values again, where the host reads them, in pinned memory beside a GPU. offsets[0] is 0 for good.
    """

    values: Tensor
    offsets: Tensor
    neurons: Tensor
    copies: Tensor


@dataclass(frozen=True, slots=True)
class Portion:
    """Some neurons of a listing and where their rows are, as the host lists them.

    Attributes:
        offsets: (P + 1,) int64, from 0 on. at: (P * F,) int32, positions among the values. places: (P * F,) int32,
            numbers of rows. What is behind the last offset may be anything.
    """

    offsets: Tensor
    at: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True)
class Total:
    """A running sum on the device: y (B, H), and reached (1,) int64, neurons that reached their second threshold."""

    y: Tensor
    reached: Tensor


Find = Callable[[Tensor, SignalWeights, Calls, Tensor, int], Active]
Add = Callable[[Tensor, ExpertRows, Calls, Active, Tensor | None, int], tuple[Tensor, Tensor]]


def list_active(
    find: Find, x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, listing: Listing, x_bits: int
) -> None:
    """The definition of `kernels.list_active`, by an `signal_gemv`."""
    active = find(x, signal, calls, thresholds, x_bits)
    total = active.neurons.numel()
    listing.offsets.copy_(active.offsets)
    listing.neurons[:total].copy_(active.neurons)
    for values in (listing.values, listing.copies):
        values[:total].copy_(active.values)


def add_listed(
    add: Add,
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    values: Tensor,
    portion: Portion,
    limits: Tensor | None,
    total: Total,
    x_bits: int,
    *,
    first: bool,
) -> None:
    """The definition of `kernels.add_listed`, by a `sparse_swiglu`."""
    count = int(portion.offsets[-1])
    places, at = (part[:count].to(x.device, torch.int64) for part in (portion.places, portion.at))
    one = Calls(calls.tokens, torch.zeros_like(calls.tokens), calls.weights)
    y, reached = add(x, rows, one, Active(portion.offsets.cpu(), places, values[at]), limits, x_bits)
    total.y.copy_(y if first else total.y + y)
    total.reached.add_(reached.sum())
