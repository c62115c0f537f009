"""How a prompt's tokens reach their experts, and the results come back (DualSparse-MoE figure 5).

Each process is home to some of the tokens. A token's state is sent once to each process that holds a part of an expert
it chose, with its choice, and one weighted sum comes back from there. The patterns differ in the way:

- "ep" and "s-etp" (figure 5b): one all-to-all there, one back, among all processes.
- "etp" (figure 5a): an all-to-all among the processes with the same slice, an all-gather in each group of experts;
  back a reduce-scatter in the group, then an all-to-all.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.types import Work
from ..experts.moe_layer import Cancelled
from .divided import homes
from .group import Group, Line
from .holding import Holding


class Experts(Protocol):
    """What a route needs of a layer."""

    def own(self, hidden: Tensor, index: Tensor, weights: Tensor, tokens: int) -> tuple[Tensor, list[int]]:
        """See `SpreadLayer`."""
        ...

    def all_work(self, index: Tensor, weights: Tensor) -> Work:
        """The calls of all processes; those that are left out have an infinite threshold."""
        ...


class Routes:
    """The routes among the processes of a grid; all of them must make theirs together."""

    def __init__(self, group: Group, holding: Holding) -> None:
        grid, self._group, self._slices = holding.grid, group, holding.grid.slices
        self._groups, self._by_slice = grid.groups, grid.pattern == "etp"
        self._group_of = grid.group_of(holding.experts)
        self._alike = self._near = group.everyone
        if self._by_slice:  # all processes have to make all lines, in this order
            alike = [group.line(range(first, group.size, grid.slices)) for first in range(grid.slices)]
            near = [group.line(range(at * grid.slices, (at + 1) * grid.slices)) for at in range(grid.groups)]
            self._alike, self._near = alike[holding.slice], near[holding.group]

    def home(self, layer: Experts, hidden: Tensor, index: Tensor, weights: Tensor, *, stop: bool) -> Tensor:
        """A layer's output (B, H) for tokens that all processes have.

        Args:
            stop: whether this process wants all to stop.

        Raises:
            Cancelled: one of them wants that; in all.
        """
        size, tokens = self._group.size, len(hidden)
        firsts = homes(tokens, size)
        counts = [end - first for first, end in pairwise(firsts)]
        mine = slice(firsts[self._group.rank], firsts[self._group.rank + 1])
        y = self.routed(layer, hidden[mine], index[mine], weights[mine], tokens, stop=stop)
        own = counts[self._group.rank]
        return self._group.swap("shared", y.repeat(size, 1), [own] * size, counts, self._group.everyone)

    def routed(
        self, layer: Experts, hidden: Tensor, index: Tensor, weights: Tensor, tokens: int, *, stop: bool
    ) -> Tensor:
        """The output (B, H) for tokens whose home this is. Args: as for `home`; tokens: of all homes."""
        wanted = self._wanted(layer, index, weights)
        rows = _joined(hidden, index, weights)
        if self._by_slice:
            return self._in_steps(layer, hidden, wanted, rows, tokens, stop=stop)
        wanted = wanted.repeat_interleave(self._slices, 1)  # (B, R)
        line = self._group.everyone
        token, send = wanted.T.nonzero()[:, 1], wanted.sum(0).tolist()
        receive, stop = self._headers(send, line, stop=stop)
        if stop:
            raise Cancelled
        come = self._group.swap("rows", rows[token], send, receive, line)
        y = self._computed(layer, come, hidden, tokens)
        back = self._group.swap("results", y, receive, send, line)
        return torch.zeros_like(hidden).index_add_(0, token, back)

    def _in_steps(
        self, layer: Experts, hidden: Tensor, wanted: Tensor, rows: Tensor, tokens: int, *, stop: bool
    ) -> Tensor:
        swap, alike, near, slices = self._group.swap, self._alike, self._near, self._slices
        token, send = wanted.T.nonzero()[:, 1], wanted.sum(0).tolist()
        receive, stop = self._headers(send, alike, stop=stop)
        arrived = sum(receive)
        counts, stop = self._headers([arrived] * slices, near, stop=stop)
        if stop:
            raise Cancelled
        come = swap("rows", rows[token], send, receive, alike)
        everything = swap("rows", come.repeat(slices, 1), [arrived] * slices, counts, near)
        y = self._computed(layer, everything, hidden, tokens)
        parts = swap("results", y, counts, [arrived] * slices, near)
        back = swap("results", parts.view(slices, arrived, hidden.shape[1]).sum(0), receive, send, alike)
        return torch.zeros_like(hidden).index_add_(0, token, back)

    def _wanted(self, layer: Experts, index: Tensor, weights: Tensor) -> Tensor:
        """(B, G) whether a token needs a group's experts."""
        work = layer.all_work(index, weights)
        calls, parts = work.calls, work.thresholds.numel() // max(1, index.numel())
        left = work.thresholds != torch.inf
        wanted = torch.zeros(len(index), self._groups, dtype=torch.bool, device=index.device)
        groups = self._group_of.to(index.device)[calls.experts[left] // max(1, parts)]
        wanted[calls.tokens[left], groups] = True
        return wanted

    def _headers(self, send: list[int], line: Line, *, stop: bool) -> tuple[list[int], bool]:
        """How many rows each process of the line is about to send, and whether one of them wants to stop."""
        ones = [1] * len(send)
        given = torch.tensor([[count, int(stop)] for count in send])
        counts, stops = self._group.swap("headers", given, ones, ones, line).unbind(1)
        return counts.tolist(), bool(stops.any())

    def _computed(self, layer: Experts, rows: Tensor, like: Tensor, tokens: int) -> Tensor:
        return layer.own(*_parted(rows, like), tokens)[0]


def _joined(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Tokens' states (B, H) with their choices (B, K), as bytes (B, W)."""
    parts = hidden, index.int(), weights.float()
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], 1)


def _parted(rows: Tensor, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The reverse, for states like those."""
    state = like.shape[1] * like.element_size()
    choices = (rows.shape[1] - state) // 2
    widths = [state, choices, choices]
    hidden, index, weights = (part.contiguous() for part in rows.split(widths, 1))
    return hidden.view(like.dtype), index.view(torch.int32).long(), weights.view(torch.float32)
