"""Rows of one length: where some of a layer's experts are narrow, what moves its rows moves them length by length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import Backend
from ..kernels.cpu.native_pool import landing
from ..kernels.layouts import ExpertRows, RowLayout, VectorLayout

if TYPE_CHECKING:
    from .transfer import Transfer


@dataclass(frozen=True, slots=True)
class Piece:
    """The rows of a transfer that have one length.

    Attributes:
        source: (R, nbytes) uint8 in RAM. index, places: (N,) int64, its rows and the slots of the target.
    """

    source: Tensor
    index: NDArray[np.int64]
    places: NDArray[np.int64]


def pieces(transfer: Transfer) -> list[Piece]:
    """A transfer by the length of its rows, the longest first; nothing in it is out of range.

    Raises:
        ValueError: a row or slot out of range, or a slot named twice.
    """
    source, narrow, index = transfer.source, transfer.narrow, transfer.index
    rows = len(source) + (0 if narrow is None else len(narrow))
    places = landing(index, transfer.slots, rows, len(transfer.target))
    if narrow is None:
        return [Piece(source, index.copy(), places)]
    short = index >= len(source)
    return [
        Piece(part, index[chosen] - first, places[chosen])
        for part, chosen, first in ((source, ~short, 0), (narrow, short, len(source)))
    ]


def scatter(backend: Backend, target: Tensor, places: Tensor, rows: Tensor) -> None:
    """Copy rows (N, nbytes) to target[places], target (S, as many bytes or more)."""
    nbytes = rows.shape[1]
    if nbytes == target.shape[1]:
        backend.pool_scatter(target, places, rows)
    else:
        words = target.view(torch.int64)[:, : nbytes // 8]
        words.index_copy_(0, places, rows.view(torch.int64))


def as_expert(rows: Tensor) -> ExpertRows:
    """Rows (R, nbytes) as those of one expert, to be gathered."""
    return ExpertRows(_plain(rows.shape[1]), rows[None])


@cache
def _plain(nbytes: int) -> RowLayout:
    """To move bytes, any layout of as many will do."""
    half = VectorLayout(nbytes // 4, 16, nbytes // 4)
    return RowLayout(half, half, torch.float16)


def staged(buffer: Tensor, count: int, nbytes: int) -> Tensor:
    """The beginning of a lane (chunk, longest) as (count, nbytes) rows, one behind the other."""
    return buffer.view(-1)[: count * nbytes].view(count, nbytes)
