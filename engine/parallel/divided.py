"""A prompt's pass of which each process computes the dense part for its own tokens.

Keys and values go to all processes, which need them for the tokens to come; nothing else of a token does.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .group import Group


def homes(tokens: int, size: int) -> list[int]:
    """The first token of each process, and the number of all behind them."""
    return [rank * tokens // size for rank in range(size + 1)]


class Divided:
    """One pass; see `decoder.mixers.grouped.Part`."""

    def __init__(self, group: Group, tokens: int) -> None:
        self._group, self.tokens = group, tokens
        firsts = homes(tokens, group.size)
        self._counts: Sequence[int] = [end - first for first, end in pairwise(firsts)]
        self.mine = slice(firsts[group.rank], firsts[group.rank + 1])

    def everything(self, entries: Tensor) -> Tensor:
        """See `Part`."""
        own = entries.contiguous().view(len(entries), -1).view(torch.uint8)
        found = self._shared(own, self._counts)
        return found.view(entries.dtype).view(-1, *entries.shape[1:])

    def last(self, state: Tensor) -> Tensor:
        """See `Part`: the last process has it."""
        size, last = self._group.size, self._group.size - 1
        given = state if self._group.rank == last else state[:0]
        return self._shared(given, [int(rank == last) for rank in range(size)])

    def _shared(self, own: Tensor, counts: Sequence[int]) -> Tensor:
        size = self._group.size
        given = own.repeat(size, *[1] * (own.ndim - 1))
        return self._group.swap("shared", given, [len(own)] * size, counts, self._group.everyone)
