"""Keys and values of one conversation: what was computed, for which tokens, and how much of it the next prompt reuses.

A turn's prompt begins with the turns before it, so only what is new has to be computed. An edited message, a branch
or another conversation keeps the common beginning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ...kernels.rule import Rule
from ...models.families.derived import tensors_of
from ..quality_presets import Preset

S = TypeVar("S", bound="KVStore")


class KVStore(Protocol):
    """The storage of keys and values, in the form of the code that computes them."""

    def nbytes(self) -> int:
        """Bytes in use on the device that computes."""
        ...

    def spilled(self) -> int:
        """Bytes that this device has no room for: they are in RAM."""
        ...

    def spill(self) -> bool:
        """Move some of what is on a device to RAM, since its memory ran out; False if nothing can be moved."""
        ...

    def keeps(self, length: int) -> int:
        """How many tokens are left if all but the first `length` are to be dropped."""
        ...

    def crop(self, length: int) -> None:
        """Drop all but the first `length` tokens, also those of a pass that was interrupted between two layers."""
        ...

    def trim(self, length: int) -> None:
        """Return memory that a conversation of `length` tokens does not need, if something else can use it."""
        ...

    def copied(self, most: int) -> Held | None:
        """What is there, in at most so many bytes; None where that cannot be, or cannot be put back."""
        ...

    def fits(self, held: Held, length: int) -> bool:
        """Whether the first `length` tokens of such a copy can be put here: it may be another model's, or cut off."""
        ...

    def put(self, held: Held, length: int) -> None:
        """The first `length` tokens of a copy that fits, instead of what is there.

        Raises:
            FloeError: more than the device's memory has room for.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateCopy:
    """The states behind the first `length` tokens, of each layer that keeps one, in RAM. They are never changed, so
    that stores and parked conversations share them. turn: whether a turn begins or ends there.
    """

    length: int
    states: list[Tensor]
    turn: bool = False

    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(state.nbytes for state in self.states)


@dataclass(frozen=True, slots=True)
class Held:
    """A copy, in RAM, of what a store holds: of each layer that attends (length, *entry), in its own shape; and where
    other layers keep states, those at some places, the last one behind all tokens.

    Attributes:
        first: the token that entries begin with of layers that see only the last `sees` tokens.
    """

    entries: list[Tensor]
    copies: list[StateCopy] = field(default_factory=list[StateCopy])
    first: int = 0
    sees: int = 0

    def keeps(self, length: int) -> int:
        """See `KVStore`."""
        if not self.copies:
            return length if reaches(length, self.first, self.sees) else 0
        return max((copy.length for copy in self.copies if copy.length <= length), default=0)

    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(entry.nbytes for entry in self.entries) + sum(copy.nbytes() for copy in self.copies)


def reaches(length: int, first: int, sees: int) -> bool:
    """Whether a token behind `length` others can be computed by entries from `first` on, if it sees the last `sees`,
    itself among them.
    """
    return max(0, length + 1 - sees) >= first


@dataclass(slots=True)
class Computed:
    """Tokens that have keys and values.

    Attributes:
        presets: by which each was computed. chunks: where the first parts of a prompt end that were computed by
            themselves, one behind the other, in the size that every prompt is read in. logits: (1, V), behind the first
            `prompt` tokens. whole: whether these were read in such parts and a smaller last one. long: by which of two
            sets of frequencies keys were turned, where rope has two.
    """

    tokens: list[int] = field(default_factory=list[int])
    presets: list[Preset] = field(default_factory=list[Preset])
    chunks: list[int] = field(default_factory=list[int])
    logits: Tensor | None = None
    prompt: int = 0
    whole: bool = False
    long: bool = False

    def first(self, length: int) -> Computed:
        """The first `length` of them."""
        chunks = [end for end in self.chunks if end <= length]
        found = Computed(self.tokens[:length], self.presets[:length], chunks, long=self.long)
        if self.prompt <= length:
            found.logits, found.prompt, found.whole = self.logits, self.prompt, self.whole
        return found

    def read(self, begun: int, logits: Tensor) -> None:
        """They are a prompt, with these logits behind it, whose last part began at `begun`."""
        self.logits, self.prompt, self.whole = logits.clone(), len(self.tokens), begun in (0, *self.chunks)

    def add(self, ids: Sequence[int], preset: Preset, *, chunk: bool) -> None:
        """`ids` follow, as such a part or not. With them, what had to be computed again was."""
        if chunk and len(self.tokens) == (self.chunks[-1] if self.chunks else 0):
            self.chunks.append(len(self.tokens) + len(ids))
        self.tokens += ids
        self.presets += [preset] * (len(self.tokens) - len(self.presets))

    def common(
        self, prompt: Sequence[int], preset: Preset, keeps: Callable[[int], int] = int, *, alike: bool = False
    ) -> int:
        """See `KVCache.common`, of what is stored by a store that `keeps`."""
        kept, last, serves = 0, preset, True
        for token, mine, computed in zip(prompt, self.tokens, self.presets, strict=False):
            if computed is not last:  # else it is compared for each of thousands of tokens
                last, serves = computed, _covers(computed, preset) and (not alike or _covers(preset, computed))
            if token != mine or not serves:
                break
            kept += 1
        if kept == len(prompt) == self.prompt == keeps(kept) and (self.whole or not alike):
            return kept
        kept = min(kept, len(prompt) - 1)
        if not alike:
            return keeps(kept)
        return max((end for end in self.chunks if end <= kept and keeps(end) == end), default=0)


@dataclass(frozen=True, slots=True)
class Parked:
    """A copy of what is stored of `tokens`, and how they were computed: see `Computed`."""

    computed: Computed
    held: Held

    @property
    def tokens(self) -> list[int]:
        """Those tokens."""
        return self.computed.tokens

    def nbytes(self) -> int:
        """Bytes that it takes."""
        logits = self.computed.logits
        return self.held.nbytes() + (0 if logits is None else logits.nbytes)

    def common(self, prompt: Sequence[int], preset: Preset, *, alike: bool = False) -> int:
        """See `KVCache.common`."""
        return self.computed.common(prompt, preset, self.held.keeps, alike=alike)


class KVCache:
    """One sequence: its token ids, and their keys and values.

    Only tokens that every layer has computed count, so that a cancelled or failed pass leaves the rest valid.

    Attributes:
        turns: where turns of the prompt end that is being read.
    """

    def __init__(self) -> None:
        self.store: KVStore | None = None
        self.turns: list[int] = []
        self._computed = Computed()
        self._prompt = 0  # tokens of the last one

    @property
    def length(self) -> int:
        """The number of tokens with keys and values."""
        return len(self._computed.tokens)

    @property
    def tokens(self) -> list[int]:
        """Those tokens."""
        return list(self._computed.tokens)

    @property
    def logits(self) -> Tensor | None:
        """(1, V), behind all of them, if they are a prompt."""
        return self._computed.logits if self._computed.prompt == self.length else None

    def read(self, begun: int, logits: Tensor) -> None:
        """What is there is a prompt, with these logits (1, V) behind it, whose last part began at `begun`."""
        self._computed.read(begun, logits)

    @property
    def long(self) -> bool:
        """See `Computed`."""
        return self._computed.long

    def turn(self, tokens: int, short: int) -> bool:
        """Have keys turned as so many more tokens need it, or the prompt that is being read: by rope's frequencies for
        texts beyond `short` tokens, or those for others. Returns whether what is there has to be computed again.
        """
        long = max(self.length + tokens, self._prompt) > short
        if self._computed.long != long:
            self._computed = Computed(self._computed.tokens, long=long)
        return len(self._computed.presets) < self.length

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
        """Bytes that keys and values take where they are computed, with what is set aside for the tokens to come."""
        return self.store.nbytes() if self.store is not None else 0

    def spilled(self) -> int:
        """Bytes of them that a device has no room for."""
        return self.store.spilled() if self.store is not None else 0

    def spill(self) -> bool:
        """Move some of them to RAM, since the device's memory ran out; False if none can be moved."""
        return self.store is not None and self.store.spill()

    def keep(self, prompt: Sequence[int], preset: Preset, *, alike: bool = False) -> int:
        """Keep the part of `prompt` that is there already (see `common`), drop the rest; returns its number of tokens.

        Never all of the prompt, unless `logits` are behind it: its last token is computed for them. What a coarser
        preset computed is dropped, so that an answer has the quality of its own preset.
        """
        kept, self._prompt = self.common(prompt, preset, alike=alike), len(prompt)
        self.cut(kept)
        if self.store is not None:
            self.store.trim(len(prompt))
        return kept

    def cut(self, length: int) -> None:
        """Drop all but the first `length` tokens."""
        if length < self.length:  # a group's processes ask before each token
            self._computed = self._computed.first(length)
        if self.store is not None:
            self.store.crop(length)

    def common(self, prompt: Sequence[int], preset: Preset, *, alike: bool = False) -> int:
        """How many tokens of `prompt` are there already, as exact as `preset` wants them, and can be gone on from.

        Sums round by the order in which they run, so what was computed token by token, or from another token on,
        differs by float noise. `alike`: only those count that are what reading the whole prompt gives, to the last bit;
        these may be all of it.
        """
        return self._computed.common(prompt, preset, int if self.store is None else self.store.keeps, alike=alike)

    def parked(self, most: int) -> Parked | None:
        """A copy; None if it would take more than `most` bytes, or cannot be put back."""
        if self.store is None:
            return None
        self.store.crop(self.length)
        held = self.store.copied(most)
        return None if held is None else Parked(self._computed.first(self.store.keeps(self.length)), held)

    def resume(self, parked: Parked, length: int) -> bool:
        """Hold the first `length` tokens of a copy instead of what is there; False, and nothing has changed, if there
        is no store yet, or one that these do not fit.
        """
        if self.store is None or not self.store.fits(parked.held, length):
            return False
        self._computed = Computed()  # if it fails, nothing is there
        self.store.crop(0)
        self.store.put(parked.held, length)
        self._computed = parked.computed.first(length)
        return True

    def computed(self, ids: Sequence[int], preset: Preset, *, chunk: bool = False) -> None:
        """All layers have computed `ids`, which follow what is there, at `preset`. `chunk`: together, as a part of a
        prompt that has the size of all such parts but the last.
        """
        self._computed.add(ids, preset, chunk=chunk)


