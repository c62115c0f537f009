"""Matrix products of dense layers. Of few tokens by our own kernels, which a graph can hold without a library's memory;
of many with quantized weights: unpacked a block of rows at a time, then multiplied by cuBLAS.

Many tokens amortize the unpacking; what they need is tensor cores, which the library drives best. A block's temporary
tensors stay below `SCRATCH` bytes, so prefill fits where decoding fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from .. import reference
from ..activation import FUNCTIONS, applied
from ..codes import CHUNK
from ..types import SCRATCH, Calls
from ..weights import ExpertRows, LinearWeights, Norm, SignalWeights
from . import launch
from .gemv import gemv_kernel, plain_kernel
from .grouped import grouped_down_kernel, grouped_product_kernel, grouped_sum_kernel
from .moving import unpack_kernel
from .vectors import Vector, linear_vector, record_vectors, signal_vector

# Of a tile of `experts_swiglu`: most and fewest calls, and neurons; fewest and half where registers are short.
MOST_CALLS, FEWEST_CALLS, WIDE = 64, 16, 64
FEW = 8  # tokens up to which a layer's weights go through the GEMV kernel, code for code, instead of through memory


def expert_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    expert: int,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, int, int]:
    """One expert over many tokens (prefill): x (B, H), thresholds (B,) of each token -> y (B, H).

    Also, over all tokens, how many neurons were active and how many of those reached the second threshold. Each third
    of the expert is read in blocks of neurons, from device or pinned host memory; code by code, so over PCIe a copy
    beforehand is faster. x keeps all its bits. What is not a number reaches both thresholds. Waits for the device
    once.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    device, (tokens, hidden), neurons = x.device, x.shape, rows.data.shape[1]
    scales, vector, other, down = _read(device, signal, rows)
    # v, other · x, their product and what silu makes on the way: five numbers per token and neuron, two of them wide.
    block = block_rows(x, neurons, hidden + 8 * tokens)
    scratch = torch.empty(min(block, neurons), hidden, dtype=x.dtype, device=device)
    y = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # active, and those that reach the second threshold
    for start in range(0, neurons if tokens else 0, block):
        count, first = min(block, neurons - start), expert * neurons + start
        part = slice(start, start + count)
        bias = None if signal.bias is None else signal.bias[expert, part].to(device, x.dtype)
        v = F.linear(x, unpack(signal.q, *scales, vector, first, count, scratch), bias)
        v = applied(signal.layout.function, v)
        h = v
        if rows.layout.other.bits:
            bias = rows.layout.read_bias(rows.data[expert, part], x.dtype)
            bias = None if bias is None else bias.to(device)
            z = F.linear(x, unpack(rows.data, rows.data, rows.data, other, first, count, scratch), bias)
            h = applied(rows.layout.function, z) * v
        active = ~(v.abs() < thresholds[:, None])
        kept = active if down_thresholds is None else active & ~(h.abs() < down_thresholds[:, None])
        counts += torch.stack([active.sum(), kept.sum()])
        y += h.masked_fill_(~kept, 0) @ unpack(rows.data, rows.data, rows.data, down, first, count, scratch)
    found = counts.tolist()
    return y.to(x.dtype), found[0], found[1]


