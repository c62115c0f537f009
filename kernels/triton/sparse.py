"""Launches what finds active neurons, and what adds up their rows; `operations.py` and `listed.py` say for whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..activation import FUNCTIONS
from ..types import Calls
from ..weights import ExpertRows, SignalWeights
from . import launch
from .gemv import compact_kernel, gemv_kernel
from .swiglu import combine_kernel, down_kernel, product_kernel
from .vectors import record_vectors, signal_vector


@dataclass(frozen=True, slots=True)
class List:
    """Active neurons, where kernels reach them: call p owns found[begins[p]:ends[p]], at most `most` of them.

    `found` is int32 where it was made here, which is copied in half the time, and int64 in a caller's `Active`.

    Attributes:
        copies: a second place for values that are found; None for none.
        at: of each neuron, where its value is among `values`; None where both are in one order. Then `found` are
            numbers of records rather than an expert's neurons.
    """

    begins: Tensor
    ends: Tensor
    found: Tensor
    values: Tensor
    most: int
    copies: Tensor | None = None
    at: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Into:
    """Where a sum goes: y (B, H), added to unless it is the `first`; reached (1,) int64 grows."""

    y: Tensor
    reached: Tensor
    first: bool


def moved(calls: Calls, device: torch.device) -> Calls:
    """Calls whose tensors are on the device."""
    return Calls(calls.tokens.to(device), calls.experts.to(device), calls.weights.to(device))


def find(x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int, *, packed: bool) -> List:
    """The active neurons of every call, one call after another (packed) or F places apart."""
    device, count, neurons = x.device, calls.experts.numel(), signal.q.shape[1]
    launch.check_device(device)
    spans = torch.empty(2, count, dtype=torch.int64, device=device)
    found = torch.empty(count * neurons, dtype=torch.int32, device=device)
    values = torch.empty(count * neurons, dtype=x.dtype, device=device)
    if not count * neurons:
        launch.check_weights(device, "signal.q", signal.q)
        spans.zero_()
    active = List(spans[0], spans[1], found, values, neurons if count else 0)
    fill(active, x, signal, calls, thresholds.to(device), x_bits, packed=packed)
    return active


def fill(
    active: List, x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int, *, packed: bool
) -> None:
    """`find`, into a list with room for all neurons."""
    device, count, neurons = x.device, calls.experts.numel(), signal.q.shape[1]
    launch.check_device(device)
    launch.check_weights(device, "signal.q", signal.q)
    scale, zero = signal.scale.contiguous(), signal.zero.contiguous()
    launch.check_reachable(device, "signal.scale", scale)
    launch.check_reachable(device, "signal.zero", zero)
    if (bias := signal.bias) is not None:
        launch.check_reachable(device, "signal.bias", bias)
    if not count * neurons:
        return
    blocks = triton.cdiv(neurons, launch.GEMV_ROWS)
    v = torch.empty(count, neurons, dtype=torch.float32, device=device)
    kept = torch.empty(count, blocks, dtype=torch.int32, device=device)
    vector = signal_vector(signal.layout, signal.q, scale, zero)
    with launch.on(device):
        spread, vector, width = launch.spread(x, vector, x_bits)
        gemv_kernel[(count, blocks)](
            *(spread, calls.tokens, calls.experts, thresholds, signal.q),
            *(scale.view(torch.uint8), zero.view(torch.uint8), v if bias is None else bias.contiguous()),
            *(v, kept, neurons, vector, FUNCTIONS.index(signal.layout.function)),
            *(bias is not None, True, 0, 0, launch.GEMV_ROWS, width),
        )
        compact_kernel[(count, triton.cdiv(neurons, launch.COMPACT))](
            *(v, thresholds, kept, active.begins, active.ends, active.found, active.values),
            *(active.values if active.copies is None else active.copies, neurons, blocks),
            *(packed, active.copies is not None, launch.GEMV_ROWS, launch.COMPACT, 2 * launch.COMPACT),
        )


def swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: List,
    limits: Tensor | None,
    x_bits: int,
    into: Into | None = None,
) -> tuple[Tensor, Tensor]:
    """y (B, H), and how many neurons of each call reach its limit (P,) int64: all, if there are no limits; or the sums
    that it went into.
    """
    device, count, hidden = x.device, calls.tokens.numel(), x.shape[1]
    launch.check_device(device)
    launch.check_weights(device, "rows", rows.data)
    if not count or not active.most:
        return (torch.zeros_like(x), active.ends - active.begins) if into is None else (into.y, into.reached)
    other, down = record_vectors(rows.layout, rows.data)
    width = launch.block_of(down.words)
    columns = triton.cdiv(down.words, width)
    slices = launch.slices_of(device, columns * count)
    h = torch.empty(active.found.numel(), dtype=torch.float32, device=device)
    place = torch.empty(active.found.numel(), dtype=torch.int64, device=device)
    partial = torch.empty(count, slices, hidden, dtype=torch.float32, device=device)
    y = torch.empty(x.shape, dtype=x.dtype, device=device) if into is None else into.y
    tiles = min(launch.PRODUCT_PROGRAMS, triton.cdiv(active.most, launch.PRODUCT_ROWS))
    counted = torch.empty(count, tiles, dtype=torch.int32, device=device) if into is None else into.reached
    with launch.on(device):
        spread, other, chunks = launch.spread(x, other, x_bits)
        product_kernel[(count, tiles)](
            *(spread, calls.tokens, calls.experts, calls.weights, active.begins, active.ends, active.found),
            *(active.found if active.at is None else active.at, active.values),
            *(calls.weights if limits is None else limits.to(device), rows.data, h, place, counted),
            *(rows.data.shape[1], other, FUNCTIONS.index(rows.layout.function)),
            *(rows.layout.bias_at if rows.layout.biased else 0,),
            *(limits is not None, active.at is not None, launch.PRODUCT_ROWS, chunks),
        )
        down_kernel[(columns, slices, count)](
            *(h, place, active.begins, active.ends, rows.data, rows.data, rows.data, partial, launch.magic(device)),
            *(down, launch.DOWN_ROWS, width),
            num_warps=1,
        )
        combine_kernel[(x.shape[0], triton.cdiv(hidden, launch.COMBINE_COLUMNS))](
            *(calls.tokens, partial, y, count, hidden, into is not None and not into.first),
            *(slices, launch.COMBINE_COLUMNS),
        )
    if into is not None:
        return y, counted
    return y, active.ends - active.begins if limits is None else counted.sum(1)
