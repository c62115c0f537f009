"""Weight rows as codes in our layouts: each group's grid by least squares, or another quantizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.codes import byte_below, pack_codes, scale_of_byte
from ...kernels.layouts import VectorLayout
from ...kernels.operations import Feedback, round_matrix
from ..quantized import Kept
from ..transformers_import import import_hqq

MOST_BITS = 8  # with so many there is nothing to gain by another quantizer
_DEVICE_ROWS = 4096  # at once, on a GPU


class Codes(NamedTuple):
    """Rounded vectors: codes (N, n) uint8, scale and zero (N, n / group) float16; w = (codes - zero) * scale.

    values: (N, n) of these, where they were asked for.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    values: Tensor | None = None

    def dense(self) -> Tensor:
        """(N, n) float32: what they stand for, as `dequantize` computes it."""
        grouped = self.codes.view(*self.scale.shape, -1).float()
        return ((grouped - self.zero.float()[..., None]) * self.scale.float()[..., None]).view(self.codes.shape)


Quantizer = Callable[[Tensor, int, int], Codes]
"""Codes of a matrix (N, n) of `bits`, in groups of so many consecutive values."""


def quantize(matrix: Tensor, bits: int, group: int, values: torch.dtype | None = None, *, short: bool = False) -> Codes:
    """Codes of a matrix (N, n), each row in groups of consecutive values that share a grid.

    By least squares, compiled; on a GPU by `by_hqq`, which errs a little more. Eight bits keep what they can keep
    exactly.

    Args:
        matrix: (N, n) floating point, n divisible by `group`. bits: 2, 3, 4 or 8. values: type of `Codes.values`.
        short: whether scales are to be bytes (`VectorLayout.short`), on the CPU and of fewer bits than MOST_BITS.

    Raises:
        ValueError: the matrix holds a value that is not finite, or too large for its scales.
    """
    if matrix.is_cuda:
        codes, scale, zero, _ = by_hqq(matrix, bits, group)
    else:
        finite(matrix)
        even = torch.full((group,), 1 / group)
        feedback, short = Feedback(torch.eye(group)), short and bits < MOST_BITS
        made = round_matrix(matrix.reshape(-1, group), feedback, bits, group, weight=even, short=short)
        codes, scale, zero = (part.view(len(matrix), -1) for part in made[:3])
        scale, zero = scale.half(), zero.half()
    if bits == MOST_BITS:
        codes, scale, zero = _without_loss(matrix.cpu(), codes, scale, zero)
    return _checked(codes, scale, zero, values)


def by_hqq(matrix: Tensor, bits: int, group: int, values: torch.dtype | None = None) -> Codes:
    """The same by half-quadratic quantization (the hqq library, axis 1), as FloE and CORM rounded weights. It looks at
    the weights alone, and needs no calibration text; on the matrix's device.

    Raises:
        ValueError: as `quantize`.
    """
    import_hqq()
    from hqq.core.quantize import Quantizer

    finite(matrix)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for rows in matrix.split(_DEVICE_ROWS):
        codes, meta = Quantizer.quantize(
            rows.float(),
            nbits=bits,
            group_size=group,
            axis=1,
            optimize=True,
            bitpack=False,
            compute_dtype=torch.float32,
            device=str(matrix.device),
        )
        grid = (meta[name].view(len(rows), -1).half() for name in ("scale", "zero"))
        parts.append((codes.view(len(rows), -1).to(torch.uint8), *grid))
    codes, scale, zero = (torch.cat(column).cpu() for column in zip(*parts, strict=True))
    # hqq's zero of a group that is nearly constant and far from 0 overflows float16: such a group keeps its mean.
    lost = ~torch.isfinite(zero)
    if bool(lost.any()):
        means = matrix.float().view(*scale.shape, group).mean(-1).cpu()
        codes = codes.view(*scale.shape, group).masked_fill(lost[..., None], 0).view(codes.shape)
        scale, zero = scale.masked_fill(lost & torch.isfinite(scale), 1.0), torch.where(lost, -means.half(), zero)
    return _checked(codes, scale, zero, values)


def _checked(codes: Tensor, scale: Tensor, zero: Tensor, values: torch.dtype | None) -> Codes:
    if not bool((torch.isfinite(scale) & torch.isfinite(zero)).all()):
        raise ValueError("the weights are too large for float16 scales")
    found = Codes(codes, scale, zero)
    return found if values is None else found._replace(values=found.dense().to(values))


