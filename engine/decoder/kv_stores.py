"""Where keys and values are: in memory of their own, or at the end of device memory that otherwise holds rows.

What a device has no room for is in RAM, layer by layer from the last one on: pinned, so that the device reads it over
the link where it is, by the same addresses. A longer chat then moves more layers there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .kv_cache import Held, KVStore

BLOCK = 256  # tokens: keys and values grow by whole blocks
GROUP = 8  # layers whose keys and values share a tensor
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
    """

    entries: tuple[tuple[int, ...], ...]
    window: int
    dtype: torch.dtype
    device: torch.device
    most: int | None = None

    @property
    def layers(self) -> int:
        """How many."""
        return len(self.entries)

    def nbytes(self, layers: int, capacity: int) -> int:
        """Of the entries of the first layers and so many tokens."""
        return capacity * self.dtype.itemsize * sum(map(math.prod, self.entries[:layers]))

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
            if 0 < len(last) < GROUP and self.entries[layer] == self.entries[last.start]:
                found[-1] = range(last.start, layer + 1)
            else:
                found.append(range(layer, layer + 1))
        return found


class GrowingStore:
    """Keys and values in memory reserved for more tokens than are there, so that adding a token copies nothing.

    Memory grows by half, in whole blocks, up to the window; by less where layers have to leave the device for it.
    Layers share a tensor in groups: one call then gives the views of a whole group, and only one group is there twice
    while it grows.

    Attributes:
        capacity: tokens that there is room for. length: tokens that are there.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.capacity = self.length = 0
        self._near: list[Tensor] = self._groups(range(layout.layers), 0)  # of each group, (layers, capacity, *entry)
        self._far: list[Tensor] = []  # of the other layers, in the same form
        self._version = next(_VERSIONS)

    def nbytes(self) -> int:
        """Bytes that are set aside on the device."""
        return sum(group.nbytes for group in self._on_device())

    def spilled(self) -> int:
        """Bytes that are set aside in RAM, since the device has no room for them."""
        return sum(group.nbytes for group in self._far)

    def keeps(self, length: int) -> int:
        """All of them."""
        return length

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; their memory stays set aside."""
        self.length = min(self.length, length)

    def trim(self, length: int) -> None:
        """Layers that a conversation of `length` tokens leaves room for return to the device; other memory stays set
        aside, since what comes next will need about as much.
        """
        wanted = self._blocks(max(length, self.length))
        if wanted < self.capacity and self.layout.near(wanted) > self.layout.near(self.capacity):
            self._resize(wanted)

    def copied(self, most: int) -> Held | None:
        """See `KVStore`."""
        fits = self.length > 0 and self.layout.nbytes(self.layout.layers, self.length) <= most
        return Held(self._entries_copied()) if fits else None

    def fits(self, held: Held, length: int) -> bool:
        """See `KVStore`."""
        return self._fits(held.entries, length) and not held.copies

    def put(self, held: Held, length: int) -> None:
        """See `KVStore`."""
        self.crop(0)
        self.reserve(length)
        self._fill(held.entries, length)
        self.length = length

    def unbroken(self, tokens: int) -> int:
        """How many of so many tokens may be added before `length` is set."""
        return tokens

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all.

        Raises:
            ValueError: more than the window. FloeError: more than the device's memory has room for.
        """
        if length > self.layout.window:
            raise ValueError(f"{length} tokens for a window of {self.layout.window}")
        if length > self.capacity:
            self._resize(self._blocks(self._ahead(length)))

    def layers(self) -> list[Tensor]:
        """For each layer, all that is set aside, (capacity, *entry)."""
        return self._entries()

    def version(self) -> tuple[int, int]:
        """Another one, among all stores, whenever `layers` are at other addresses."""
        return self._version, 0

    def places(self, end: int) -> list[Tensor]:
        """For each layer, where the entries of tokens length..end-1 go, (end - length, *entry)."""
        added = end - self.length
        return [place for group in self._all() for place in group.narrow(1, self.length, added).unbind(0)]

    def seen(self, start: int, end: int) -> list[Tensor]:
        """Group by group of layers, the entries of tokens start..end-1, (layers, end - start, *entry)."""
        return [group.narrow(1, start, end - start) for group in self._all()]

    def _entries(self) -> list[Tensor]:
        return [layer for group in self._all() for layer in group.unbind(0)]

    def _entries_copied(self) -> list[Tensor]:
        """Layer by layer, (length, *entry), in RAM."""
        return [layer[: self.length].to("cpu", copy=True) for layer in self._entries()]

    def _fits(self, entries: Sequence[Tensor], length: int) -> bool:
        layout = self.layout
        return len(entries) == layout.layers and all(
            one.shape[1:] == entry and one.dtype == layout.dtype and len(one) >= length
            for one, entry in zip(entries, layout.entries, strict=True)
        )

    def _fill(self, entries: Sequence[Tensor], length: int) -> None:
        """There is room."""
        for mine, layer in zip(self._entries(), entries, strict=True):
            mine[:length] = layer[:length]

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
        if before == after == self.layout.layers:
            self._grow(capacity)
        else:
            self._move(after, capacity)
        self.capacity, self._version = capacity, next(_VERSIONS)

    def _grow(self, capacity: int) -> None:
        """All layers are on the device, and stay there."""
        for index, old in enumerate(self._near):
            self._near[index] = old.new_empty(old.shape[0], capacity, *old.shape[2:])
            self._near[index][:, : self.length] = old[:, : self.length]
            del old  # otherwise the last group would exist twice even after its growth

    def _move(self, near: int, capacity: int) -> None:
        """From now on so many layers are on the device. All go through RAM, so that nothing is there twice."""
        saved = self._entries_copied()
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
        except torch.OutOfMemoryError:
            return False
        return True

    def _allot(self, near: int, capacity: int) -> None:
        """Memory of the device for so many layers, instead of the present one."""
        self._near = []
        self._near = self._groups(range(near), capacity)

    def _groups(self, layers: range, capacity: int, *, in_ram: bool = False) -> list[Tensor]:
        device = torch.device("cpu") if in_ram else self.layout.device
        how: Any = {"dtype": self.layout.dtype, "device": device}
        how["pin_memory"] = in_ram and self.layout.device.type == "cuda"
        alike = self.layout.alike(layers)
        return [torch.empty(len(group), capacity, *self.layout.entries[group.start], **how) for group in alike]


class BorrowingStore(GrowingStore):
    """Keys and values at the end of device memory that otherwise holds rows, in whole blocks.

    Nothing exists twice: as the memory grows downwards, layers move one by one to their new places.
    """

    def __init__(self, layout: Layout, room: Room) -> None:
        super().__init__(layout)
        self._near, self._room = [], room
        room.let(self)

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
            part.view(layout.dtype).view(len(group), capacity, *layout.entries[group.start])
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
            far, near = (self.layout.nbytes(first, 1) for first in (layer, layer + 1))
            way = (self.layout.nbytes(layers, 1) - far) * abs(capacity - before) // (near - far)
            starts = range(0, min(self.length, capacity), way)
            for start in starts if capacity > before else reversed(starts):
                end = min(start + way, self.length)
                new[layer][start:end] = old[layer][start:end]
        if capacity < before:
            self._room.lend(self.layout.nbytes(layers, capacity))
