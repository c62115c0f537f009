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
from .gemv import TOGETHER, compact_kernel, gemv_kernel
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
        counts: (P, 2) int64, of which the first gets how many neurons of each call are active: then `found` are marks
            of all neurons (`gemv.py`), `values` are of all, and begins and ends are still to be written. None: a list.
    """

    begins: Tensor
    ends: Tensor
    found: Tensor
    values: Tensor
    most: int
    copies: Tensor | None = None
    at: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Into:
    """Where a sum goes.

    Attributes:
        y: (B, H). stream: to which the sum is added, (B, H); None for none. It may be y.
        reached: grow by the neurons of each call that reach its limit, all where there are none: int64, (P,), or one
            number for all.
    """

    y: Tensor
    reached: Tensor
    stream: Tensor | None = None


def moved(calls: Calls, device: torch.device) -> Calls:
    """Calls whose tensors are on the device."""
    return Calls(calls.tokens.to(device), calls.experts.to(device), calls.weights.to(device))


def find(
    x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int, ready: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Marks of the active neurons of every call (`gemv.py`), the values of all (P, F), and what is ready then.

    Args:
        ready: see `launch.spread`.
    """
    device, count, neurons = x.device, calls.experts.numel(), signal.q.shape[1]
    launch.check_device(device)
    launch.check_weights(device, "signal.q", signal.q)
    scale, zero = signal.scale.contiguous(), signal.zero.contiguous()
    launch.check_reachable(device, "signal.scale", scale)
    launch.check_reachable(device, "signal.zero", zero)
    if (bias := signal.bias) is not None:
        launch.check_reachable(device, "signal.bias", bias)
    blocks = triton.cdiv(neurons, launch.GEMV_ROWS)
    v = torch.empty(count, neurons, dtype=x.dtype, device=device)
    kept = torch.empty(count, triton.cdiv(blocks, TOGETHER.value) * TOGETHER.value, dtype=torch.int32, device=device)
    if not count * neurons:
        return kept, v, ready
    vector = signal_vector(signal.layout, signal.q, scale, zero)
    with launch.on(device):
        spread, vector, width = launch.spread(x, vector, x_bits, ready)
        gemv_kernel[(count, blocks)](
            *(spread, calls.tokens, calls.experts, thresholds.to(device), signal.q),
            *(scale.view(torch.uint8), zero.view(torch.uint8), v if bias is None else bias.contiguous()),
            *(v, v, kept, neurons, vector, FUNCTIONS.index(signal.layout.function)),
            *(bias is not None, False, True, 0, 0, launch.GEMV_ROWS, width),
        )
    return kept, v, spread if vector.digits else None


def fill(active: List, x: Tensor, signal: SignalWeights, calls: Calls, thresholds: Tensor, x_bits: int) -> None:
    """The active neurons of every call, one call after another, into a list with room for all neurons."""
    kept, v, _ = find(x, signal, calls, thresholds, x_bits)
    count, neurons = v.shape
    if not v.numel():
        return
    with launch.on(x.device):
        compact_kernel[(count, triton.cdiv(neurons, launch.COMPACT))](
            *(v, kept, active.begins, active.ends, active.found, active.values),
            *(active.values if active.copies is None else active.copies, neurons),
            *(triton.cdiv(neurons, launch.GEMV_ROWS), active.copies is not None),
            *(launch.GEMV_ROWS, launch.COMPACT, 2 * launch.COMPACT),
        )


def swiglu(
    x: Tensor,
    rows: ExpertRows,
    calls: Calls,
    active: List,
    limits: Tensor | None,
    x_bits: int,
    into: Into,
    ready: Tensor | None = None,
    each: int | None = None,
) -> None:
    """Add up the active neurons' rows.

    Args:
        ready: see `launch.spread`. each: calls of each token, where one token's are behind another's: sums are then in
            the order of a token that is alone.
    """
    device, count, hidden = x.device, calls.tokens.numel(), x.shape[1]
    launch.check_device(device)
    launch.check_weights(device, "rows", rows.data)
    y, stream = into.y, into.stream
    if not count or not active.most:
        y.zero_() if stream is None else y.copy_(stream)
        return
    other, down = record_vectors(rows.layout, rows.data)
    width = launch.block_of(down.words)
    columns = triton.cdiv(down.words, width)
    slices = launch.slices_of(device, columns * (each or count))
    room, groups = active.found.numel(), 0
    if active.counts is not None:
        room, groups = active.values.numel(), triton.next_power_of_2(room // (TOGETHER.value * count))
    h = torch.empty(room, dtype=torch.float32, device=device)
    place = torch.empty(room, dtype=torch.int64, device=device)
    partial = torch.empty(count, slices, hidden, dtype=torch.float32, device=device)
    tiles = min(launch.PRODUCT_PROGRAMS, triton.cdiv(active.most, launch.PRODUCT_ROWS))
    with launch.on(device):
        spread, other, chunks = launch.spread(x, other, x_bits, ready)
        product_kernel[(count, tiles)](
            *(spread, calls.tokens, calls.experts, calls.weights, active.begins, active.ends, active.found),
            *(active.found if active.at is None else active.at, active.values),
            *(calls.weights if limits is None else limits.to(device), rows.data, h, place),
            *(into.reached if active.counts is None else active.counts, into.reached),
            *(rows.data.shape[1], other, FUNCTIONS.index(rows.layout.function)),
            *(rows.layout.bias_at if rows.layout.biased else 0, limits is not None, active.at is not None),
            *(groups, into.reached.stride(0) if into.reached.numel() == count else 0, launch.PRODUCT_ROWS, chunks),
        )
        down_kernel[(columns, slices, count)](
            *(h, place, active.begins, active.ends, rows.data, rows.data, rows.data, partial, launch.magic(device)),
            *(down, launch.DOWN_ROWS, width),
            num_warps=1,
        )
        combine_kernel[(x.shape[0], triton.cdiv(hidden, launch.COMBINE_COLUMNS))](
            *(calls.tokens, partial, y if stream is None else stream, y, each or count, hidden, stream is not None),
            *(each is not None, slices, launch.COMBINE_ROWS, launch.COMBINE_COLUMNS),
        )
