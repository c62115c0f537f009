"""Matrix products with quantized weights: unpacked a block of rows at a time, then multiplied by cuBLAS.

Many tokens amortize the unpacking; what they need is tensor cores, which the library drives best. A block's temporary
tensors stay below `SCRATCH` bytes, so prefill fits where decoding fits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from ..activation import FUNCTIONS, applied
from ..weights import ExpertRows, LinearWeights, Norm, SignalWeights
from . import launch
from .gemv import gemv_kernel
from .moving import unpack_kernel
from .vectors import Vector, linear_vector, record_vectors, signal_vector

SCRATCH = 64 << 20  # bytes
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
    launch.check_device(device)
    launch.check_weights(device, "signal.q", signal.q)
    launch.check_weights(device, "rows", rows.data)
    scale, zero = signal.scale.contiguous(), signal.zero.contiguous()
    launch.check_reachable(device, "signal.scale", scale)
    launch.check_reachable(device, "signal.zero", zero)
    vector = signal_vector(signal.layout, signal.q, scale, zero)
    other, down = record_vectors(rows.layout, rows.data)
    # v, other · x, their product and what silu makes on the way: five numbers per token and neuron, two of them wide.
    block = block_rows(x, neurons, hidden + 8 * tokens)
    scratch = torch.empty(min(block, neurons), hidden, dtype=x.dtype, device=device)
    y = torch.zeros(tokens, hidden, dtype=torch.float32, device=device)
    counts = torch.zeros(2, dtype=torch.int64, device=device)  # active, and those that reach the second threshold
    scales = scale.view(torch.uint8), zero.view(torch.uint8)
    for start in range(0, neurons if tokens else 0, block):
        count, first = min(block, neurons - start), expert * neurons + start
        part = slice(start, start + count)
        bias = None if signal.bias is None else signal.bias[expert, part].to(device, x.dtype)
        v = F.linear(x, unpack(signal.q, *scales, vector, first, count, scratch), bias)
        v = applied(signal.layout.function, v)
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