def _covers(computed: Preset, wanted: Preset) -> bool:
    """Whether `computed` is at least as exact as `wanted`: it skips no more of anything."""
    if computed is wanted:
        return True
    names = [field.name for field in dataclasses.fields(Rule) if field.name != "layers"]
    own, others = computed.rule, wanted.rule
    layers = range(max(len(own.layers), len(others.layers), 1))
    finer = all(getattr(own.at(i), name) <= getattr(others.at(i), name) for i in layers for name in names)
    return finer and computed.x_bits >= wanted.x_bits and computed.without_weak <= wanted.without_weak


class LibraryStore:
    """transformers' own cache.

    A layer that keeps a state instead of keys and values cannot go back: such a cache is kept as it is, or not at all.

    Args:
        new: makes an empty one; None where the model's first pass makes its own, of which only keys and values of all
            tokens can go back. stuck: whether it cannot go back in any case.

    Attributes:
        cache: None before that pass.
    """

    def __init__(self, new: Callable[[], Any] | None = None, *, stuck: bool = False) -> None:
        self._new, self._always_stuck = new, stuck
        self._renew()

    @property
    def held(self) -> int:
        """Tokens that it holds; 0 inside a pass, and after one that broke off."""
        return self._held or 0

    @property
    def stuck(self) -> bool:
        """Whether it cannot go back to fewer tokens."""
        if self._always_stuck or self._new is not None:
            return self._always_stuck
        from transformers.cache_utils import DynamicCache, DynamicLayer

        layers = self.cache.layers if type(self.cache) is DynamicCache else [None]
        return any(type(layer) is not DynamicLayer for layer in layers)

    def _renew(self) -> None:
        self.cache: Any = None if self._new is None else self._new()
        self._held: int | None = 0  # tokens; None inside a pass, and after one that broke off

    def begin(self) -> None:
        """A pass begins to change the cache."""
        self._began, self._held = self._held or 0, None

    def end(self, tokens: int) -> None:
        """It has added so many tokens."""
        self._held = self._began + tokens

    def nbytes(self) -> int:
        """Bytes that the cached keys and values, or states, take."""
        return sum(part.nbytes for part in tensors_of(self.cache))

    def keeps(self, length: int) -> int:
        """All of them, unless a layer keeps a state: then nothing, or what is there."""
        return length if not self.stuck or length == self._held else 0

    def spilled(self) -> int:
        """All are where they are computed."""
        return 0

    def spill(self) -> bool:
        """They stay there."""
        return False

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, layer by layer: a pass that broke off left some longer."""
        if self.stuck:
            if length != self._held:
                self._renew()
            return
        for layer in self.cache.layers:
            if length == 0:
                layer.reset()
            elif layer.is_initialized:
                layer.crop(min(0, length - layer.get_seq_length()))

    def trim(self, length: int) -> None:
        """The library's cache holds no more than its tokens."""

    def copied(self, most: int) -> None:
        """See `KVStore`: it cannot be put back."""

    def fits(self, held: Held, length: int) -> bool:
        """See `KVStore`: nothing does."""
        return False

    def put(self, held: Held, length: int) -> None:
        """There are no copies."""
        raise ValueError("the library's cache takes no copies")
