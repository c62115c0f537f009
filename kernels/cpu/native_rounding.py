"""`round_rows` compiled from C++ (cpu/src/rounding.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from .binding import check, library, records


def round_rows(
    left: Tensor, factor: Tensor, bits: int, weight: Tensor | None, group: int | None, *, short: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.round_rows`; checked already."""
    rows, columns = left.shape
    factor = factor if factor.stride(1) == 1 else factor.contiguous()
    each = group or columns
    scale, zero = torch.empty((2, 1 if group is None else rows, columns if group is None else columns // each)).unbind()
    codes = torch.empty(left.shape, dtype=torch.uint8)
    rounding = records.rounding(
        rows=rows,
        columns=columns,
        group=each,
        factor_pitch=factor.stride(0),
        bits=bits,
        each_row=group is not None,
        scale_bytes=1 if short else 2,
    )
    check(library().round_rows(rounding, weight, factor, torch.get_num_threads(), left, codes, scale, zero))
    return codes, scale, zero
