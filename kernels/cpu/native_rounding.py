"""`round_matrix` compiled from C++ (cpu/src/rounding.cpp)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..types import Feedback, Rounded
from .binding import check, library, records

_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as floe.h numbers them


def by_bfloat16() -> bool:
    """Whether this processor passes errors on, and multiplies matrices, by bfloat16 (AVX512_BF16)."""
    return bool(library().rounds_by_bfloat16())


def round_matrix(
    matrix: Tensor,
    feedback: Feedback,
    bits: int,
    group: int,
    weight: Tensor | None,
    values: torch.dtype | None,
    *,
    short: bool = False,
) -> Rounded:
    """See `kernels.round_matrix`; checked already."""
    rows, columns = matrix.shape
    scale, zero = torch.empty((2, rows, columns // group)).unbind()
    codes = torch.empty(matrix.shape, dtype=torch.uint8)
    stand_for = None if values is None else torch.empty(matrix.shape, dtype=values)
    half = feedback.half if by_bfloat16() else None
    rounding = records.rounding(
        rows=rows,
        columns=columns,
        group=group,
        pitch16=0 if half is None else half.shape[1],
        bits=bits,
        down=weight is None,
        scale_bytes=1 if short else 2,
        matrix_kind=_KINDS[matrix.dtype],
        values_kind=_KINDS[values or torch.float32],
    )
    made = codes, stand_for, scale, zero
    check(library().round_matrix(rounding, weight, feedback.lower, half, matrix, torch.get_num_threads(), *made))
    return Rounded(codes, scale, zero, stand_for)
