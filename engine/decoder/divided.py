"""Layers that several cards have some of each: their keys and values, and a pass that crosses from card to card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.step import Stepped
from .kv_cache import Held
from .kv_stores import BorrowingStore, GrowingStore, KvPart, Layout, Room
from .state_store import StatefulStore


class DividedStore(GrowingStore):
    """Keys and values of all layers, each with the card that computes it: a store for each card.

    Args:
        layout: of all layers. parts: of the cards. rooms: from which each of them may borrow; None: memory of its own.
    """

    def __init__(self, layout: Layout, parts: Sequence[KvPart], rooms: Sequence[Room | None]) -> None:
        self.parts = [_store(_among(layout, part), room) for part, room in zip(parts, rooms, strict=True)]
        super().__init__(replace(layout, entries=()))
        self.layout = layout

    @property
    def length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens that are there."""
        return min(part.length for part in self.parts) if self.parts else 0

    @length.setter
    def length(self, tokens: int) -> None:
        for part in self.parts:
            part.length = tokens

    @property
    def capacity(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens that all cards have room for."""
        return min(part.capacity for part in self.parts)

    @capacity.setter
    def capacity(self, tokens: int) -> None:
        assert not tokens, "each part reserves for itself"

    @property
    def first(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `GrowingStore`; the same for all that have such layers."""
        return max(part.first for part in self.parts)

    @first.setter
    def first(self, token: int) -> None:
        assert not token, "each part moves its own"

    def reach(self) -> int:
        """See `GrowingStore`."""
        return max(part.reach() for part in self.parts)

    def nbytes(self) -> int:
        """See `GrowingStore`."""
        return sum(part.nbytes() for part in self.parts)

    def spilled(self) -> int:
        """See `GrowingStore`."""
        return sum(part.spilled() for part in self.parts)

    def spill(self) -> bool:
        """See `GrowingStore`."""
        moved = [part.spill() for part in self.parts]
        return any(moved)

    def crop(self, length: int) -> None:
        """See `GrowingStore`."""
        kept = self.keeps(min(self.length, length))
        for part in self.parts:
            part.crop(kept)

    def trim(self, length: int) -> None:
        """See `GrowingStore`."""
        for part in self.parts:
            part.trim(length)

    def fits(self, held: Held, length: int) -> bool:
        """See `KVStore`."""
        return not held.copies and all(part.fits(own, length) for part, own in self._parts_of(held))

    def put(self, held: Held, length: int) -> None:
        """See `KVStore`."""
        for part, own in self._parts_of(held):
            part.put(own, length)

    def _parts_of(self, held: Held) -> list[tuple[GrowingStore, Held]]:
        """Each part with its layers; the last one with all that are left."""
        entries, found = list(held.entries), list[tuple[GrowingStore, Held]]()
        for part in self.parts[:-1]:
            found.append((part, replace(held, entries=entries[: part.layout.layers])))
            del entries[: part.layout.layers]
        return [*found, (self.parts[-1], replace(held, entries=entries))]

    def reserve(self, length: int) -> None:
        """See `GrowingStore`."""
        for part in self.parts:
            part.reserve(length)

    def layers(self) -> list[Tensor]:
        """See `GrowingStore`."""
        return [layer for part in self.parts for layer in part.layers()]

    def version(self) -> tuple[int, int]:
        """See `GrowingStore`."""
        versions = [part.version() for part in self.parts]
        return max(version for version, _ in versions), hash(tuple(versions))

    def places(self, end: int) -> list[Tensor]:
        """See `GrowingStore`."""
        return [place for part in self.parts for place in part.places(end)]

    def seen(self, start: int, end: int) -> list[Tensor]:
        """See `GrowingStore`."""
        return [group for part in self.parts for group in part.seen(start, end)]

    def entries_copied(self, first: int) -> list[Tensor]:
        """See `GrowingStore`."""
        return [layer for part in self.parts for layer in part.entries_copied(first)]


def made_store(
    layout: Layout,
    parts: Sequence[KvPart],
    rooms: Sequence[Room | None],
    states: Sequence[int] = (),
    copies: int | None = None,
) -> GrowingStore:
    """A conversation's store, on one card or divided; parts, rooms: as for `DividedStore`, without parts of one.

    states, copies: as for `StatefulStore`; empty: all layers attend.
    """
    if any(states):
        return StatefulStore(layout, states, copies)
    return DividedStore(layout, parts, rooms) if parts else _store(layout, rooms[0])


def _among(layout: Layout, part: KvPart) -> Layout:
    own = slice(part.layers.start, part.layers.stop)
    entries, windowed = layout.entries[own], layout.windowed[own]
    return replace(layout, entries=entries, windowed=windowed, device=part.device, most=part.most)


def _store(layout: Layout, room: Room | None) -> GrowingStore:
    return GrowingStore(layout) if room is None or not room.vacant() else BorrowingStore(layout, room)


class StepOfLayer(Protocol):
    """A pass through some layers, which it counts from 0."""

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """See `TorchPass.step`."""
        ...


class DividedPass:
    """A pass through all layers, that of each card on its own.

    Args:
        made: the pass of a part: its layers, its store, and its device.
    """

    def __init__(
        self,
        store: DividedStore,
        parts: Sequence[KvPart],
        made: Callable[[range, GrowingStore, torch.device], StepOfLayer],
    ) -> None:
        self._of = [(part, number) for number, part in enumerate(parts) for _ in part.layers]
        self._passes = [made(part.layers, own, part.device) for part, own in zip(parts, store.parts, strict=True)]

    def step(self, index: int, x: Tensor, added: Tensor | None) -> Stepped:
        """Layer `index` before its block, on its own card; x and added come from wherever they are."""
        part, number = self._of[index]
        x, added = x.to(part.device), None if added is None else added.to(part.device)
        return self._passes[number].step(index - part.layers.start, x, added)
