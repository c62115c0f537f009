"""Half-quadratic quantization (HQQ) of weight rows through the hqq library, packed into our layouts."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.layouts import VectorLayout, pack_codes

# HQQ iterates over the whole matrix: blocks of this many rows stay in the CPU's caches and each stops by itself,
# which made a 14336 x 4096 matrix 6 to 9 times faster. Groups never cross rows, so blocks are independent.
BLOCK_ROWS = 128


def quantize(matrix: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and scales of a matrix, each row in groups of consecutive values (hqq axis 1).

    Args:
        matrix: (N, n) floating point, n divisible by `group`. bits: 2, 3, 4 or 8.

    Returns:
        codes (N, n) uint8, scale and zero (N, n / group) float16; w = (codes - zero) * scale.

    Raises:
        ValueError: the matrix holds a value that is not finite.
    """
    from hqq.core.quantize import Quantizer  # a second of imports that reading a pack does not need

    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("the weights hold values that are not finite")
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for block in matrix.float().split(BLOCK_ROWS):
        codes, meta = Quantizer.quantize(
            block,
            nbits=bits,
            group_size=group,
            axis=1,
            optimize=True,
            bitpack=False,
            compute_dtype=torch.float32,
            device=str(matrix.device),
        )
        rows = block.shape[0]
        parts.append(
            (
                codes.view(rows, -1).to(torch.uint8).cpu(),
                meta["scale"].view(rows, -1).half().cpu(),
                meta["zero"].view(rows, -1).half().cpu(),
            )
        )
    codes, scale, zero = (torch.cat(column) for column in zip(*parts, strict=True))
    # hqq's zero of a group that is nearly constant and far from 0 overflows float16: such a group keeps its mean.
    lost = ~torch.isfinite(zero)
    if bool(lost.any()):
        means = matrix.float().view(*scale.shape, group).mean(-1).cpu()
        codes = codes.view(*scale.shape, group).masked_fill(lost[..., None], 0).view(codes.shape)
        scale, zero = scale.masked_fill(lost & torch.isfinite(scale), 1.0), torch.where(lost, -means.half(), zero)
    if not bool((torch.isfinite(scale) & torch.isfinite(zero)).all()):
        raise ValueError("the weights are too large for float16 scales")
    return codes, scale, zero


def store_matrix(matrix: Tensor, layout: VectorLayout, float16: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The stored form of a matrix with its scales apart, as up projections and dense linear layers are kept.

    (N, n) -> q (N, packed bytes) uint8, scale and zero (N, groups) float16.
    """
    if layout.bits == 16:
        empty = torch.empty(matrix.shape[0], 0, dtype=torch.float16)
        return _bytes(matrix, float16), empty, empty
    codes, scale, zero = quantize(matrix, layout.bits, layout.group)
    return pack_codes(codes, layout.bits), scale, zero


def store_vectors(matrix: Tensor, layout: VectorLayout, float16: torch.dtype) -> Tensor:
    """The stored form of gate rows or down columns: (N, n) -> (N, layout.nbytes) uint8."""
    if layout.bits == 16:
        return _bytes(matrix, float16)
    return layout.join(*quantize(matrix, layout.bits, layout.group))


def _bytes(matrix: Tensor, float16: torch.dtype) -> Tensor:
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("the weights hold values that are not finite")
    return matrix.to(float16).contiguous().view(torch.uint8)
