"""The forms in which keys and values are stored: as numbers, or as codes of 8 bits with a scale for each head.

A row is one head's key or value, (D,). As codes, a token's entry is R · D bytes and then R scales in float16, so that
codes begin at multiples of what an entry does. A row's largest number is 127 times its scale, and values are symmetric
about zero: `value = code * scale`. A row with a number that is not finite has a scale that is none either.
"""

from __future__ import annotations

import torch
from torch import Tensor

CODES = torch.int8  # the dtype of a store of codes; other dtypes are stored as they are
LARGEST = 127


def entry_of(rows: int, dim: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of a token's entry of `rows` rows: (R, D), or (R * (D + 2),) bytes."""
    return (rows * (dim + 2),) if dtype == CODES else (rows, dim)


def element(dtype: torch.dtype, dim: int) -> float:
    """Bytes per number of a row."""
    return (dim + 2) / dim if dtype == CODES else dtype.itemsize


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values (..., R, D) -> entries (..., *entry_of(R, D, dtype)). Codes are the nearest, of two as near the even."""
    if dtype != CODES:
        return values.to(dtype)
    wide = values.float()
    scale = (wide.abs().amax(-1) / LARGEST).masked_fill(~wide.isfinite().all(-1), torch.nan).half()
    factor = scale.float()[..., None]
    codes = torch.where(factor > 0, wide / factor, 0.0).round().clamp(-LARGEST, LARGEST).to(CODES)
    return torch.cat([codes.flatten(-2), scale.view(CODES)], -1)


def values(entries: Tensor, rows: int, dim: int, dtype: torch.dtype) -> Tensor:
    """entries (..., *entry_of) -> (..., R, D) of `dtype`, of a new tensor if those are codes."""
    if entries.dtype != CODES:
        return entries.to(dtype)
    codes, scale = entries.split([rows * dim, 2 * rows], -1)
    return codes.unflatten(-1, (rows, dim)).to(dtype) * scale.view(torch.float16).to(dtype)[..., None]
