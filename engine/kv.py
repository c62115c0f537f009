"""Keys and values of one conversation: what was computed, for which tokens, and how much of it the next prompt keeps.

A turn's prompt begins with the turns before it, so only what is new has to be computed. An edited message, a branch
or another conversation keeps the common beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from .quality import Preset

BLOCK = 256  # tokens: keys and values grow by whole blocks
GROUP = 8  # layers whose keys and values share a tensor
S = TypeVar("S", bound="Store")


class Store(Protocol):
    """Where keys and values lie, in the form of whoever computes them."""

    def nbytes(self) -> int:
        """Bytes that are taken."""
        ...

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, also those of a pass that broke off between two layers."""
        ...


class KVCache:
    """One sequence: its token ids, and their keys and values.

    Only what every layer has computed counts, so that a pass that was cancelled or failed leaves the rest valid.
    """

    def __init__(self) -> None:
        self.store: Store | None = None
        self._tokens: list[int] = []
        self._presets: list[Preset] = []

    @property
    def length(self) -> int:
        """Tokens whose keys and values are there."""
        return len(self._tokens)

    @property
    def cache(self) -> Any:
        """transformers' own cache, for calls of its model that `generate` does not make."""
        return self.store_of(LibraryStore, LibraryStore).cache

    def store_of(self, kind: type[S], make: Callable[[], S]) -> S:
        """The store, made by `make` if there is none yet.

        Raises:
            TypeError: the keys and values are of another kind, so of another model.
        """
        if self.store is None:
            self.store = make()
        if not isinstance(self.store, kind):
            raise TypeError(f"keys and values lie in a {type(self.store).__name__}, not in a {kind.__name__}")
        return self.store

    def nbytes(self) -> int:
        """Bytes that the keys and values take, with what is set aside for the tokens to come."""
        return self.store.nbytes() if self.store is not None else 0

    def keep(self, prompt: Sequence[int], preset: Preset) -> int:
        """Keep what of `prompt` is there already and forget the rest; returns how many tokens that is.

        Never all of the prompt: its last token is computed for its logits. What a coarser preset computed is not kept:
        an answer is as good as the preset it is asked at.
        """
        kept = 0
        for token, mine, computed in zip(prompt[:-1], self._tokens, self._presets, strict=False):
            if token != mine or not _covers(computed, preset):
                break
            kept += 1
        del self._tokens[kept:], self._presets[kept:]
        if self.store is not None:
            self.store.crop(kept)
        return kept

    def computed(self, ids: Sequence[int], preset: Preset) -> None:
        """All layers have computed `ids`, which follow what is there, at `preset`."""
        self._tokens += ids
        self._presets += [preset] * len(ids)


def _covers(computed: Preset, wanted: Preset) -> bool:
    """Whether what `computed` gave is at least as good as what `wanted` gives.

    Of every value but `lossless`, more leaves out more.
    """
    if computed is wanted:
        return True
    names = [field.name for field in dataclasses.fields(Preset) if field.name not in ("name", "lossless")]
    finer = all(getattr(computed, name) <= getattr(wanted, name) for name in names)
    return finer and computed.lossless >= wanted.lossless


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


class GrowingStore:
    """Keys and values in memory that is set aside for more tokens than are there, so that a token copies nothing.

    A token's keys lie before its values. Memory grows by half, in whole blocks, up to the window. Layers share a tensor
    in groups: one call then gives the views of a whole group, and only one group is there twice while it grows.
    """

    def __init__(
        self, layers: int, heads: int, dim: int, window: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        sizes = [min(GROUP, layers - first) for first in range(0, layers, GROUP)]
        # (layers of the group, capacity, 2 * heads, D)
        self._groups = [torch.empty(size, 0, 2 * heads, dim, dtype=dtype, device=device) for size in sizes]
        self._window = window
        self.capacity = self.length = 0

    def nbytes(self) -> int:
        """Bytes that are set aside."""
        return sum(group.nbytes for group in self._groups)

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; their memory stays set aside."""
        self.length = min(self.length, length)

    def reserve(self, length: int) -> None:
        """Have room for `length` tokens in all.

        Raises:
            ValueError: more than the window.
        """
        if length <= self.capacity:
            return
        if length > self._window:
            raise ValueError(f"{length} tokens for a window of {self._window}")
        wanted = max(length, self.capacity * 3 // 2)
        capacity = min(self._window, -(-wanted // BLOCK) * BLOCK)
        for index, old in enumerate(self._groups):
            self._groups[index] = old.new_empty(old.shape[0], capacity, *old.shape[2:])
            self._groups[index][:, : self.length] = old[:, : self.length]
            del old  # or else the last group would be there twice after its growth too
        self.capacity = capacity

    def layers(self) -> list[Tensor]:
        """For each layer, all that is set aside, (capacity, 2 * heads, D)."""
        return [layer for group in self._groups for layer in group.unbind(0)]

    def places(self, end: int) -> list[Tensor]:
        """For each layer, where keys and values of tokens length..end-1 go, (end - length, 2, heads, D)."""
        return [place for group in self._groups for place in group.narrow(1, self.length, end - self.length).unbind(0)]

    def seen(self, start: int, end: int) -> tuple[list[Tensor], list[Tensor]]:
        """For each layer, keys and values of tokens start..end-1, (heads, 1, end - start, D) each."""
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for group in self._groups:
            both = group.narrow(1, start, end - start).transpose(1, 2).unsqueeze(3).transpose(2, 3)
            for part, out in zip(both.chunk(2, 1), (keys, values), strict=True):
                out += part.unbind(0)
        return keys, values
