"""Operands for kernel calls: random ones that fit each other, and what makes them hostile."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from floe_chat.kernels.layouts import RowLayout, SignalLayout, VectorLayout
from floe_chat.kernels.types import Active, Calls
from floe_chat.kernels.weights import ExpertRows, LinearWeights, SignalWeights
from torch import Tensor

HIDDEN = (1, 2, 40, 64, 96, 130, 256, 320)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TYPES = (*FLOATS, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64)
NUMBERS: tuple[Any, ...] = (
    -1,
    -(1 << 31),
    -(1 << 63),
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    1 << 63,
    1 << 64,
    (1 << 64) + 1,
)
HUGE = 1 << 44  # of a dimension: no machine has memory for a copy


@dataclass
class Case:
    """One call.

    Attributes:
        operands: by name; any of them may be spoiled. run: the call, `run(module, operands)`, with the functions of the
            compiled kernels or of `floe_chat.kernels`. plain: what defines it, if that is not `run` with plain torch.
        written: operands that the call may write to. checked: whether the definition refuses what the compiled kernels
            refuse; if not, it runs only where those took the call. tolerance: of results, of the largest, beside what
            the last places of x make of them; None compares only what is no number.
    """

    operands: dict[str, Any]
    run: Callable[[Any, dict[str, Any]], Any]
    written: tuple[str, ...] = ()
    tolerance: float | None = 1e-4
    plain: Callable[[dict[str, Any]], Any] | None = None
    checked: bool = True


def generator(rng: Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.getrandbits(62))


def uniform(rng: Random, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
    return torch.rand(shape, generator=generator(rng)) * (high - low) + low


def codes(rng: Random, *shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator(rng))


def vector(rng: Random, hidden: int, widths: Sequence[int] = (2, 3, 4, 8, 16)) -> VectorLayout:
    groups = [size for size in (1, 2, 10, 20, 32, 64, hidden) if hidden % size == 0]
    return VectorLayout(hidden, rng.choice(widths), rng.choice(groups), short=rng.random() < 0.5)


def _scales(rng: Random, layout: VectorLayout, *shape: int) -> tuple[Tensor, Tensor]:
    shape = *shape, layout.groups
    return layout.nearest(uniform(rng, *shape, low=0.01, high=0.2), uniform(rng, *shape, low=0.0, high=8.0))


def _values(rng: Random, dtype: torch.dtype, *shape: int) -> Tensor:
    """16-bit values as bytes, (..., 2 n)."""
    return uniform(rng, *shape).to(dtype).view(torch.uint8)


def up_weights(rng: Random, experts: int, neurons: int, hidden: int) -> SignalWeights:
    layout = SignalLayout(vector(rng, hidden), rng.choice((torch.float16, torch.bfloat16)))
    shape = experts, neurons
    q = codes(rng, *shape, layout.row_bytes)
    if layout.vector.bits == 16:
        q = _values(rng, layout.float16, *shape, hidden)
    return SignalWeights(layout, q, *_scales(rng, layout.vector, *shape))


def _records(rng: Random, layout: RowLayout, count: int) -> Tensor:
    parts: list[Tensor] = []
    for part in (layout.other, layout.down):
        if part.bits == 16:
            parts.append(_values(rng, layout.float16, count, part.n))
        else:
            parts.append(part.join_packed(codes(rng, count, part.nbytes - part.head), *_scales(rng, part, count)))
    return layout.join(*parts)


def expert_rows(rng: Random, experts: int, neurons: int, hidden: int) -> ExpertRows:
    layout = RowLayout(vector(rng, hidden), vector(rng, hidden), rng.choice((torch.float16, torch.bfloat16)))
    return ExpertRows(layout, _records(rng, layout, experts * neurons).view(experts, neurons, layout.nbytes))


def linear_weights(rng: Random, rows: int, columns: int) -> LinearWeights:
    layout = vector(rng, columns, (2, 3, 4, 8))
    q = codes(rng, rows, layout.nbytes - layout.head)
    return LinearWeights(layout, q, *_scales(rng, layout, rows))


def calls(rng: Random, tokens: int, experts: int) -> Calls:
    count = rng.randrange(6) if tokens and experts else 0
    return Calls(
        torch.tensor([rng.randrange(tokens) for _ in range(count)], dtype=torch.int64),
        torch.tensor([rng.randrange(experts) for _ in range(count)], dtype=torch.int64),
        uniform(rng, count),
    )


def active(rng: Random, which: Calls, neurons: int, dtype: torch.dtype) -> Active:
    """Some neurons of each call, ascending or not."""
    chosen = [rng.sample(range(neurons), rng.randrange(neurons + 1)) for _ in range(which.experts.numel())]
    if rng.random() < 0.7:
        chosen = [sorted(part) for part in chosen]
    flat = [neuron for part in chosen for neuron in part]
    ends = np.cumsum([0, *map(len, chosen)])
    return Active(torch.from_numpy(ends), torch.tensor(flat, dtype=torch.int64), uniform(rng, len(flat)).to(dtype))


def limits(rng: Random, count: int) -> Tensor:
    """Thresholds that no rounding decides: all neurons reach them, or none does."""
    each = [rng.choice((0.0, 0.0, -1.0, math.inf, math.nan)) for _ in range(count)]
    return torch.tensor(each, dtype=rng.choice((torch.float32, torch.float64)))


def _poison(rng: Random, tensor: Tensor) -> Tensor:
    if not tensor.numel() or tensor.is_complex():
        return tensor
    wrong: Sequence[Any] = (math.nan, math.inf, -math.inf, 3e38, -1e30)
    if not tensor.is_floating_point():
        wrong = (-1, 1 << 62, -(1 << 63), int(tensor.max()) + 1, int(tensor.max()))
        if tensor.dtype != torch.int64:
            most = torch.iinfo(tensor.dtype).max if tensor.dtype in (torch.uint8, torch.int32) else 1
            wrong = (0, most)
    out = tensor.clone(memory_format=torch.contiguous_format)
    value = rng.choice(wrong)
    if tensor.dtype == torch.float16 and math.isfinite(value):
        value = 65504.0
    out.view(-1)[rng.randrange(out.numel())] = value
    return out


def _huge(_rng: Random, tensor: Tensor) -> Tensor:
    return tensor.flatten()[:1].expand(HUGE, *tensor.shape[1:]) if tensor.ndim and tensor.numel() else tensor


def _strided(rng: Random, tensor: Tensor) -> Tensor:
    if not tensor.ndim:
        return tensor
    dim = rng.randrange(tensor.ndim)
    if rng.random() < 0.5 and tensor.ndim > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor.repeat_interleave(2, dim)[(slice(None),) * dim + (slice(None, None, 2),)]


def _cut(rng: Random, tensor: Tensor) -> Tensor:
    if not tensor.ndim:
        return tensor[None]
    dim = rng.randrange(tensor.ndim)
    size = tensor.shape[dim]
    return tensor.narrow(dim, rng.randrange(2) if size > 1 else 0, rng.choice((0, max(size - 1, 0))) if size else 0)


def _wider(rng: Random, tensor: Tensor) -> Tensor:
    if not tensor.ndim:
        return tensor
    return torch.cat([tensor, tensor], rng.randrange(tensor.ndim))


def _retyped(rng: Random, tensor: Tensor) -> Tensor:
    if rng.random() < 0.3 and tensor.ndim and tensor.is_contiguous() and tensor.stride(-1) == 1:
        return tensor.view(torch.uint8) if tensor.dtype != torch.uint8 else tensor.to(torch.int8)
    return tensor.to(rng.choice(TYPES))


def _reshaped(rng: Random, tensor: Tensor) -> Tensor:
    return rng.choice((tensor[None], tensor[..., None], tensor.flatten(), tensor.squeeze()))


_WAYS: tuple[Callable[[Random, Tensor], Tensor], ...] = (
    _poison,
    _poison,
    _retyped,
    _cut,
    _wider,
    _strided,
    _reshaped,
    _huge,
    lambda _rng, tensor: tensor.to("meta"),
    lambda _rng, tensor: tensor.clone().requires_grad_(tensor.is_floating_point()),
)


def hostile(rng: Random, tensor: Tensor) -> Tensor:
    """The tensor with something wrong, or nothing that matters."""
    if tensor.is_meta or tensor.numel() > HUGE >> 1:  # enough is wrong with it
        return tensor
    return rng.choice(_WAYS)(rng, tensor)


def hostile_array(rng: Random, array: Any) -> Any:
    """The same for an array."""
    way = rng.randrange(7)
    if way == 0:
        return array.astype(rng.choice((np.int32, np.int64, np.float64, np.uint8, ">i8")))
    if way == 1:
        return array[:-1]
    if way == 2:
        return np.concatenate([array, array])
    if way == 3:
        return np.repeat(array, 2)[::2]
    if way == 4:
        return array[None]
    if way == 5:
        frozen = array.copy()
        frozen.flags.writeable = False
        return frozen
    if array.size and np.issubdtype(array.dtype, np.integer):
        array = array.copy()
        least, most = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
        array.flat[rng.randrange(array.size)] = rng.choice(
            (-1 if least else 1, most, least, int(array.max()) + 1 if array.max() < most else 0)
        )
    return array