def keeping(kept: Kept | None, layout: VectorLayout, by: Quantizer, values: torch.dtype | None = None) -> Quantizer:
    """A quantizer that keeps the codes of a matrix that others rounded, where `layout` can hold them, else `by`.

    Scales become the nearest ones that it can hold: of bytes, 3 % off at most. Rounded once more, to a grid of
    our own, such weights lose twice as much (tests/bench/LOG.md).
    """
    if kept is None or kept.bits != layout.bits or kept.codes.shape[1] // kept.scale.shape[1] % layout.group:
        return by
    codes, zero, scale, _ = kept
    zero, scale = (each.repeat_interleave(layout.groups // each.shape[1], 1) for each in (zero, scale))
    near = scale.half().float()
    if layout.scale_dtype == torch.uint8:
        below = byte_below(scale)
        low, high = scale_of_byte(below), scale_of_byte(below + 1)
        near = torch.where(scale - low <= high - scale, low, high)
    if not bool(((near - scale).abs() * 31 <= scale).all()):  # a group of zeros, or out of range
        return by
    found = _checked(codes, near.half(), zero.half(), values)
    return lambda _matrix, _bits, _group: found


def finite(matrix: Tensor) -> None:
    """Refuse what cannot be rounded.

    Raises:
        ValueError: the matrix holds a value that is not finite.
    """
    # The sum is found several times as fast.
    if not bool(matrix.sum(dtype=torch.float32).isfinite() or matrix.isfinite().all()):
        raise ValueError("the weights hold values that are not finite")


def _without_loss(matrix: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes of 8 bits with those groups exact that can be: of multiples of a power of two up to 127 times it.

    Published weights of four bits are such (mxfp4), where the blocks of a group are alike in size.
    """
    values = matrix.float().view(*scale.shape, -1)
    step = torch.exp2(values.abs().amax(-1).log2().floor().clamp(min=-18) - 6)  # 2 ** -24 is float16's least
    multiples = values / step[..., None]
    exact = (multiples == multiples.round()).all(-1) & (step <= 2.0**15)
    own = (multiples + 128).clamp(0, 255).to(torch.uint8)
    codes = torch.where(exact[..., None], own, codes.view(own.shape)).view(codes.shape)
    return codes, torch.where(exact, step.half(), scale), torch.where(exact, torch.tensor(128.0).half(), zero)


class Stored(NamedTuple):
    """Vectors as a pack holds them: packed codes (N, bytes) uint8, scale and zero (N, groups) of the layout's
    scale_dtype, no groups at 16 bits.

    values: (N, n) what they stand for, if that was asked for.
    """

    packed: Tensor
    scale: Tensor
    zero: Tensor
    values: Tensor | None = None

    def dense(self) -> Tensor:
        """These values."""
        if self.values is None:
            raise ValueError("values were not asked for")
        return self.values

    def vectors(self, layout: VectorLayout) -> Tensor:
        """As records hold them: (N, layout.nbytes) uint8."""
        return self.packed if layout.bits in (0, 16) else layout.join_packed(self.packed, self.scale, self.zero)

    def ordered(self, order: Tensor) -> Stored:
        """The vectors in another order."""
        return Stored(*(None if part is None else part[order] for part in self))  # pyright: ignore[reportArgumentType]


def store(
    matrix: Tensor,
    layout: VectorLayout,
    float16: torch.dtype,
    by: Quantizer = quantize,
    values: torch.dtype | None = None,
) -> Stored:
    """The stored form of a matrix (N, n). values: their type, if the quantizer gives some."""
    if not layout.bits:
        nothing = torch.empty(len(matrix), 0)
        return Stored(nothing.byte(), nothing, nothing, nothing if values is None else nothing.to(values))
    if layout.bits == 16:
        finite(matrix)
        whole = matrix.to(float16).contiguous().cpu()
        empty = torch.empty(len(matrix), 0, dtype=torch.float16)
        return Stored(whole.view(torch.uint8), empty, empty, None if values is None else whole.to(values))
    codes = by(matrix, layout.bits, layout.group)
    return Stored(pack_codes(codes.codes, layout.bits), *layout.stored(codes.scale, codes.zero), codes.values)
