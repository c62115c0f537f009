"""What a kernel must know about one stored vector at compile time: where its parts are and how words hold codes.

The fast path reads 32-bit words. Word w of a chunk of 64 codes holds `len(columns)` of them, all of one chunk
(`layouts.py` packs planes for that): the field at bit `shifts[i]` belongs to column `columns[i]` counted from the
word's first. It needs rows of whole chunks, and groups that no four neighbouring codes straddle. Everything else goes
code by code through the general path: small test models and odd sizes, where speed is of no concern.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from .. import maker
from ..codes import CHUNK
from ..layouts import RowLayout, SignalLayout, VectorLayout
from ..weights import LinearWeights

WORD = 4  # bytes
ALIGNMENT = 16  # bytes: a thread's widest load


class Vector(NamedTuple):
    """One vector of n values inside a row of bytes; all numbers become constants of the compiled kernel.

    Attributes:
        n, bits, group: as in `VectorLayout`. bfloat16: what 16-bit values are.
        fast: whether it may be read in 32-bit words.
        row, codes: bytes from one row to the next, and from a row's start to the codes.
        scale_row, scales, zeros: likewise for the scales and zeros, which may be in their own tensors. scale_bytes: of
            each of them.
        words: 32-bit words of a vector, or its values where they are read one by one.
        per_chunk, lanes: words of a chunk; neighbouring codes that share a plane.
        shifts, columns: bit and column of each field of a word. sets: scales per word, one or one per plane.
        digits: of x, which come with chunks of codes; 0 where x comes as floats. x_words: of 32 bits, that a token's
            digits take. ptx: whether kernels may say instructions of NVIDIA's.
    """

    n: int
    bits: int
    group: int
    bfloat16: bool
    fast: bool
    row: int
    codes: int
    scale_row: int
    scales: int
    zeros: int
    scale_bytes: int
    words: int
    per_chunk: int
    lanes: int
    shifts: tuple[int, ...]
    columns: tuple[int, ...]
    sets: int
    digits: int = 0
    x_words: int = 0
    ptx: bool = False

    @property
    def chunked(self) -> bool:
        """Whether every 64 codes have one scale, so that they are multiplied as integers."""
        return self.fast and self.bits < 16 and self.group % CHUNK == 0

    def reading(self, digits: int) -> Vector:
        """For x in so many digits."""
        words = self.n // CHUNK * (16 * digits + 2)
        return self._replace(digits=digits, x_words=-(-words // 4) * 4)


def _ptx() -> bool:
    return maker.has_ptx() and not knobs.runtime.interpret


def _describe(
    layout: VectorLayout,
    float16: torch.dtype,
    fast: bool,
    row: int,
    codes: int,
    scale_row: int,
    scales: int,
    zeros: int,
) -> Vector:
    bits = layout.bits
    fast = fast and layout.n % CHUNK == 0 and (bits == 16 or layout.group % WORD == 0)
    # In the general path a "word" is one value.
    planes = {2: 4, 3: 4, 4: 2, 8: 1, 16: 1}[bits] if fast else 1
    lanes = (2 if bits == 16 else WORD) if fast else 1
    fields = [(plane, lane) for plane in range(planes) for lane in range(lanes)]
    # Two planes of 3-bit codes at a time are rebuilt into 4-bit fields, see `codes.load_words`.
    step = (0, 0, 4, 4) if bits == 3 else tuple(bits * plane for plane in range(planes))
    return Vector(
        n=layout.n,
        bits=bits,
        group=layout.group,
        bfloat16=float16 == torch.bfloat16,
        fast=fast,
        row=row,
        codes=codes,
        scale_row=scale_row,
        scales=scales,
        zeros=zeros,
        scale_bytes=layout.scale_bytes,
        words=layout.n // (planes * lanes),
        per_chunk=CHUNK // (planes * lanes),
        lanes=lanes,
        shifts=tuple(8 * lane + step[plane] for plane, lane in fields),
        columns=tuple(CHUNK // planes * plane + lane for plane, lane in fields),
        sets=1 if layout.group % CHUNK == 0 else planes,
        ptx=_ptx(),
    )


def _aligned(*tensors: Tensor) -> bool:
    return all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)


@cache
def _apart(layout: VectorLayout, float16: torch.dtype, row: int, fast: bool) -> Vector:
    return _describe(layout, float16, fast, row, 0, layout.scale_bytes * layout.groups, 0, 0)


def signal_vector(layout: SignalLayout, q: Tensor, scale: Tensor, zero: Tensor) -> Vector:
    """A row of a signal projection, scales in tensors of their own."""
    return _apart(layout.vector, layout.float16, layout.row_bytes, _aligned(q, scale, zero))


def linear_vector(weights: LinearWeights) -> Vector:
    """A row of a dense linear layer."""
    fast = _aligned(weights.q, weights.scale, weights.zero)
    return _apart(weights.vector, torch.float16, weights.q.shape[1], fast)


@cache
def _in_record(layout: RowLayout, fast: bool) -> tuple[Vector, Vector]:
    vectors: list[Vector] = []
    for part, start in ((layout.other, 0), (layout.down, layout.down_at)):
        if not part.bits:
            continue
        scales, zeros, codes = start, start + part.scale_bytes * part.groups, start + part.head
        vectors.append(_describe(part, layout.float16, fast, layout.nbytes, codes, layout.nbytes, scales, zeros))
    return vectors[0], vectors[-1]


def record_vectors(layout: RowLayout, data: Tensor) -> tuple[Vector, Vector]:
    """The other projection's row and the down column of a neuron's record; the latter twice where that is all."""
    return _in_record(layout, _aligned(data))
