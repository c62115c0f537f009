"""The operations of `kernels/listed.py` on a GPU. Lists that the host writes or reads are in pinned memory, which the
kernels reach over the link: only what is active crosses it.
"""

from __future__ import annotations

from torch import Tensor

from ..listed import Listing, Portion, Total
from ..types import Calls
from ..weights import ExpertRows, SignalWeights
from . import launch
from .sparse import Into, List, fill, swiglu


def list_active(
    x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, listing: Listing, x_bits: int = 22
) -> None:
    """See `kernels.list_active`.

    Raises:
        ValueError: memory that the device cannot reach.
    """
    for name, part in (("offsets", listing.offsets), ("neurons", listing.neurons), ("copies", listing.copies)):
        launch.check_reachable(x.device, name, part)
    begins, ends, neurons = listing.offsets[:-1], listing.offsets[1:], signal.q.shape[1]
    active = List(begins, ends, listing.neurons, listing.values, neurons, listing.copies)
    fill(active, x, signal, calls, thresholds, x_bits)


def add_listed(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    values: Tensor,
    portion: Portion,
    limits: Tensor | None,
    total: Total,
    x_bits: int = 22,
    *,
    first: bool,
) -> None:
    """See `kernels.add_listed`.

    Raises:
        ValueError: memory that the device cannot reach.
    """
    for name, part in (("offsets", portion.offsets), ("at", portion.at), ("places", portion.places)):
        launch.check_reachable(x.device, name, part)
    offsets, most = portion.offsets, portion.at.numel() // max(1, calls.tokens.numel())
    listed = List(offsets[:-1], offsets[1:], portion.places, values, most, at=portion.at)
    swiglu(x, rows, calls, listed, limits, x_bits, Into(total.y, total.reached, None if first else total.y))
