"""Keys and values of one conversation: what was computed, for which tokens, and how much of it the next prompt reuses.

A turn's prompt begins with the turns before it, so only what is new has to be computed. An edited message, a branch
or another conversation keeps the common beginning.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ...kernels.rule import Rule
from ..quality_presets import Preset

BLOCK = 256  # tokens: keys and values grow by whole blocks
GROUP = 8  # layers whose keys and values share a tensor
_VERSIONS = itertools.count()
S = TypeVar("S", bound="KVStore")


class KVStore(Protocol):
    """The storage of keys and values, in the form of the code that computes them."""

    def nbytes(self) -> int:
        """Bytes in use."""
        ...

    def crop(self, length: int) -> None:
        """Drop all but the first `length` tokens, also those of a pass that was interrupted between two layers."""
        ...

    def trim(self, length: int) -> None:
        """Return memory that a conversation of `length` tokens does not need, if something else can use it."""
        ...


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


class KVCache:
    """One sequence: its token ids, and their keys and values.

    Only tokens that every layer has computed count, so that a cancelled or failed pass leaves the rest valid.
    """

    def __init__(self) -> None:
        self.store: KVStore | None = None
        self._tokens: list[int] = []
        self._presets: list[Preset] = []

    @property
    def length(self) -> int:
        """The number of tokens with keys and values."""
        return len(self._tokens)

    @property
    def cache(self) -> Any:
        """transformers' own cache, for calls of its model that `generate` does not make."""
        return self.store_of(LibraryStore, LibraryStore).cache

    def store_of(self, kind: type[S], make: Callable[[], S]) -> S:
        """The store, made by `make` if there is none yet.

        Raises:
            TypeError: the store has another type, so it belongs to another model.
        """
        if self.store is None:
            self.store = make()
        if not isinstance(self.store, kind):
            raise TypeError(f"keys and values are in a {type(self.store).__name__}, not in a {kind.__name__}")
        return self.store

    def nbytes(self) -> int:
        """Bytes that the keys and values take, with what is set aside for the tokens to come."""
        return self.store.nbytes() if self.store is not None else 0

    def keep(self, prompt: Sequence[int], preset: Preset) -> int:
        """Keep the part of `prompt` that is there already and drop the rest; returns its number of tokens.

        Never all of the prompt: its last token is computed for its logits. What a coarser preset computed is dropped,
        so that an answer has the quality of its own preset.
        """
        kept = 0
        for token, mine, computed in zip(prompt[:-1], self._tokens, self._presets, strict=False):
            if token != mine or not _covers(computed, preset):
                break
            kept += 1
        del self._tokens[kept:], self._presets[kept:]
        if self.store is not None:
            self.store.crop(kept)
            self.store.trim(len(prompt))
        return kept

    def computed(self, ids: Sequence[int], preset: Preset) -> None:
        """All layers have computed `ids`, which follow what is there, at `preset`."""
        self._tokens += ids
        self._presets += [preset] * len(ids)


def _covers(computed: Preset, wanted: Preset) -> bool:
    """Whether `computed` is at least as exact as `wanted`: it skips no more of anything."""
    if computed is wanted:
        return True
    names = [field.name for field in dataclasses.fields(Rule) if field.name != "layers"]
    own, others = computed.rule, wanted.rule
    layers = range(max(len(own.layers), len(others.layers), 1))
    finer = all(getattr(own.at(i), name) <= getattr(others.at(i), name) for i in layers for name in names)
    return finer and computed.x_bits >= wanted.x_bits


class LibraryStore:
    """transformers' own cache."""

    def __init__(self) -> None:
        from transformers import DynamicCache

        self.cache: Any = DynamicCache()

    def nbytes(self) -> int:
        """Bytes that the cached keys and values take."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers if layer.is_initialized)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, layer by layer: a pass that broke off left some longer."""
        for layer in self.cache.layers:
            if length == 0:
                layer.reset()
            elif layer.is_initialized:
                layer.crop(min(0, length - layer.get_seq_length()))

    def trim(self, length: int) -> None:
        """The library's cache holds no more than its tokens."""


