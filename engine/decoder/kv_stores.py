"""Where keys and values are: in memory of their own, or at the end of device memory that otherwise holds rows.

What a device has no room for is in RAM, layer by layer from the last one on: pinned, so that the device reads it over
the link where it is, by the same addresses. A longer chat then moves more layers there.

A layer that sees a window sets memory aside for little more than that. When it is full, the last entries move to its
front. What leaves it goes to RAM, as far as `room_for_past` has room, so that a text can be gone back in: further back,
the whole text is computed again. Kernels are given where the text's first entry would be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...models.errors import FloeError
from ..experts.moe_layer import STREAMED_CHUNK
from ..machine.gpus import pinned
from .kv_cache import Held, KVStore, reaches

BLOCK = 256  # tokens: keys and values grow by whole blocks
GROUP = 8  # layers whose keys and values share a tensor
SLACK = STREAMED_CHUNK  # tokens that may follow at once where layers keep a window
_VERSIONS = itertools.count()


class Room(Protocol):
    """Device memory whose end keys and values may borrow; the rest holds rows, which give way."""

    def vacant(self) -> bool:
        """Whether no live store has borrowed from it."""
        ...

    def let(self, store: KVStore) -> None:
        """This store may borrow from now on; memory lent to others is returned."""
        ...

    def lend(self, nbytes: int) -> None:
        """Lend `nbytes`, instead of those lent before. The content at their end is untouched.

        Raises:
            FloeError: there is not enough.
        """
        ...

    def lent(self) -> Tensor:
        """(nbytes,) uint8, to be requested again in each pass: the memory may have moved."""
        ...


@dataclass(frozen=True, slots=True)
class KvPart:
    """One of several cards: the decoder's layers that it has, torch's name of it, and `KvForm.most` of its memory."""

    layers: range
    device: torch.device
    most: int | None


@dataclass(frozen=True, slots=True)
class KvForm:
    """How keys and values are stored.

    Attributes:
        bits: 16, or 8 (kernels/entries.py). most: bytes of device memory that they may take; None: all that they need.
        parts: of all layers, in their order, where several cards have some each; empty for one.
    """

    bits: int = 16
    most: int | None = None
    parts: tuple[KvPart, ...] = ()


@dataclass(frozen=True, slots=True)
class Layout:
    """What a store holds.

    Attributes:
        entries: of each layer, the shape of a token's entry (`Heads.entry`). window: tokens of the longest chat. most:
            bytes that entries may take on the device; None: all that they need.
        windowed: of each layer, whether its queries see only the last `sees` tokens; empty: none does so. slack: tokens
            that may be added at once to these. past: how many tokens before what they keep stay in RAM.
        states: of each layer that keeps one, how many there are: behind as many of the last tokens.
    """

    entries: tuple[tuple[int, ...], ...]
    window: int
    dtype: torch.dtype
    device: torch.device
    most: int | None = None
    windowed: tuple[bool, ...] = ()
    sees: int = 0
    slack: int = SLACK
    past: int = 0
    states: int = 2

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.entries)

    def is_windowed(self, layer: int) -> bool:
        """Whether it keeps the last tokens alone."""
        return bool(self.windowed) and self.windowed[layer]

    @property
    def kept(self) -> int:
        """Tokens that the layers with the least room have room for, in a long text."""
        return kept(self.sees, self.slack) if any(self.windowed) else self.window

    def room(self, layer: int, capacity: int) -> int:
        """Tokens that a layer has room for in a text of so many."""
        return min(capacity, self.kept) if self.is_windowed(layer) else capacity

    def nbytes(self, layers: int, capacity: int) -> int:
        """Of the entries of the first layers in a text of so many tokens."""
        rooms = (self.room(layer, capacity) * math.prod(self.entries[layer]) for layer in range(layers))
        return self.dtype.itemsize * sum(rooms)

    @property
    def nbytes_windowed(self) -> int:
        """Of a token's entries in the layers that see a window."""
        windowed = [math.prod(entry) for entry, own in zip(self.entries, self.windowed, strict=False) if own]
        return self.dtype.itemsize * sum(windowed)

    def near(self, capacity: int) -> int:
        """How many layers the device has room for, with so many tokens."""
        if self.most is None:
            return self.layers
        return max(count for count in range(self.layers + 1) if self.nbytes(count, capacity) <= self.most)

    def alike(self, layers: range) -> list[range]:
        """Some layers in groups whose entries have one shape, of `GROUP` at most."""
        found: list[range] = []
        for layer in layers:
            last = found[-1] if found else range(0)
            if 0 < len(last) < GROUP and self._form(layer) == self._form(last.start):
                found[-1] = range(last.start, layer + 1)
            else:
                found.append(range(layer, layer + 1))
        return found

    def _form(self, layer: int) -> tuple[object, ...]:
        return self.entries[layer], self.is_windowed(layer)