def experts_swiglu(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    calls: Calls,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> tuple[Tensor, Tensor]:
    """`moe_step` for many tokens, by tiles of calls of one expert: y (B, H) and counts (P, 2) int64, on the device.

    As many launches whatever the number of experts, and the host waits for none. A call with an infinite threshold is
    left out. x keeps all its bits. What does not fit `SCRATCH` goes slice by slice of the calls sorted by expert, added
    up in float32 in a fixed order.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    device, (tokens, hidden), experts = x.device, x.shape, len(rows.data)
    count = calls.experts.numel()
    counts = torch.zeros(count, 2, dtype=torch.int64, device=device)
    if not count:
        return torch.zeros_like(x), counts
    y = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
    left_out = thresholds == torch.inf
    numbers = torch.arange(max(experts, tokens) + 1, device=device)
    order, starts = _sorted(calls.experts, left_out, numbers[: experts + 1])
    own, ends = _sorted(calls.tokens, left_out, numbers[: tokens + 1])
    places = torch.full((count,), -1, dtype=torch.int32, device=device)
    parts = torch.empty(slice_of(x, count, rows.data.shape[1]), hidden, dtype=x.dtype, device=device)
    columns = launch.block_of(hidden, 1024)
    tables = _Tables(calls.tokens, calls.weights, order, starts, places, counts)
    for first, end in _slices(x, signal, rows, tables, thresholds, down_thresholds, parts):
        with launch.on(device):
            grouped_sum_kernel[(tokens, triton.cdiv(hidden, columns))](
                parts, own, ends, places, y, first, end, hidden, columns
            )  # fmt: skip
    return y.to(x.dtype), counts


def expert_at_once(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    thresholds: Tensor,
    down_thresholds: Tensor | None = None,
    x_bits: int = 22,
) -> Tensor:
    """`expert_swiglu` of the only expert of `signal` and `rows`, not counted: y (B, H). x keeps all its bits.

    Two launches for each slice of tokens within `SCRATCH`, and the host waits for none.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    for _ in _slices(x, signal, rows, None, thresholds, down_thresholds, y):
        pass
    return y


@dataclass(frozen=True, slots=True)
class _Tables:
    """Calls as the grouped kernels read them, see there."""

    tokens: Tensor
    weights: Tensor
    order: Tensor
    starts: Tensor
    places: Tensor
    counts: Tensor


def _read(
    device: torch.device, signal: SignalWeights, rows: ExpertRows
) -> tuple[tuple[Tensor, Tensor], Vector, Vector, Vector]:
    """Scales and zeros of the signal as bytes, and how it and both halves of a record are read, once checked."""
    launch.check_device(device)
    launch.check_weights(device, "signal.q", signal.q)
    launch.check_weights(device, "rows", rows.data)
    scale, zero = signal.scale.contiguous(), signal.zero.contiguous()
    launch.check_reachable(device, "signal.scale", scale)
    launch.check_reachable(device, "signal.zero", zero)
    vector = signal_vector(signal.layout, signal.q, scale, zero)
    return (scale.view(torch.uint8), zero.view(torch.uint8)), vector, *record_vectors(rows.layout, rows.data)


def _slices(
    x: Tensor,
    signal: SignalWeights,
    rows: ExpertRows,
    tables: _Tables | None,
    thresholds: Tensor,
    down_thresholds: Tensor | None,
    parts: Tensor,
) -> Iterator[tuple[int, int]]:
    """Compute parts, slice by slice of the sorted calls: the first and the end of each. Without tables there is one
    expert, call i is of token i, and parts (B, H) takes all slices.
    """
    device, hidden, (experts, neurons) = x.device, x.shape[1], rows.data.shape[:2]
    scales, vector, other, down = _read(device, signal, rows)
    count, cores, x, alone = thresholds.numel(), launch.cores(device, x.dtype), x.contiguous(), tables is None
    if tables is None:
        starts = launch.every(device)
        tables = _Tables(starts, x, starts, starts, starts, starts)
    roomy = cores and vector.fast and other.fast and down.fast
    most, wide = (MOST_CALLS, WIDE) if roomy else (FEWEST_CALLS, WIDE // 2)
    block = max(FEWEST_CALLS, min(most, triton.next_power_of_2(count // experts)))
    size = slice_of(x, count, neurons)
    h = torch.empty(size, neurons, dtype=x.dtype, device=device)
    biases = x if signal.bias is None else signal.bias.contiguous()
    functions = FUNCTIONS.index(signal.layout.function), FUNCTIONS.index(rows.layout.function)
    shape = experts, neurons, block, max(2, triton.next_power_of_2(experts)), wide, alone
    magic = launch.magic(device)
    for first in range(0, count, max(1, size)):
        end = min(count, first + size)
        tiles = (end - first) // block + min(experts, end - first)
        with launch.on(device):
            grouped_product_kernel[(tiles, triton.cdiv(neurons, wide))](
                *(x, tables.tokens, tables.order, tables.starts, signal.q, *scales, biases, rows.data, magic),
                thresholds,
                *(thresholds if down_thresholds is None else down_thresholds, tables.places, h, tables.counts),
                *(first, end, vector, other, *functions, signal.bias is not None, rows.layout.bias_at),
                *(down_thresholds is not None, cores, *shape),
                num_stages=1,
            )
            grouped_down_kernel[(tiles, triton.cdiv(hidden, CHUNK))](
                *(h, tables.order, tables.starts, rows.data, magic, tables.weights),
                *(parts[first:end] if alone else parts, first, end, down, cores, *shape),
                num_stages=1,
            )
        yield first, end


def _sorted(keys: Tensor, left_out: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
    """The order of calls by their keys, those left out last, and where those of each key begin, int32."""
    last = len(each) - 1
    found, order = keys.masked_fill(left_out, last).sort(stable=True)
    return order, torch.searchsorted(found, each, out_int32=True)


def slice_of(x: Tensor, calls: int, neurons: int) -> int:
    """Calls at a time: h and what an expert adds for each, of x's type, within `SCRATCH`."""
    return min(calls, max(1, SCRATCH // (x.element_size() * (neurons + x.shape[1]))))


def linear(x: Tensor, weights: LinearWeights, x_bits: int = 22) -> Tensor:
    """y = x · Wᵀ: x (B, K) -> (B, N). Up to 8 tokens the weights are multiplied as stored; with more, x keeps all its
    bits.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    return linear_joined(x, weights, x_bits)


def linear_joined(
    x: Tensor,
    weights: LinearWeights,
    x_bits: int,
    norm: tuple[Norm, float] | None = None,
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """`linear` of x behind its norm, with its eps, plus bias (N,) and added (B, N): of few tokens in two launches.

    Raises:
        ValueError: weights that the device of x cannot read.
    """
    device, tokens, outputs = x.device, x.shape[0], weights.q.shape[0]
    launch.check_device(device)
    launch.check_weights(device, "weights.q", weights.q)
    scale, zero = weights.scale.contiguous(), weights.zero.contiguous()
    launch.check_reachable(device, "weights.scale", scale)
    launch.check_reachable(device, "weights.zero", zero)
    vector = linear_vector(weights)
    y = torch.empty(tokens, outputs, dtype=x.dtype, device=device)
    if not y.numel():
        return y
    scales = scale.view(torch.uint8), zero.view(torch.uint8)
    if tokens <= FEW:
        with launch.on(device):
            spread, vector, width = launch.spread(x, vector, x_bits, norm=norm)
            gemv_kernel[(tokens, triton.cdiv(outputs, launch.GEMV_ROWS))](
                *(spread, x, x, x, weights.q, *scales, y if bias is None else bias),
                *(y if added is None else added.contiguous(), y, y, outputs, vector, FUNCTIONS.index("plain")),
                *(bias is not None, added is not None, False, 0, 0, launch.GEMV_ROWS, width),
            )
        return y
    x = x if norm is None else norm[0](x, norm[1])
    block = block_rows(x, outputs, x.shape[1] + tokens)
    scratch = torch.empty(min(block, outputs), x.shape[1], dtype=x.dtype, device=device)
    for start in range(0, outputs, block):
        count = min(block, outputs - start)
        y[:, start : start + count] = F.linear(x, unpack(weights.q, *scales, vector, start, count, scratch))
    y = y if bias is None else y + bias
    return y if added is None else added + y


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """See `kernels.plain`; of many tokens by cuBLAS. dtype: of the result, x's if None.

    Raises:
        ValueError: tensors that are not on the device.
    """
    tokens, rows, device = len(x), weight.shape[-2], x.device
    launch.check_device(device)
    if weight.ndim == 2 and tokens > FEW:
        return reference.plain(x if dtype is None else x.to(dtype), weight, bias)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(tokens, rows, dtype=dtype or x.dtype, device=device)
    if not y.numel():
        return y
    *apart, row, column = weight.stride()
    # A row's numbers lie side by side, or a column's: these then go to neighbouring threads.
    each = 1 if rows < launch.MANY_ROWS else launch.PLAIN_ROWS
    each = each if column == 1 else launch.ACROSS_ROWS
    with launch.on(device):
        plain_kernel[(tokens, triton.cdiv(rows, each))](
            *(x, weight, x if bias is None else bias, y, rows),
            *(x.shape[1], x.stride(0), sum(apart), row, column, bias is not None),
            *(each, launch.block_of(x.shape[1], launch.PLAIN // each)),
        )
    return y


def block_rows(x: Tensor, rows: int, numbers: int) -> int:
    """Rows at a time when each takes `numbers` numbers of x's type: whole tiles of 64 within `SCRATCH`."""
    return min(-(-rows // 64) * 64, max(64, SCRATCH // (x.element_size() * numbers) // 64 * 64)) or 64


def unpack(
    data: Tensor, scale: Tensor, zero: Tensor, vector: Vector, first: int, count: int, scratch: Tensor
) -> Tensor:
    """Rows first .. first + count of a stored matrix, in `scratch`."""
    out = scratch[:count]
    grid = (triton.cdiv(count, launch.UNPACK_ROWS), triton.cdiv(vector.n, launch.UNPACK_COLUMNS))
    with launch.on(out.device):
        unpack_kernel[grid](
            data, scale, zero, out, first, count, vector, launch.UNPACK_ROWS, launch.UNPACK_COLUMNS
        )  # fmt: skip
    return out