class GrowingStore:
    """Keys and values in memory reserved for more tokens than are there, so that adding a token copies nothing.

    Memory grows by half, in whole blocks, up to the window. Layers share a tensor
    in groups: one call then gives the views of a whole group, and only one group is there twice while it grows.
    """

    def __init__(
        self, layers: int, entry: tuple[int, int], window: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`entry`: (R, D), the layout of a token's cache entry in each layer (`Heads.entry`)."""
        sizes = [min(GROUP, layers - first) for first in range(0, layers, GROUP)]
        # (layers of the group, capacity, R, D)
        self._own = [torch.empty(size, 0, *entry, dtype=dtype, device=device) for size in sizes]
        self._window = window
        self.capacity = self.length = 0
        self._version = next(_VERSIONS)

    def nbytes(self) -> int:
        """Bytes that are set aside."""
        return sum(group.nbytes for group in self._groups())

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; their memory stays set aside."""
        self.length = min(self.length, length)

    def trim(self, length: int) -> None:
        """Memory stays set aside: what comes next will need about as much."""

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens in all.

        Raises:
            ValueError: more than the window. FloeError: more than the device's memory has room for.
        """
        if length <= self.capacity:
            return
        if length > self._window:
            raise ValueError(f"{length} tokens for a window of {self._window}")
        self._resize(self._blocks(max(length, self.capacity * 3 // 2)))

    def layers(self) -> list[Tensor]:
        """For each layer, all that is set aside, (capacity, R, D)."""
        return [layer for group in self._groups() for layer in group.unbind(0)]

    def version(self) -> tuple[int, int]:
        """Another one, among all stores, whenever `layers` are at other addresses."""
        return self._version, 0

    def places(self, end: int) -> list[Tensor]:
        """For each layer, where the entries of tokens length..end-1 go, (end - length, R, D)."""
        added = end - self.length
        return [place for group in self._groups() for place in group.narrow(1, self.length, added).unbind(0)]

    def seen(self, start: int, end: int) -> list[Tensor]:
        """Group by group of layers, the entries of tokens start..end-1, (layers, end - start, R, D)."""
        return [group.narrow(1, start, end - start) for group in self._groups()]

    def _groups(self) -> list[Tensor]:
        return self._own

    def _blocks(self, length: int) -> int:
        """Tokens of the blocks that hold `length`."""
        return min(self._window, -(-length // BLOCK) * BLOCK)

    def _resize(self, capacity: int) -> None:
        for index, old in enumerate(self._own):
            self._own[index] = old.new_empty(old.shape[0], capacity, *old.shape[2:])
            self._own[index][:, : self.length] = old[:, : self.length]
            del old  # otherwise the last group would exist twice even after its growth
        self.capacity, self._version = capacity, next(_VERSIONS)


class BorrowingStore(GrowingStore):
    """Keys and values at the end of device memory that otherwise holds rows, in whole blocks.

    Nothing exists twice: as the memory grows downwards, layers move one by one to their new places.
    """

    def __init__(
        self, layers: int, entry: tuple[int, int], window: int, dtype: torch.dtype, device: torch.device, room: Room
    ) -> None:
        super().__init__(0, entry, window, dtype, device)
        self._room, self._dtype, self._shape = room, dtype, (layers, *entry)
        room.let(self)

    def trim(self, length: int) -> None:
        """Give back the blocks that a conversation of `length` tokens does not need."""
        wanted = self._blocks(max(length, self.length))
        if wanted < self.capacity:
            self._resize(wanted)

    def reserve(self, length: int) -> None:
        """See `GrowingStore`; the rows give way before anything is written."""
        if length > self._window:
            raise ValueError(f"{length} tokens for a window of {self._window}")
        if length > self.capacity:
            self._resize(self._blocks(length))

    def version(self) -> tuple[int, int]:
        """See `GrowingStore`; the memory moves when rows give way to something else."""
        return self._version, self._room.lent().data_ptr()

    def _groups(self) -> list[Tensor]:
        return [self._at(self._room.lent(), self.capacity)]

    def _nbytes(self, capacity: int) -> int:
        return capacity * math.prod(self._shape) * self._dtype.itemsize

    def _at(self, memory: Tensor, capacity: int) -> Tensor:
        """(layers, capacity, R, D), which end where `memory` does."""
        layers, *token = self._shape
        return memory[memory.numel() - self._nbytes(capacity) :].view(self._dtype).view(layers, capacity, *token)

    def _resize(self, capacity: int) -> None:
        before, layers = self.capacity, self._shape[0]
        if capacity > before:
            self._room.lend(self._nbytes(capacity))
        memory = self._room.lent()
        old, new = self._at(memory, before), self._at(memory, capacity)
        # Moving down, the lowest goes first, moving up, the highest, in pieces as long as the distance.
        for layer in range(layers) if capacity > before else reversed(range(layers)):
            way = (layers - layer) * abs(capacity - before)
            starts = range(0, min(self.length, capacity), way)
            for start in starts if capacity > before else reversed(starts):
                end = min(start + way, self.length)
                new[layer, start:end] = old[layer, start:end]
        if capacity < before:
            self._room.lend(self._nbytes(capacity))
        self.capacity, self._version = capacity, next(_VERSIONS)
