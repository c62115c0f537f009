"""Keys and values of the layers that attend, and states of the layers that keep one instead, which cannot be cut.

A state is there twice or more: the one before a token is at its position modulo that number, so a pass that breaks off
has lost nothing, and of one of several tokens the first ones may be kept.
To go back further there are copies: where turns begin and end, and every `EVERY` tokens, the fewer the longer ago.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.mixers.delta import CHUNK
from ..machine.hardware import ram
from .kv_cache import Held, StateCopy
from .kv_stores import GrowingStore, Layout

EVERY = CHUNK
"""Tokens between two copies of the newest part of a text: a prompt's pass has the states there."""

_FEWEST = 4  # copies, however large they are
_TURN = 4000  # a text is gone back in to an end of a turn as likely as to one of so many other tokens


def room_for_copies(ram: int) -> int:
    """Bytes of copies that a chat may have on a machine with so much RAM."""
    return min(1 << 30, ram // 32)


def copies_of(state: int, room: int) -> int:
    """How many copies of states of so many bytes there may be."""
    return max(_FEWEST, room // max(1, state))


class StatefulStore(GrowingStore):
    """See the module.

    Args:
        layout: of the layers that attend. sizes: of each layer, how many numbers its state has; 0 for one that attends.
            copies: bytes that these may take; None: what this machine has room for.

    Attributes:
        turns: where turns of a prompt that is being read end: likely places to go back to.
    """

    def __init__(self, layout: Layout, sizes: Sequence[int], copies: int | None = None) -> None:
        self._length, self._reading, self._copies = 0, False, list[StateCopy]()
        self.turns: Sequence[int] = ()
        self._next, self._along = dict[int, Tensor](), list[StateCopy]()  # of the running pass
        self._states = {
            layer: torch.zeros(layout.states, size, device=layout.device) for layer, size in enumerate(sizes) if size
        }
        self._number = {layer: number for number, layer in enumerate(self._states)}
        super().__init__(layout)
        self._each = sum(state[0].nbytes for state in self._states.values())
        self._most = copies_of(self._each, room_for_copies(ram()[0]) if copies is None else copies)

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens that are there, with their states."""
        return self._length

    @length.setter
    def length(self, tokens: int) -> None:
        for layer, state in self._next.items():
            self._states[layer][tokens % len(self._states[layer])] = state
        read = bool(self._next) and tokens > self._length + 1  # a part of a prompt
        if self._reading and not read:  # from here answers are drawn again, or follow without thinking
            self._copies[-2:] = [replace(copy, turn=True) for copy in self._copies[-2:]]
        if tokens < self._length:  # the last ones are taken back
            self._copies = [copy for copy in self._copies if copy.length <= tokens]
        self._copies += self._along
        self._length, self._reading = tokens, read
        self._broken()
        if read or tokens >= self._newest() + EVERY:
            self._copy()

    def state(self, layer: int) -> Tensor:
        """(numbers,) before the next token."""
        return self._states[layer][self._length % len(self._states[layer])]

    def next_state(self, layer: int, state: Tensor) -> None:
        """What it is once `length` says that a pass has been through all layers."""
        self._next[layer] = state

    def begin(self, tokens: int) -> None:
        """A pass of so many tokens begins; see `along`."""
        self._broken()
        if tokens == 1:
            return
        start, end = self._length, self._length + tokens
        before = {turn - (turn - start) % EVERY for turn in self.turns if start <= turn < end}
        if start and (start in before or not self._reading):
            self._copy(turn=True)
        some = [StateCopy(place, [], turn=place in before) for place in range(start + EVERY, end, EVERY)]
        self._copies = thinned([*self._copies, *some, StateCopy(end, [])], self._most)[:-1]
        self._along = [copy for copy in self._copies if copy.length > self._length]
        del self._copies[len(self._copies) - len(self._along) :]
        for copy in self._along:
            copy.states.extend(torch.empty(state.shape[1]) for state in self._states.values())

    def along(self, layer: int) -> Mapping[int, Tensor]:
        """Where a pass puts the state (numbers,) behind so many of its tokens, all multiples of `EVERY`."""
        return {copy.length - self._length: copy.states[self._number[layer]] for copy in self._along}

    def unbroken(self, tokens: int) -> int:
        """See `GrowingStore`: up to the next copy."""
        return min(tokens, max(1, self._newest() + EVERY - self._length))

    def nbytes(self) -> int:
        """See `GrowingStore`; copies are in RAM, and count where that computes."""
        copies = len(self._copies) if self.layout.device.type == "cpu" else 0
        return super().nbytes() + (self.layout.states + copies) * self._each

    def keeps(self, length: int) -> int:
        """All that is asked for if it is all that is there; else what a copy is there of."""
        if length >= self._length:
            return self._length
        return max((copy.length for copy in self._copies if copy.length <= length), default=0)

    @torch.inference_mode()
    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, or more: those behind the newest copy before."""
        self._broken()
        if length < self._length:
            self._go_to(self.keeps(length))

    @torch.inference_mode()
    def copied(self, most: int) -> Held | None:
        """See `KVStore`; with as many copies of states as there is room for."""
        room = most - self.layout.nbytes(self.layout.layers, self._length)
        if not self._length or room < self._each:
            return None
        self._copy()
        return Held(self.entries_copied(0), thinned(self._copies, room // max(1, self._each)))

    def fits(self, held: Held, length: int) -> bool:
        """See `KVStore`."""
        sizes = [state.shape[1:] for state in self._states.values()]
        there = any(copy.length == length for copy in held.copies)
        same = all([state.shape for state in copy.states] == sizes for copy in held.copies)
        return there and same and self._fits(held, length)

    @torch.inference_mode()
    def put(self, held: Held, length: int) -> None:
        """See `KVStore`."""
        self._broken()
        self._go_to(0)
        self.reserve(length)
        self._fill(held.entries, length)
        self._copies = thinned([copy for copy in held.copies if copy.length <= length], self._most)
        self._go_to(length)

    def layers(self) -> list[Tensor]:
        """For each layer, what is set aside: (capacity, *entry), or states (N, numbers)."""
        attended = iter(super().layers())
        return [
            self._states[layer] if layer in self._states else next(attended)
            for layer in range(self.layout.layers + len(self._states))
        ]

    def _broken(self) -> None:
        """No pass is running."""
        self._next.clear()
        self._along = []

    def _newest(self) -> int:
        return self._copies[-1].length if self._copies else 0

    def _go_to(self, length: int) -> None:
        """To the beginning, or where a copy is."""
        self._copies = [copy for copy in self._copies if copy.length <= length]
        for number, own in enumerate(self._states.values()):
            own[length % len(own)] = self._copies[-1].states[number] if length else 0
        self._length, self._reading = length, False

    def _copy(self, *, turn: bool = False) -> None:
        """Of what is there now, unless there is one. turn: see `StateCopy`."""
        if self._newest() < self._length:
            states = [state[self._length % len(state)].to("cpu", copy=True) for state in self._states.values()]
            self._copies = thinned([*self._copies, StateCopy(self._length, states)], self._most)
        if turn:
            self._copies[-1] = replace(self._copies[-1], turn=True)


def thinned(copies: Sequence[StateCopy], most: int) -> list[StateCopy]:
    """At most so many, the last two among them: without those whose absence costs fewest tokens, by how likely a text
    is gone back in so far.
    """
    kept = list(copies)
    while len(kept) > most:
        ends = [0, *(copy.length for copy in kept)]
        cost = [
            (own - before) * (after - own + (_TURN if copy.turn else 0)) / (ends[-1] - own)
            for before, own, after, copy in zip(ends, ends[1:], ends[2:], kept, strict=False)
        ][: max(1, len(kept) - 2)]
        del kept[cost.index(min(cost))]
    return kept
