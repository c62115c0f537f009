"""gpt-oss' blocks of four bits as published, from those of a GGUF file: the same values, in another order.

A block in a file: one byte of exponent, then sixteen bytes, whose lower four bits are values 0 to 15, and the upper
ones values 16 to 31. As published, a byte has two neighbours, the lower four bits first.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..families.storage import BLOCK
from .made import Made, Undo, UndoOne, in_turn

_BYTES = 1 + BLOCK // 2  # of a block


def parts(weights: Made | None) -> list[Made | None]:
    """Blocks (E, N, n / 32, 16) and scales (E, N, n / 32) of matrices (E, N, n), uint8: of gate and up, with rows of
    both in turn, or of down.
    """
    if weights is None:
        return [None, None]
    experts, rows, columns = weights.shape
    shape = (experts, rows, columns // BLOCK)
    one_rows = rows // len(weights.sources)
    blocks = replace(weights, shape=(*shape, BLOCK // 2), dtype="U8", undo=_undo(_blocks, one_rows), coded=True)
    return [blocks, replace(weights, shape=shape, dtype="U8", undo=_undo(_scales, one_rows), coded=True)]


def _undo(part: UndoOne, rows: int) -> Undo:
    """Of one expert's bytes in one or two tensors of so many rows."""

    def undo(*sources: Tensor) -> Tensor:
        found = [part(raw.view(rows, -1, _BYTES)) for raw in sources]
        return found[0] if len(found) == 1 else in_turn(*found)

    return undo


def _blocks(raw: Tensor) -> Tensor:
    codes = raw[..., 1:]
    values = torch.cat([codes & 15, codes >> 4], dim=-1)
    return values[..., ::2] | (values[..., 1::2] << 4)


def _scales(raw: Tensor) -> Tensor:
    return raw[..., 0]
