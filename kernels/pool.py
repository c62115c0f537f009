"""Which neuron's row is in which slot of a pool, which rows are evicted, and how much each neuron is used: the tables,
and the few operations on them that a step needs.

`RowTable` defines them in numpy, `offload/placing.py` what a step decides; `cpu/native_pool.py` is compiled. Policies
are in `engine/offload/eviction.py`.

Shapes: L layers, E experts, F neurons of each, S slots, P calls, N active neurons. A neuron's key is e · F + n within
its layer, and flat l · E · F + e · F + n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .checks import index
from .located import Keys, Slots, require

FREE, FILLING, READY = 0, 1, 2  # a slot's state
STEP, FINDS, BROUGHT, LAYER, FREE_COUNT, HAND, SPARE, HELD = range(8)  # places in `RowTable.counters`

# A slot's fields, side by side, so that scanning many reads memory once.
CELL = np.dtype([("word", np.int32), ("key", np.int32), ("mark", np.int32), ("mean", np.float32)])
_STEPS = (1 << 28) - 1  # steps are counted round in a word: a row would have to be unused for exactly so many


Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """The parameters of eviction.

    Attributes:
        by_score: by what a row is worth; else the smallest mark is evicted first.
        marks_use: whether `locate` marks rows with its time, as an LRU does.
        sample, smallest_window: eviction examines `sample` slots for each one wanted, and at least `smallest_window`.
        prefetch_worth: what a prefetched row is worth until its turn, and the most that a row is worth which gives way
            to one. turn: rows of the layer that has just run count this much less, others in proportion.
        use_rate: share of a new observation in the mean activity. largest_growth: see `Means`.
        score_rate, habit_rate: likewise in the means of the router's scores, recent and long-run.
    """

    by_score: bool
    marks_use: bool
    sample: int
    smallest_window: int
    prefetch_worth: float
    turn: float
    use_rate: float
    largest_growth: float
    score_rate: float
    habit_rate: float

    def __post_init__(self) -> None:
        """Raises ValueError: values for which a search would not end or a mean would not be a number."""
        if min(self.sample, self.smallest_window) < 1:
            raise ValueError(f"eviction must look at 1 slot at least, not {self.sample} and {self.smallest_window}")
        if not (0 <= self.use_rate < 1 and self.largest_growth >= 1):
            raise ValueError(
                f"use_rate must be from 0 up to 1 and largest_growth 1 or more, not {self.use_rate} and "
                f"{self.largest_growth}"
            )


@dataclass(frozen=True, slots=True)
class Means:
    """Moving means of the router's scores and of each neuron's activity.

    A neuron's mean is over the calls of its expert: m = (1 - r) m + r, or without the r where it was not active. Only
    active ones are touched: what is stored is m · g with g = (1 - r)^-calls, so that a call multiplies the expert's g
    and adds r · g to the active ones.

    Attributes:
        recent, habit: (L, E) float64, of the scores, what eviction and the next start go by.
        raw: (L, E · F) float32, m · g. growth: (L, E) float64, g.
    """

    recent: NDArray[np.float64]
    habit: NDArray[np.float64]
    raw: NDArray[np.float32]
    growth: NDArray[np.float64]


class RowTable:
    """The tables of a pool.

    Attributes:
        slots: (L · E · F,) int32 by flat key, -1 for an absent neuron. residents: (L · E,) int64, ready rows.
        cells: (S + 1,) of `CELL` by slot, one more than there are: slot -1 of an absent neuron reads and writes
            nobody's. Parts of them by themselves are words: 4 · the last step that used it + its state; keys: flat;
            marks: by score the find for which a row was prefetched, else when it was used or brought, the lower 32
            bits of the count; kept: `Means.raw` of the row's neuron, unless there is a slot for every row.
        free: (S,) int32, a stack. counters: (8,) int64, see STEP and so on; SPARE of the free ones are for urgent rows;
            HELD is the last step whose rows are not marked, since there is a slot for every row.
    """

    def __init__(self, layers: int, experts: int, neurons: int, rule: EvictionRule, means: Means) -> None:
        """No slot yet.

        Raises:
            ValueError: no neurons, or more than a key can name; means of other shapes or types.
        """
        if min(layers, experts, neurons) < 1:
            raise ValueError(f"a pool needs layers, experts and neurons, not {layers}, {experts} and {neurons}")
        if layers * experts * neurons >= 1 << 31:
            raise ValueError(f"{layers * experts * neurons} neurons are more than a pool can name")
        require("recent", means.recent, np.float64, (layers, experts))
        require("habit", means.habit, np.float64, (layers, experts))
        require("growth", means.growth, np.float64, (layers, experts))
        require("raw", means.raw, np.float32, (layers, experts * neurons))
        self.layers, self.experts, self.neurons = layers, experts, neurons
        self.rule, self.means = rule, means
        self.capacity, self.width = 0, experts * neurons
        self.slots = np.full(layers * self.width, -1, np.int32)
        self.residents = np.zeros(layers * experts, np.int64)
        self._have(np.zeros(1, CELL))
        self.free = np.zeros(0, np.int32)
        self.counters = np.zeros(8, np.int64)
        self.counters[STEP] = 1

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """Slots for the first M of these absent neurons (N,), free ones first; the rows that were in them are evicted.
        `urgent` and the policy: see `engine/offload/row_pool.py`.

        Raises:
            ValueError: a key out of range, present or named twice. Nothing has changed then.
        """
        index("layer", layer, self.layers)
        require("keys", keys, np.int64, (keys.size,))
        table = self.slots[layer * self.width : (layer + 1) * self.width]
        # A negative key read without its sign is larger than any.
        if keys.size and int(keys.view(np.uint64).max()) >= self.width:
            raise ValueError(f"a key is out of range 0..{self.width - 1}")
        if (table[keys] != -1).any():
            raise ValueError("a neuron to be loaded already has a slot")
        order = np.arange(keys.size, dtype=np.int32)
        table[keys] = order
        twice = (table[keys] != order).any()
        table[keys] = -1
        if twice:
            raise ValueError("a neuron is to be loaded twice")
        taken = self._take_free(keys.size, urgent)
        if taken.size < keys.size:
            taken = np.concatenate([taken, self._evict(keys.size - taken.size, urgent)])
        keys = keys[: taken.size]
        table[keys] = taken
        mark = self.counters[FINDS]
        self.counters[BROUGHT] += 1
        self.words[taken] = self.stamp() * urgent + FILLING
        self.keys[taken] = keys + layer * self.width
        self.kept[taken] = self.means.raw[layer][keys]
        if not self.rule.by_score:
            mark += self.counters[BROUGHT]
        elif not urgent:
            mark += 1 + (layer - self.counters[LAYER] - 1) % self.layers
        self.marks[taken] = low(mark)
        return taken

    def spare(self, wanted: int) -> None:
        """Evict rows now so that this many slots are free for urgent rows, which then need not wait.

        Raises:
            ValueError: fewer than none.
        """
        wanted = self._slots(wanted)
        if self.holds_all:
            return
        free = int(self.counters[FREE_COUNT])
        if free < wanted:
            self._put_free(self._evict(wanted - free, urgent=True))
        self.counters[SPARE] = min(wanted, int(self.counters[FREE_COUNT]))

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """These filling rows have arrived, or never will: then they are absent and their slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        require("slots", slots, np.int32, (slots.size,))
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.capacity:
            raise ValueError(f"a slot is out of range 0..{self.capacity - 1}")
        if (self.words[slots] & 3 != FILLING).any() or np.unique(slots).size != slots.size:
            raise ValueError("a slot is not filling, or named twice")
        if arrived:
            self.words[slots] += READY - FILLING
            self.residents += self._per_expert(self.keys[slots])
        else:
            self.words[slots] = FREE
            self.slots[self.keys[slots]] = -1
            self._put_free(slots)

    def resize(self, capacity: int) -> None:
        """More slots, all free, or fewer: rows in slots from `capacity` on are dropped.

        Raises:
            ValueError: one of those is filling or in use, or might be; capacity is negative or more than a slot can
                name. Nothing has changed then.
        """
        if not 0 <= capacity < 1 << 31:
            raise ValueError(f"a pool of {capacity} slots; it can have from 0 to 2^31 - 1")
        before, kept = self.capacity, min(self.capacity, capacity)
        words = self.words[kept:before]
        unmarked = capacity < before and self.holds_all and self.counters[HELD] == self.counters[STEP]
        if unmarked or ((words & 3 == FILLING) | (words == self.stamp() + READY)).any():
            raise ValueError("rows in the slots to be removed are filling or in use")
        self.recall()
        self._drop(kept + np.flatnonzero(words & 3))
        free = self.free[: self.counters[FREE_COUNT]]
        fresh = np.arange(capacity - 1, before - 1, -1, dtype=np.int32)
        self._have(_resized(self.cells, kept, capacity))
        self.free = np.zeros(capacity, np.int32)
        self.counters[FREE_COUNT] = self.counters[HAND] = self.counters[SPARE] = 0
        self._put_free(np.concatenate([fresh, free[free < capacity]]))
        self.capacity = capacity

    def recall(self) -> None:
        """The means were changed elsewhere: copy those of the rows in slots again."""
        self.kept[:] = self.means.raw.reshape(-1)[self.keys]

    @property
    def holds_all(self) -> bool:
        """Whether there is a slot for every row, so that none gives way."""
        return self.capacity >= self.slots.size

    def _have(self, cells: NDArray[np.void]) -> None:
        self.cells = cells
        self.words, self.keys, self.marks, self.kept = (cells[name] for name in CELL.names or ())

    def stamp(self) -> int:
        """The word of a free slot that this step uses."""
        return 4 * (int(self.counters[STEP]) & _STEPS)

    def _slots(self, wanted: int) -> int:
        """That many slots, or all."""
        if wanted < 0:
            raise ValueError(f"{wanted} slots cannot be spared")
        return min(wanted, self.capacity)

    def _take_free(self, wanted: int, urgent: bool) -> Slots:
        end, spare = int(self.counters[FREE_COUNT]), int(self.counters[SPARE])
        start = max(0 if urgent else spare, end - wanted)
        self.counters[FREE_COUNT] = start
        self.counters[SPARE] = min(spare, start)
        return self.free[start:end][::-1].copy()

    def _put_free(self, slots: Slots) -> None:
        start = self.counters[FREE_COUNT]
        self.free[start : start + slots.size] = slots
        self.counters[FREE_COUNT] += slots.size

    def _evict(self, wanted: int, urgent: bool) -> Slots:
        """Evict up to `wanted` rows that are ready and not in use; returns their slots."""
        target, count, left = max(self.rule.sample * wanted, self.rule.smallest_window), 0, self.capacity
        enough = max(target // 2, wanted)
        first = hand = int(self.counters[HAND])
        worths = [np.zeros(0, np.float32)]
        # If much is in use, a window has too few to choose from, and the hand continues, at most once round.
        while left and count < enough:
            end = min(hand + min(target, left), self.capacity)
            words = self.words[hand:end]
            ready = (words & 3 == READY) & (words != self.stamp() + READY)
            worth = self._worth(slice(hand, end), urgent)
            np.copyto(worth, np.inf, where=~ready)
            worths.append(worth)
            count += np.count_nonzero(ready)
            left -= end - hand
            hand = end % self.capacity
        self.counters[HAND] = hand
        worth = np.concatenate(worths)
        best = np.argpartition(worth, wanted)[:wanted] if wanted < worth.size else np.arange(worth.size)
        best = best[worth[best] < np.inf]
        evicted = (first + best) % self.capacity if best.size else best
        self._drop(evicted)
        return evicted.astype(np.int32)

    def _worth(self, window: slice, urgent: bool) -> NDArray[np.floating[Any]]:
        """The worth of the rows in a window of slots by the rule; infinite if more than a prefetch may replace."""
        counters, means, keys = self.counters, self.means, self.keys[window]
        if not self.rule.by_score:
            return -(low(counters[FINDS] + counters[BROUGHT]) - self.marks[window]).view(np.uint32).astype(np.float64)
        away = (np.arange(self.layers) - counters[LAYER] - 1) % self.layers
        turns = 1 - self.rule.turn * away / self.layers
        factors = (means.recent * turns[:, None] / means.growth).astype(np.float32)
        worth = self.kept[window] * factors.reshape(-1)[keys // self.neurons]
        promised, least = self.marks[window] - low(counters[FINDS]) > 0, np.float32(self.rule.prefetch_worth)
        np.maximum(worth, promised * least, out=worth)
        if not urgent:
            np.copyto(worth, np.inf, where=worth >= least)
        return worth

    def _drop(self, slots: NDArray[np.int64]) -> None:
        keys = self.keys[slots]
        self.slots[keys] = -1
        self.words[slots] = FREE
        self.residents -= self._per_expert(keys)

    def _per_expert(self, keys: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.bincount(keys // self.neurons, minlength=self.residents.size)


def low(count: int | np.int64) -> np.int32:
    """The lower 32 bits: of two such, what lies between is exact as long as it is less than 2**31."""
    return np.int64(count).astype(np.int32)


def _resized(old: NDArray[Number], kept: int, capacity: int) -> NDArray[Number]:
    new = np.zeros(capacity + 1, old.dtype)
    new[:kept] = old[:kept]
    return new