def room_for_past(ram: int) -> int:
    """Bytes of what has left windows that a chat may have on a machine with so much RAM."""
    return ram // 32


def kept(sees: int, slack: int = SLACK) -> int:
    """Tokens that a layer has room for that sees so many: some before what the next one sees, for a small step back."""
    return sees + BLOCK + slack


@dataclass(frozen=True, slots=True)
class _Past:
    """Entries that have left the layers that see a window, of each (tokens, *entry), from token `first` on, in RAM.
    Never changed, so that copies share them.
    """

    first: int
    entries: list[Tensor]

    @property
    def end(self) -> int:
        """The token behind them."""
        return self.first + len(self.entries[0])

    def part(self, first: int, end: int) -> _Past:
        """Those of tokens first..end-1 that are there."""
        first = max(first, self.first)
        return _Past(first, [one[first - self.first : max(first, end) - self.first] for one in self.entries])

    def alone(self) -> _Past:
        """In memory that nothing else is in."""
        return _Past(self.first, [one.clone() for one in self.entries])


class GrowingStore:
    """Keys and values in memory reserved for more tokens than are there, so that adding a token copies nothing.

    Memory grows by half, in whole blocks, up to the window; by less where layers have to leave the device for it.
    Layers share a tensor in groups: one call then gives the views of a whole group, and only one group is there twice
    while it grows.

    Attributes:
        capacity: tokens that there is room for. length: tokens that are there. first: the first of them whose entries
            are in the layers that see a window.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.capacity = self.length = self.first = 0
        self._past: list[_Past] = []
        self._near: list[Tensor] = self._groups(range(layout.layers), 0)  # of each group, (layers, capacity, *entry)
        self._far: list[Tensor] = []  # of the other layers, in the same form
        self._version = next(_VERSIONS)

    def nbytes(self) -> int:
        """Bytes that are set aside on the device; the past of windows is in RAM, and counts where that computes."""
        past = [one for past in self._past for one in past.entries] if self.layout.device.type == "cpu" else []
        return sum(memory.nbytes for memory in (*self._on_device(), *past))

    def spilled(self) -> int:
        """Bytes that are set aside in RAM, since the device has no room for them."""
        return sum(group.nbytes for group in self._far)

    def spill(self) -> bool:
        """Move half of the layers that are on a device to RAM, since its memory ran out; False if none is there."""
        near = self.layout.near(self.capacity)
        if self.layout.most is None or not near:
            return False
        self.layout = replace(self.layout, most=self.layout.nbytes(near // 2, self.capacity))
        self._move(near // 2, self.capacity)
        self._version = next(_VERSIONS)
        return True

    def keeps(self, length: int) -> int:
        """All of them, or none where a layer does not have what the next token sees."""
        return length if not self.first or reaches(length, self.reach(), self.layout.sees) else 0

    def reach(self) -> int:
        """The first token whose entries all layers have somewhere."""
        return self._past[0].first if self._past else self.first

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, or all where `keeps` says so; their memory stays set aside."""
        self.length = min(self.length, length)
        if self.first:
            self.length = self.keeps(self.length)
            if not reaches(self.length, self.first, self.layout.sees):
                self._go_back()

    def trim(self, length: int) -> None:
        """Layers that a conversation of `length` tokens leaves room for return to the device; other memory stays set
        aside, since what comes next will need about as much.
        """
        wanted = self._blocks(max(length, self.length))
        if wanted < self.capacity and self.layout.near(wanted) > self.layout.near(self.capacity):
            self._resize(wanted)

    def copied(self, most: int) -> Held | None:
        """See `KVStore`."""
        for first in (self.reach(), self.first):
            if 0 < self._copied_bytes(first) <= most:
                return Held(self.entries_copied(first), first=first, sees=self.layout.sees)
        return None

    def fits(self, held: Held, length: int) -> bool:
        """See `KVStore`."""
        return self._fits(held, length) and not held.copies

    def put(self, held: Held, length: int) -> None:
        """See `KVStore`."""
        self.crop(0)
        if length > self.capacity:
            self._resize(self._blocks(self._ahead(length)))
        layout, entries = self.layout, held.entries
        if any(layout.windowed):
            own = _Past(held.first, [one for one, mine in zip(entries, layout.windowed, strict=True) if mine])
            short = length - held.first <= layout.kept
            self.first = held.first if short else length - layout.sees - BLOCK
            self._keep(own.part(max(held.first, self.first - layout.past), self.first))
            windows = iter(own.part(self.first, length).entries)
            entries = [next(windows) if mine else one for one, mine in zip(entries, layout.windowed, strict=True)]
        self._fill(entries, length)
        self.length = length

    def unbroken(self, tokens: int) -> int:
        """How many of so many tokens may be added before `length` is set."""
        return tokens

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all.

        Raises:
            ValueError: more than the window, or more at once than layers that see a window of their own have room for.
            FloeError: more than the device's memory has room for.
        """
        if length > self.layout.window:
            raise ValueError(f"{length} tokens for a window of {self.layout.window}")
        if length > self.capacity:
            self._resize(self._blocks(self._ahead(length)))
        if self.layout.windowed and length - self.first > self.layout.kept:
            self._go_on(length)

    @torch.inference_mode()
    def _go_on(self, length: int) -> None:
        """Keep the last entries of windows at the front, so that tokens up to `length` follow them."""
        first = max(0, self.length - self.layout.sees - BLOCK)
        if length - first > self.layout.kept:
            raise ValueError(f"{length - self.length} tokens at once for layers that take {self.layout.slack}")
        gone, left = first - self.first, self.length - first
        windows = self._windows()
        if self.layout.past:
            self._keep(_Past(self.first, [layer[:gone].to("cpu", copy=True) for layer in windows]))
        for layer in windows:
            for start in range(0, left, gone):  # in pieces that do not overlap; nothing that could fail
                part = layer[start + gone : min(start + 2 * gone, left + gone)]
                layer[start : start + len(part)] = part
        self.first, self._version = first, next(_VERSIONS)
        least = first - self.layout.past
        self._past = [
            one if one.first >= least else one.part(least, first).alone() for one in self._past if one.end > least
        ]

    @torch.inference_mode()
    def _go_back(self) -> None:
        """Bring back what is before the entries of windows."""
        first = max(self.reach(), self.length - self.layout.sees - BLOCK) if self.length else 0
        for layer, entries in zip(self._windows(), self._windows_copied(first), strict=True):
            layer[: len(entries)] = entries
        self._past = [one.part(0, first) for one in self._past if one.first < first]
        self.first, self._version = first, next(_VERSIONS)

    def _keep(self, past: _Past) -> None:
        """Behind what is there."""
        if past.first < past.end:
            self._past.append(past)

    def layers(self) -> list[Tensor]:
        """For each layer, all that is set aside, (tokens, *entry), from the first token on or what `firsts` says."""
        return self._entries()

    def firsts(self) -> list[int]:
        """For each layer, the token that its first entry is of; empty where all begin with the first."""
        return [self._first_of(layer) for layer in range(self.layout.layers)] if self.first else []

    def addresses(self) -> list[int]:
        """For each layer, where its entry of the first token is, or would be."""
        layers = self.layers()
        firsts = self.firsts() or [0] * len(layers)
        return [
            one.data_ptr() - first * one.stride(0) * one.itemsize for one, first in zip(layers, firsts, strict=True)
        ]

    def version(self) -> tuple[int, int]:
        """Another one, among all stores, whenever `layers` are at other addresses."""
        return self._version, 0

    def places(self, end: int) -> list[Tensor]:
        """For each layer, where the entries of tokens length..end-1 go, (end - length, *entry)."""
        added = end - self.length
        return [
            place
            for group, first in self._groups_from()
            for place in group.narrow(1, self.length - first, added).unbind(0)
        ]

    def seen(self, start: int, end: int) -> list[Tensor]:
        """Group by group of layers, the entries of tokens start..end-1, (layers, end - start, *entry); of layers that
        see a window, as far as they are there.
        """
        return [
            group.narrow(1, max(start, first) - first, end - max(start, first)) for group, first in self._groups_from()
        ]

    def _groups_from(self) -> list[tuple[Tensor, int]]:
        """Each group, and the token that its first entries are of."""
        groups = self._all()
        starts = itertools.accumulate(map(len, groups[:-1]), initial=0)
        return list(zip(groups, map(self._first_of, starts), strict=False))

    def _first_of(self, layer: int) -> int:
        """The token that its first entry is of."""
        return self.first if self.layout.is_windowed(layer) else 0

    def _entries(self) -> list[Tensor]:
        return [layer for group in self._all() for layer in group.unbind(0)]

    def _windows(self) -> list[Tensor]:
        """Of the layers that see a window, what is set aside."""
        return [layer for number, layer in enumerate(self._entries()) if self.layout.is_windowed(number)]

    def _windows_copied(self, first: int) -> list[Tensor]:
        """Of these layers, the entries of all tokens from `first` on, in RAM."""
        past = [part.entries for one in self._past if one.end > first for part in [one.part(first, self.length)]]
        own = max(0, first - self.first), max(0, self.length - self.first)
        return [
            torch.cat([*(one[number] for one in past), layer[own[0] : own[1]].cpu()])
            for number, layer in enumerate(self._windows())
        ]

    def entries_copied(self, first: int) -> list[Tensor]:
        """Layer by layer, (length, *entry), in RAM; of layers with a window from `first` on."""
        windows = iter(self._windows_copied(first))
        return [
            next(windows) if self.layout.is_windowed(number) else layer[: self.length].to("cpu", copy=True)
            for number, layer in enumerate(self._entries())
        ]

    def _copied_bytes(self, first: int) -> int:
        """Of such a copy."""
        layout = self.layout
        tokens = [self.length - (first if layout.is_windowed(layer) else 0) for layer in range(layout.layers)]
        return layout.dtype.itemsize * sum(
            count * math.prod(entry) for count, entry in zip(tokens, layout.entries, strict=True)
        )

    def _fits(self, held: Held, length: int) -> bool:
        layout = self.layout
        if len(held.entries) != layout.layers or held.sees != layout.sees or held.keeps(length) != length:
            return False
        firsts = [held.first if layout.is_windowed(layer) else 0 for layer in range(layout.layers)]
        return all(
            one.shape[1:] == entry and one.dtype == layout.dtype and len(one) >= length - first
            for one, entry, first in zip(held.entries, layout.entries, firsts, strict=True)
        )

    def _fill(self, entries: Sequence[Tensor], length: int) -> None:
        """There is room. Those of layers that see a window begin where these do."""
        for number, (mine, layer) in enumerate(zip(self._entries(), entries, strict=True)):
            count = length - self._first_of(number)
            mine[:count] = layer[:count]

    def _all(self) -> list[Tensor]:
        return [*self._on_device(), *self._far]

    def _on_device(self) -> list[Tensor]:
        return self._near

    def _blocks(self, length: int) -> int:
        """Tokens of the blocks that hold `length`."""
        return min(self.layout.window, -(-length // BLOCK) * BLOCK)

    def _ahead(self, length: int) -> int:
        """Tokens to make room for when there is none for `length`: the fewer, the more layers stay."""
        longer = max(length, self.capacity * 3 // 2)
        return longer if self.layout.near(longer) == self.layout.layers else max(length, self.capacity * 9 // 8)

    def _resize(self, capacity: int) -> None:
        before, after = self.layout.near(self.capacity), self.layout.near(capacity)
        if not (before == after == self.layout.layers and self._grown(capacity)):
            self._move(after, capacity)
        self.capacity, self._version = capacity, next(_VERSIONS)

    def _grown(self, capacity: int) -> bool:
        """Whether there was as much memory as was promised; if not, what is there is as it was."""
        try:
            self._grow(capacity)
        except (torch.OutOfMemoryError, FloeError):
            return False
        return True

    def _grow(self, capacity: int) -> None:
        """All layers are on the device, and stay there."""
        for index, group in enumerate(self.layout.alike(range(self.layout.layers))):
            old, room = self._near[index], self.layout.room(group.start, capacity)
            if room == old.shape[1]:
                continue
            count = self.length - self._first_of(group.start)
            self._near[index] = old.new_empty(old.shape[0], room, *old.shape[2:])
            self._near[index][:, :count] = old[:, :count]
            del old  # otherwise the last group would exist twice even after its growth

    def _move(self, near: int, capacity: int) -> None:
        """From now on so many layers are on the device. All go through RAM, so that nothing is there twice."""
        saved = self.entries_copied(self.first)
        self._far = []
        while near and not self._allotted(near, capacity):
            near -= 1
            self.layout = replace(self.layout, most=self.layout.nbytes(near, capacity))
        if not near:
            self._allot(0, capacity)
        self._far = self._groups(range(near, self.layout.layers), capacity, in_ram=True)
        self.capacity = capacity
        self._fill(saved, self.length)

    def _allotted(self, near: int, capacity: int) -> bool:
        """Whether there was as much memory as was promised."""
        try:
            self._allot(near, capacity)
        except (torch.OutOfMemoryError, FloeError):
            return False
        return True

    def _allot(self, near: int, capacity: int) -> None:
        """Memory of the device for so many layers, instead of the present one."""
        self._near = []
        self._near = self._groups(range(near), capacity)

    def _groups(self, layers: range, capacity: int, *, in_ram: bool = False) -> list[Tensor]:
        device = torch.device("cpu") if in_ram else self.layout.device
        made = pinned if in_ram and self.layout.device.type == "cuda" else torch.empty
        return [
            made(
                (len(group), self.layout.room(group.start, capacity), *self.layout.entries[group.start]),
                dtype=self.layout.dtype,
                device=device,
            )
            for group in self.layout.alike(layers)
        ]


class BorrowingStore(GrowingStore):
    """Keys and values at the end of device memory that otherwise holds rows, in whole blocks.

    Nothing exists twice: as the memory grows downwards, layers move one by one to their new places.
    """

    def __init__(self, layout: Layout, room: Room) -> None:
        super().__init__(layout)
        self._near, self._room = [], room
        room.let(self)

    def spill(self) -> bool:
        """Its memory is the pool's, which makes room by itself."""
        return False

    def trim(self, length: int) -> None:
        """Give back the blocks that a conversation of `length` tokens does not need."""
        wanted = self._blocks(max(length, self.length))
        if wanted < self.capacity:
            self._resize(wanted)

    def version(self) -> tuple[int, int]:
        """See `GrowingStore`; the memory moves when rows give way to something else."""
        return self._version, self._room.lent().data_ptr()

    def _ahead(self, length: int) -> int:
        return length  # the rows give way before anything is written

    def _on_device(self) -> list[Tensor]:
        return self._part(self._room.lent(), self.layout.near(self.capacity), self.capacity)

    def _part(self, memory: Tensor, layers: int, capacity: int) -> list[Tensor]:
        """Of each group, (layers, capacity, *entry), which end where `memory` does."""
        layout = self.layout
        groups, whole = layout.alike(range(layers)), layout.nbytes(layers, capacity)
        ends = [layout.nbytes(group.stop, capacity) for group in groups]
        mine = memory[memory.numel() - whole :].tensor_split(ends[:-1])
        return [
            part.view(layout.dtype).view(len(group), layout.room(group.start, capacity), *layout.entries[group.start])
            for part, group in zip(mine, groups, strict=False)
        ]

    def _allot(self, near: int, capacity: int) -> None:
        self._room.lend(self.layout.nbytes(near, capacity))

    def _grow(self, capacity: int) -> None:
        before, layers = self.capacity, self.layout.layers
        if capacity > before:
            self._room.lend(self.layout.nbytes(layers, capacity))
        memory = self._room.lent()
        both = (self._part(memory, layers, tokens) for tokens in (before, capacity))
        old, new = ([layer for group in part for layer in group.unbind(0)] for part in both)
        # Moving down, the lowest goes first, moving up, the highest, in pieces as long as the distance.
        for layer in range(layers) if capacity > before else reversed(range(layers)):
            was, far = (self.layout.nbytes(layers, n) - self.layout.nbytes(layer, n) for n in (before, capacity))
            if was in (0, far):  # empty, or it stays
                continue
            way, count = abs(far - was) // old[layer][0].nbytes, self.length - self._first_of(layer)
            starts = range(0, count, max(1, way))
            for start in starts if capacity > before else reversed(starts):
                part = old[layer][start : min(start + max(1, way), count)]
                new[layer][start : start + len(part)] = part if way else part.clone()
        if capacity < before:
            self._room.lend(self.layout.nbytes(layers, capacity))
