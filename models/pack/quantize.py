"""Weight rows as codes in our layouts: by half-quadratic quantization (HQQ, the hqq library), or another quantizer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Barrier
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.codes import pack_codes
from ...kernels.layouts import VectorLayout

# HQQ iterates over the whole matrix: blocks of this many rows stay in the CPU's caches and each stops by itself,
# which made a 14336 x 4096 matrix 6 to 9 times faster. Groups never cross rows, so blocks are independent.
# Each block has one thread to itself: what it stops at, and so its codes, then depend on no number of threads.
BLOCK_ROWS = 128
HQQ_BITS = 8  # with so many there is nothing to gain by another quantizer, and HQQ keeps what it can keep exactly
_DEVICE_ROWS = 4096  # a GPU wants larger ones


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


def quantize(matrix: Tensor, bits: int, group: int, values: torch.dtype | None = None) -> Codes:
    """HQQ's codes of a matrix, each row in groups of consecutive values (hqq axis 1).

    Args:
        matrix: (N, n) floating point, n divisible by `group`. bits: 2, 3, 4 or 8. values: type of `Codes.values`.

    Raises:
        ValueError: the matrix holds a value that is not finite, or too large for float16 scales.
    """
    from hqq.core.quantize import Quantizer  # a second of imports that reading a pack does not need

    finite(matrix)

    def block_of(rows: Tensor) -> Codes:
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
        return Codes(
            codes.view(len(rows), -1).to(torch.uint8),
            meta["scale"].view(len(rows), -1).half(),
            meta["zero"].view(len(rows), -1).half(),
        )

    if matrix.device.type == "cpu":
        workers, blocks = torch.get_num_threads(), matrix.split(BLOCK_ROWS)
        parts = list(_pool(workers).map(block_of, blocks)) if workers > 1 else map(block_of, blocks)
    else:
        parts = map(block_of, matrix.split(_DEVICE_ROWS))
    codes, scale, zero = (torch.cat(column).cpu() for column in list(zip(*parts, strict=True))[:3])
    if bits == 8:
        codes, scale, zero = _without_loss(matrix.cpu(), codes, scale, zero)
    # hqq's zero of a group that is nearly constant and far from 0 overflows float16: such a group keeps its mean.
    lost = ~torch.isfinite(zero)
    if bool(lost.any()):
        means = matrix.float().view(*scale.shape, group).mean(-1).cpu()
        codes = codes.view(*scale.shape, group).masked_fill(lost[..., None], 0).view(codes.shape)
        scale, zero = scale.masked_fill(lost & torch.isfinite(scale), 1.0), torch.where(lost, -means.half(), zero)
    if not bool((torch.isfinite(scale) & torch.isfinite(zero)).all()):
        raise ValueError("the weights are too large for float16 scales")
    found = Codes(codes, scale, zero)
    return found if values is None else found._replace(values=found.dense().to(values))


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


@cache
def _pool(workers: int) -> ThreadPoolExecutor:
    """Threads that each compute on one core."""
    together = Barrier(workers + 1)

    def alone() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread takes over what was set last when it computes for the first time
        together.wait()

    pool = ThreadPoolExecutor(workers, "quantize", alone)
    for _ in range(workers):
        pool.submit(lambda: None)
    together.wait()
    torch.set_num_threads(workers)  # the setting is also that of threads to come
    return pool


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
        return self.packed if layout.bits == 16 else layout.join_packed(self.packed, self.scale, self.zero)

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
    if layout.bits == 16:
        finite(matrix)
        whole = matrix.to(float16).contiguous().cpu()
        empty = torch.empty(len(matrix), 0, dtype=torch.float16)
        return Stored(whole.view(torch.uint8), empty, empty, None if values is None else whole.to(values))
    codes = by(matrix, layout.bits, layout.group)
    return Stored(pack_codes(codes.codes, layout.bits), *layout.stored(codes.scale, codes.zero), codes.values)
