"""The check that a tensor passes before an operation touches its memory: type, shape, device and strides.

Weights are checked once, when `layouts.py` puts them together; arguments that change are checked in each call
(`arguments.py`); tensors passed to the compiled library by address are checked in `cpu/weights.py: required`.
"""

from __future__ import annotations

from typing import Any

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BYTES = (torch.uint8,)
INDICES = (torch.int64,)
NEURONS = (torch.int64, torch.int32)
CPU = torch.device("cpu")

Dtypes = tuple[torch.dtype, ...]
Shape = tuple[int, ...]


def require(
    name: str, given: Any, dtypes: Dtypes, shape: Shape, device: torch.device = CPU, *, whole: bool = True
) -> None:
    """Refuse a tensor that an operation on `device` cannot take.

    Args:
        device: where the operation runs. Tensors on the CPU may go to any device: what runs on a GPU copies them or
            demands that they are pinned (`triton/launch.py`). whole: whether the tensor must be contiguous.

    Raises:
        ValueError: names the argument, what it must be and what it is.
    """
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(given).__name__}")
    fits = given.dtype in dtypes and given.shape == shape and (given.is_cpu or given.device == device)
    if not fits or (whole and not given.is_contiguous()):
        contiguous = "contiguous " if whole else ""
        expected = f"{contiguous}{_names(dtypes)} of shape {tuple(shape)} on {device}"
        raise ValueError(f"{name} must be {expected}, not {described(given)}")


def described(given: torch.Tensor) -> str:
    """Type, shape, strides where they are not the usual ones, and device."""
    strides = ""
    if given.layout is torch.strided and not given.is_contiguous():
        strides = f" with strides {given.stride()}"
    return f"{_names((given.dtype,))} of shape {tuple(given.shape)}{strides} on {given.device}"


def index(name: str, value: Any, end: int) -> None:
    """Refuse a number that is not an int from 0 to end - 1.

    Raises:
        ValueError: names it and the range.
    """
    if not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{name} index out of range 0..{end - 1}: {value}")


def indices(name: str, values: torch.Tensor, end: int) -> None:
    """Refuse indices (N,) int64 that are not all from 0 to end - 1.

    Raises:
        ValueError: names the range and an index outside it.
    """
    # A few are checked faster in Python than by two operations on tensors.
    ends = values.tolist() if values.numel() <= 32 else [int(values.min()), int(values.max())]
    if ends and (min(ends) < 0 or max(ends) >= end):
        wrong = min(ends) if min(ends) < 0 else max(ends)
        raise ValueError(f"{name} index out of range 0..{end - 1}: {wrong}")


def apart(name: str, given: torch.Tensor, other: str, source: torch.Tensor) -> None:
    """Refuse a destination that shares memory with what is copied there; both contiguous.

    Raises:
        ValueError: they overlap.
    """
    start, first = given.data_ptr(), source.data_ptr()
    if start < first + source.nbytes and first < start + given.nbytes and given.device == source.device:
        raise ValueError(f"{name} must not share memory with {other}")


def _names(dtypes: Dtypes) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
