"""Which neuron rows lie in device memory, where, and which give way: one pool for all layers (DESIGN section 5).

Bookkeeping only, on one thread: the bytes lie in a tensor (capacity, row bytes) that the device owns. Caching is per
neuron, as CORM's limitations ask for, and no expert has a share of its own. A slot is free, filling (its row is on the
way) or ready. It keeps its row while that is filling, and until `release` if the step that runs uses it.

A neuron's key within its layer is e * F + n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..models.heat import Heat
from .uses import Uses

Policy = Literal["score", "lru", "fifo"]
Slots = NDArray[np.int32]
Keys = NDArray[np.int64]
Number = TypeVar("Number", bound=np.generic)

_FREE, _FILLING, _READY = 0, 1, 2  # a slot's state

# Eviction looks at so many slots for each that is wanted, and takes those worth least.
SAMPLE, SMALLEST_WINDOW = 6, 256
# What a prefetched row is worth: as much as one that is active at each call of an expert with so many times the mean
# score. For Mixtral about one use in two steps.
PREFETCH_WORTH = 2.0
# What is needed next by a layer whose turn has just passed counts this much less: the others are needed before it.
TURN = 0.5


@dataclass(frozen=True, slots=True)
class Found:
    """Where neurons lie.

    Attributes:
        slots: (N,) int32, -1 where absent. ready: (N,) bool, the row is there. coming: (N,) bool, it is on its way.
    """

    slots: Slots
    ready: NDArray[np.bool_]
    coming: NDArray[np.bool_]


class NeuronPool:
    """The slot table of all layers and what decides who stays.

    Policies:
        score: a row is worth the moving mean of its expert's router score (importance-driven scheduling, section 5.3)
            times the share of the expert's recent calls in which the neuron was active; less the longer its layer's
            turn is away. Absent neurons are counted too, so that one which returns is known.
        lru: the row used longest ago goes first. fifo: the one brought longest ago.

    Eviction looks at the next slots of a hand that goes round, not at the whole pool, and takes the worst of these.

    Attributes:
        slots: (L, E, F) int32, -1 for an absent neuron; an assigned slot may still be filling. To be read only.
        capacity: slots in all.
    """

    def __init__(self, layers: int, experts: int, neurons: int, capacity: int, policy: Policy = "score") -> None:
        if policy not in ("score", "lru", "fifo"):
            raise ValueError(f"there is no policy {policy!r}: choose score, lru or fifo")
        self._experts, self._neurons, self._policy = experts, neurons, policy
        self.slots = np.full((layers, experts, neurons), -1, np.int32)
        self._flat, self._tables = self.slots.reshape(-1), self.slots.reshape(layers, experts * neurons)
        self._prefetch_worth = np.float32(PREFETCH_WORTH / experts)
        self._uses = Uses(layers, experts, neurons)
        self._residents = np.zeros(layers * experts, np.int64)  # ready rows of each expert
        self._finds, self._brought, self._step = 0, 0, 1  # calls of find, of reserve, of release
        self._hand, self._layer = 0, 0  # the slot that eviction looks at next, the layer asked last
        # By slot; one more than there are, so that slot -1 of an absent neuron reads and writes the last, nobody's.
        self._state = np.zeros(1, np.uint8)
        self._step_of = np.zeros(1, np.int64)  # the last step that used it
        self._key = np.zeros(1, np.int64)  # into _flat
        # lru: the last call that used it. fifo: the call that brought it. score: the find for which it was prefetched.
        self._mark = np.zeros(1, np.int64)
        self._scratch = np.zeros(1, np.int32)
        self._free, self._free_count = np.zeros(0, np.int32), 0  # a stack
        self.capacity = 0
        self.resize(capacity)

    def find(self, layer: int, keys: Keys) -> Found:
        """Where a step's neurons are, which may be named twice. Notes their use; those present stay until `release`.

        Raises:
            ValueError: a key out of range.
        """
        self._check(keys)
        slots = self._tables[layer][keys]
        at = slots.astype(np.int64)
        state = self._state[at]
        self._step_of[at] = self._step
        self._finds += 1
        self._layer = layer
        if self._policy == "lru":
            self._mark[at] = self._finds + self._brought
        self._uses.note(layer, keys)
        return Found(slots, state == _READY, state == _FILLING)

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """Slots for the first M of these absent neurons; the rows that lay there are gone from now on.

        With `urgent` the step that runs needs the rows: they stay until `release`, and M is N unless all other slots
        are filling or in use. Without, it is a prefetch: under the policy "score" it takes only rows worth less than
        PREFETCH_WORTH, and what it brings is worth that until its layer's turn; so none displaces another.

        Returns:
            (M,) int32. Each is filling until it is given to `filled` or `abandon`.

        Raises:
            ValueError: a key out of range, present or named twice. Nothing has changed then.
        """
        self._check(keys)
        table = self._tables[layer]
        if (table[keys] != -1).any():
            raise ValueError("a neuron that is to be brought has a slot already")
        order = np.arange(keys.size, dtype=np.int32)
        table[keys] = order
        if (table[keys] != order).any():
            table[keys] = -1
            raise ValueError("a neuron is to be brought twice")
        taken = self._take_free(keys.size)
        if taken.size < keys.size:
            taken = np.concatenate([taken, self._evict(keys.size - taken.size, urgent)])
        table[keys[taken.size :]] = -1
        keys = keys[: taken.size]
        table[keys] = taken
        at = taken.astype(np.int64)
        self._brought += 1
        self._state[at] = _FILLING
        self._key[at] = keys + layer * table.size
        self._step_of[at] = self._step if urgent else 0
        if self._policy != "score":
            self._mark[at] = self._finds + self._brought
        else:
            self._mark[at] = 0 if urgent else self._finds + 1 + (layer - self._layer - 1) % len(self._tables)
        return taken

    def filled(self, slots: Slots) -> None:
        """The bytes of these filling rows are in their slots.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        at = self._end_filling(slots, _READY)
        self._residents += self._per_expert(self._key[at])

    def abandon(self, slots: Slots) -> None:
        """The transfers into these filling slots were dropped: their rows are absent, the slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        at = self._end_filling(slots, _FREE)
        self._flat[self._key[at]] = -1
        self._put_free(slots)

    def release(self) -> None:
        """The kernels that read rows of this step have ended: the rows may go. Those that are filling stay."""
        self._step += 1

    def heard(self, layer: int, scores: NDArray[np.floating[Any]]) -> None:
        """The router's scores (E,) of this step, after softmax; the mean of several tokens. Ignored if not finite."""
        self._uses.heard(layer, scores)

    def resident(self, layer: int) -> NDArray[np.float32]:
        """(E,) share of each expert's neurons that are ready."""
        return (self._residents[self._of(layer)] / self._neurons).astype(np.float32)

    @property
    def used(self) -> int:
        """Slots that hold a row or wait for one."""
        return self.capacity - self._free_count

    def resize(self, capacity: int) -> None:
        """More slots, all free, or fewer: the rows in slots from `capacity` on are dropped.

        Raises:
            ValueError: one of those is filling or in use, or capacity is negative. Nothing has changed then.
        """
        if capacity < 0:
            raise ValueError(f"a pool of {capacity} slots")
        before, kept = self.capacity, min(self.capacity, capacity)
        state, step_of = self._state[kept:before], self._step_of[kept:before]
        if ((state == _FILLING) | ((state == _READY) & (step_of == self._step))).any():
            raise ValueError("rows in the slots to be given up are filling or in use")
        self._drop(kept + np.flatnonzero(state))
        self._state = _resized(self._state, kept, capacity)
        self._step_of = _resized(self._step_of, kept, capacity)
        self._key = _resized(self._key, kept, capacity)
        self._mark = _resized(self._mark, kept, capacity)
        self._scratch = np.zeros(capacity + 1, np.int32)
        free = self._free[: self._free_count]
        fresh = np.arange(capacity - 1, before - 1, -1, dtype=np.int32)
        self._free = np.zeros(capacity, np.int32)
        self._free_count = 0
        self._put_free(np.concatenate([fresh, free[free < capacity]]))
        self.capacity, self._hand = capacity, 0

    def heat(self) -> Heat:
        """What was used how much so far, for the next start."""
        return self._uses.heat()

    def warm(self, heat: Heat) -> tuple[NDArray[np.int64], Keys]:
        """Start from what was used before.

        Returns:
            layers and keys, (N,) each: the neurons that fill the pool, hottest first.

        Raises:
            ValueError: heat of another model's shape.
        """
        self._uses.start(heat)
        worth = (heat.scores[..., None] * heat.uses).reshape(-1)
        count = min(self.capacity, worth.size)
        best = np.argpartition(-worth, count - 1)[:count] if 0 < count < worth.size else np.arange(count)
        return np.divmod(best[np.argsort(-worth[best], kind="stable")], self._tables.shape[1])

    def _of(self, layer: int) -> slice:
        return slice(layer * self._experts, (layer + 1) * self._experts)

    def _check(self, keys: Keys) -> None:
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise ValueError(f"keys must be (N,) int64, not {keys.ndim}-D {keys.dtype}")
        # A negative key read without its sign is larger than any.
        if keys.size and int(keys.view(np.uint64).max()) >= self._tables.shape[1]:
            raise ValueError(f"a key is out of range 0..{self._tables.shape[1] - 1}")

    def _end_filling(self, slots: Slots, state: int) -> Keys:
        """From filling to `state`; the slots as indices."""
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.capacity:
            raise ValueError(f"a slot is out of range 0..{self.capacity - 1}")
        at, order = slots.astype(np.int64), np.arange(slots.size, dtype=np.int32)
        self._scratch[at] = order
        if (self._state[at] != _FILLING).any() or (self._scratch[at] != order).any():
            raise ValueError("a slot is not filling, or named twice")
        self._state[at] = state
        return at

    def _take_free(self, wanted: int) -> Slots:
        start = max(0, self._free_count - wanted)
        taken = self._free[start : self._free_count][::-1].copy()
        self._free_count = start
        return taken

    def _put_free(self, slots: Slots) -> None:
        end = self._free_count + slots.size
        self._free[self._free_count : end] = slots
        self._free_count = end

    def _evict(self, wanted: int, urgent: bool) -> Slots:
        """Up to `wanted` slots whose rows were ready and not in use, and are gone now."""
        target, count, left = max(SAMPLE * wanted, SMALLEST_WINDOW), 0, self.capacity
        enough = max(target // 2, wanted)
        first, worths = self._hand, [np.zeros(0, np.float32)]
        # Where much is in use a window has too few to choose from, and the hand goes on, once round at most.
        while left and count < enough:
            end = min(self._hand + min(target, left), self.capacity)
            window = slice(self._hand, end)
            ready = (self._state[window] == _READY) & (self._step_of[window] != self._step)
            worth = self._worth(window, urgent)
            np.copyto(worth, np.inf, where=~ready)
            worths.append(worth)
            count += np.count_nonzero(ready)
            left -= end - self._hand
            self._hand = end % self.capacity
        worth = np.concatenate(worths)
        best = np.argpartition(worth, wanted)[:wanted] if wanted < worth.size else np.arange(worth.size)
        best = best[worth[best] < np.inf]
        evicted = (first + best) % self.capacity if best.size else best
        self._drop(evicted)
        return evicted.astype(np.int32)

    def _worth(self, window: slice, urgent: bool) -> NDArray[np.floating[Any]]:
        """What the rows in a window of slots are worth by the policy; infinite if more than a prefetch may take."""
        if self._policy != "score":
            return self._mark[window].astype(np.float64)
        keys = self._key[window]
        experts = keys // self._neurons
        away = (np.arange(len(self._tables)) - self._layer - 1) % len(self._tables)
        worth = self._uses.worth(keys, experts, 1 - TURN * away / len(self._tables))
        promised = self._mark[window] > self._finds
        np.maximum(worth, promised * self._prefetch_worth, out=worth)
        if not urgent:
            np.copyto(worth, np.inf, where=worth >= self._prefetch_worth)
        return worth

    def _drop(self, at: Keys) -> None:
        keys = self._key[at]
        self._flat[keys] = -1
        self._state[at] = _FREE
        self._residents -= self._per_expert(keys)

    def _per_expert(self, keys: Keys) -> NDArray[np.int64]:
        return np.bincount(keys // self._neurons, minlength=self._residents.size)


def _resized(old: NDArray[Number], kept: int, capacity: int) -> NDArray[Number]:
    new = np.zeros(capacity + 1, old.dtype)
    new[:kept] = old[:kept]
    return new
