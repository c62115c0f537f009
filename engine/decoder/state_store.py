"""Keys and values of the layers that attend, and states of the layers that keep one instead, which cannot be cut.

A state is there twice: the one before a token is at its position modulo 2, so a pass that breaks off has lost nothing.
To go back further there are copies, every `EVERY` tokens and where a prompt ends, the fewer the longer ago.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .kv_stores import GrowingStore, Layout

EVERY = 64
"""Tokens between two copies of the newest part of a text."""

_MEMORY, _FEWEST = 1 << 30, 4  # bytes of copies, and how many there may be however large they are


@dataclass(frozen=True, slots=True)
class _Copy:
    """The states behind the first `length` tokens, in RAM."""

    length: int
    states: list[Tensor]


class StatefulStore(GrowingStore):
    """See the module.

    Args:
        layout: as if all layers attended. sizes: of each layer, how many numbers its state has; 0 for one that attends.
    """

    def __init__(self, layout: Layout, sizes: Sequence[int]) -> None:
        self._length, self._next, self._copies = 0, dict[int, Tensor](), list[_Copy]()
        self._states = {layer: torch.zeros(2, size, device=layout.device) for layer, size in enumerate(sizes) if size}
        super().__init__(replace(layout, layers=len(sizes) - len(self._states)))
        each = sum(state[0].nbytes for state in self._states.values())
        self._most = max(_FEWEST, _MEMORY // max(1, each))

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens that are there, with their states."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        for layer, state in self._next.items():
            self._states[layer][tokens % 2] = state
        read, self._length = bool(self._next) and tokens > self._length + 1, tokens  # a part of a prompt
        self._next.clear()
        newest = self._copies[-1].length if self._copies else 0
        if tokens >= newest + EVERY or (read and tokens > newest):
            self._copy()

    def state(self, layer: int) -> Tensor:
        """(numbers,) before the next token."""
        return self._states[layer][self._length % 2]

    def next_state(self, layer: int, state: Tensor) -> None:
        """What it is once `length` says that a pass has been through all layers."""
        self._next[layer] = state

    def nbytes(self) -> int:
        """See `GrowingStore`; copies are in RAM, and count where that computes."""
        copies = [state for copy in self._copies for state in copy.states] if self.layout.device.type == "cpu" else []
        return super().nbytes() + sum(state.nbytes for state in (*self._states.values(), *copies))

    def keeps(self, length: int) -> int:
        """All that is asked for if it is all that is there; else what a copy is there of."""
        if length >= self._length:
            return self._length
        return max((copy.length for copy in self._copies if copy.length <= length), default=0)

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, or more: those behind the newest copy before."""
        self._next.clear()
        if length >= self._length:
            return
        kept = self.keeps(length)
        self._copies = [copy for copy in self._copies if copy.length <= kept]
        for layer, own in enumerate(self._states.values()):
            own[kept % 2] = self._copies[-1].states[layer] if kept else 0
        self._length = kept

    def copied(self) -> list[Tensor]:
        """Nothing: states are those of the last token alone."""
        return []

    def put(self, entries: Sequence[Tensor], length: int) -> None:
        """There are no copies."""
        raise ValueError("a text with states takes no copies")

    def layers(self) -> list[Tensor]:
        """For each layer, what is set aside: (capacity, *entry), or both states (2, numbers)."""
        attended = iter(super().layers())
        return [
            self._states[layer] if layer in self._states else next(attended)
            for layer in range(self.layout.layers + len(self._states))
        ]

    def _copy(self) -> None:
        states = [state[self._length % 2].to("cpu", copy=True) for state in self._states.values()]
        self._copies.append(_Copy(self._length, states))
        if len(self._copies) > self._most:  # the one whose absence costs least of what it takes to come that far back
            ends = [copy.length for copy in self._copies]
            gap = {at: (ends[at + 1] - ends[at - 1]) / (ends[-1] - ends[at - 1]) for at in range(1, len(ends) - 1)}
            del self._copies[min(gap, key=gap.__getitem__)]
