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

from ..checks import index
from .located import Keys, Slots, require

FREE, FILLING, READY = 0, 1, 2  # a slot's state
# So many of the rows that a step copies are examined, whether they are worth keeping; the next ones in each step. What
# is needed often is soon copied again.
EXAMINED = 2048
REMEMBERED = 8  # each of so many times that a row is used, its mean is copied into its cell
BAR_SLOTS = 1024  # of a window, whose rows set the bar
FEWER = 512  # as many slots are kept free as the last steps needed at most, less this small part for each step since
FINDS, BROUGHT, LAYER, FREE_COUNT, HAND, SPARE, VISITING, COMING = range(8)  # places in `RowTable.counters`

# A slot's fields, side by side, so that scanning many reads memory once.
CELL = np.dtype([("state", np.int32), ("key", np.int32), ("mark", np.int32), ("mean", np.float32)])


Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """The parameters of eviction. Each is finite and in its range, so that every worth is a number that has an order.

    Attributes:
        by_score: by what a row is worth; else the smallest mark is evicted first.
        marks_use: whether `locate` marks rows with its time, as an LRU does.
        sample, smallest_window: eviction examines `sample` slots for each one wanted, and at least `smallest_window`.
        bar: a step's row stays in the pool only if it is worth more than this share of the rows in the last window.
        prefetch_worth: what a prefetched row is worth until its turn, and the most that a row is worth which gives way
            to one. turn: rows of the layer that has just run count this much less, others in proportion.
        use_rate: share of a new observation in the mean activity. largest_growth: see `Means`.
        score_rate, habit_rate: likewise in the means of the router's scores, recent and long-run.
    """

    by_score: bool
    marks_use: bool
    sample: int
    smallest_window: int
    bar: float
    prefetch_worth: float
    turn: float
    use_rate: float
    largest_growth: float
    score_rate: float
    habit_rate: float

    def __post_init__(self) -> None:
        """Raises ValueError: numbers out of range, with which a search would not end or a worth be no number."""
        if not 1 <= min(self.sample, self.smallest_window) <= max(self.sample, self.smallest_window) < 1 << 31:
            raise ValueError(f"eviction must look at 1 to 2^31 - 1 slots, not {self.sample} and {self.smallest_window}")
        for name in ("bar", "use_rate"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be from 0 up to 1, not {value}")
        for name in ("turn", "score_rate", "habit_rate"):
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, not {value}")
        for name, least in (("prefetch_worth", 0), ("largest_growth", 1)):
            if not least <= (value := getattr(self, name)) < np.finfo(np.float32).max:
                raise ValueError(f"{name} must be a finite number from {least} on, not {value}")


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

    A row that a step copies is a visitor: it has a slot until `release`, in no table. `keep` gives those a place that
    are worth it, and another row's slot becomes free instead. So rows that are seldom used displace nothing.

    Attributes:
        slots: (L · E · F,) int32 by flat key, -1 for an absent neuron. residents: (L · E,) int64, ready rows.
        cells: (S + 1,) of `CELL` by slot, one more than there are: slot -1 of an absent neuron reads and writes
            nobody's. Parts of them by themselves are states; keys: flat; marks: by score the find for which a row was
            prefetched, else when it was used or brought, the lower 32 bits of the count; kept: `Means.raw` of the row's
            neuron when it was last copied, unless there is a slot for every row.
        busy: (L · E,) uint8, whether the running step uses the expert: none of its rows is evicted.
        free: (S,) int32, a stack. visitors: (S,) int32, slots. bar: (1,) float32, see `EvictionRule`.
        counters: (8,) int64, see FINDS and so on; SPARE slots are for urgent rows, VISITING are visitors', COMING are
            filling.
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
        self.free, self.visitors = np.zeros((2, 0), np.int32)
        self.busy, self.bar = np.zeros(layers * experts, np.uint8), np.zeros(1, np.float32)
        self.counters = np.zeros(8, np.int64)

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
        taken = self._taken(keys.size, urgent)
        keys = keys[: taken.size]
        self._book(layer, keys, taken, urgent)
        return taken

    def visit(self, wanted: int) -> Slots:
        """Slots for visitors, free ones first; rows are evicted if there are too few. Maybe fewer than wanted.

        Raises:
            ValueError: fewer than none.
        """
        if wanted < 0:
            raise ValueError(f"{wanted} rows cannot visit")
        wanted = min(wanted, self.capacity)
        taken, start = self._taken(wanted, urgent=True), self.counters[VISITING]
        self.visitors[start : start + taken.size] = taken
        self.counters[VISITING] += taken.size
        return taken

    def keep(self, layer: int, keys: Keys, slots: Slots, spared: int) -> Slots:
        """Give a place to those of the last visitors that are worth it, and evict as many rows as are missing then.

        Args:
            keys, slots: (N,) of all rows of the last `visit`, each once. spared: by score slots are kept free for the
                next step's visitors, this small part of the pool at most; free ones beyond are filled in any case.

        Returns:
            (M,) the slots of the rows that stay; they are filling.

        Raises:
            ValueError: other slots than the last visitors', or a key out of range or present. Nothing has changed then.
        """
        index("layer", layer, self.layers)
        require("keys", keys, np.int64, (keys.size,))
        require("slots", slots, np.int32, (keys.size,))
        first = int(self.counters[VISITING]) - keys.size
        if first < 0 or not np.array_equal(self.visitors[first : first + keys.size], slots):
            raise ValueError("rows to be kept must be the last visitors")
        if keys.size and not 0 <= int(keys.min()) <= int(keys.max()) < self.width:
            raise ValueError(f"a key is out of range 0..{self.width - 1}")
        if (self.slots[layer * self.width + keys] != -1).any() or np.unique(keys).size != keys.size:
            raise ValueError("a visitor has a slot already")
        if spared < 1:
            raise ValueError(f"a pool cannot keep 1 / {spared} of itself free")
        spare = int(self.counters[SPARE])
        spare = min(max(keys.size, spare - spare // FEWER), self.capacity // spared)
        spare = self.counters[SPARE] = 0 if self.holds_all or not self.rule.by_score else spare
        surplus = max(0, int(self.counters[FREE_COUNT] + self.counters[VISITING]) - spare)
        stays = self._worthy(layer, keys, surplus)
        kept = slots[stays]
        for at in stays[::-1]:  # the last visitor moves to the place of one that stays
            self.counters[VISITING] -= 1
            self.visitors[first + at] = self.visitors[self.counters[VISITING]]
        self._book(layer, keys[stays], kept, urgent=True)
        if keys.size and not self.holds_all:
            missing = spare - int(self.counters[FREE_COUNT] + self.counters[VISITING])
            self._put_free(self._evict(max(0, missing), urgent=True))
        return kept

    def release(self) -> None:
        """The kernels that read this step's rows have ended: they may be evicted, and visitors' slots are free."""
        self.busy[:] = 0
        self._put_free(self.visitors[: self.counters[VISITING]])
        self.counters[VISITING] = 0

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """These filling rows have arrived, or never will: then they are absent and their slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        require("slots", slots, np.int32, (slots.size,))
        if slots.size and not 0 <= int(slots.min()) <= int(slots.max()) < self.capacity:
            raise ValueError(f"a slot is out of range 0..{self.capacity - 1}")
        if (self.states[slots] != FILLING).any() or np.unique(slots).size != slots.size:
            raise ValueError("a slot is not filling, or named twice")
        self.counters[COMING] -= slots.size
        if arrived:
            self.states[slots] = READY
            self.residents += self._per_expert(self.keys[slots])
        else:
            self.states[slots] = FREE
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
        states, experts = self.states[kept:before], self.keys[kept:before] // self.neurons
        used = (states == FILLING) | ((states == READY) & (self.busy[experts] != 0))
        if self.counters[VISITING] or used.any():
            raise ValueError("rows in the slots to be removed are filling or in use")
        self.recall()
        self._drop(kept + np.flatnonzero(states))
        free = self.free[: self.counters[FREE_COUNT]]
        fresh = np.arange(capacity - 1, before - 1, -1, dtype=np.int32)
        self._have(_resized(self.cells, kept, capacity))
        self.free, self.visitors = np.zeros((2, capacity), np.int32)
        self.counters[FREE_COUNT] = self.counters[HAND] = self.counters[SPARE] = 0
        self._put_free(np.concatenate([fresh, free[free < capacity]]))
        self.capacity = capacity

    def remember(self, slots: Slots) -> None:
        """Copy the means of the rows in these slots."""
        if not self.holds_all:
            self.kept[slots] = self.means.raw.reshape(-1)[self.keys[slots]]

    def recall(self) -> None:
        """The means were changed elsewhere: copy those of the rows in slots again."""
        self.kept[:] = self.means.raw.reshape(-1)[self.keys]

    @property
    def holds_all(self) -> bool:
        """Whether there is a slot for every row, so that none gives way."""
        return self.capacity >= self.slots.size

    def _have(self, cells: NDArray[np.void]) -> None:
        self.cells = cells
        self.states, self.keys, self.marks, self.kept = (cells[name] for name in CELL.names or ())

    def _taken(self, wanted: int, urgent: bool) -> Slots:
        """Free slots, and those of evicted rows if these are too few."""
        end, spare = int(self.counters[FREE_COUNT]), 0 if urgent else int(self.counters[SPARE])
        start = max(0, end - wanted, min(end, spare - int(self.counters[VISITING])))
        self.counters[FREE_COUNT] = start
        taken = self.free[start:end][::-1].copy()
        if taken.size == wanted:
            return taken
        return np.concatenate([taken, self._evict(wanted - taken.size, urgent)])

    def _worthy(self, layer: int, keys: Keys, surplus: int) -> Keys:
        """Which of the last visitors stay: the first ones, as many as there is room for in any case, and of some others
        those that are worth more than the bar.
        """
        if not self.rule.by_score or surplus >= keys.size:
            return np.arange(keys.size)
        rest = keys.size - surplus
        looked = surplus + (self.counters[BROUGHT] * EXAMINED + np.arange(min(EXAMINED, rest))) % rest
        some = keys[np.sort(looked)]
        worth = self.means.raw[layer][some] * self._factors()[layer * self.experts + some // self.neurons]
        return np.concatenate([np.arange(surplus), np.sort(looked)[worth > self.bar[0]]])

    def _book(self, layer: int, keys: Keys, slots: Slots, urgent: bool) -> None:
        """These rows are on their way into their slots from now on."""
        mark = self.counters[FINDS]
        self.counters[BROUGHT] += 1
        self.counters[COMING] += slots.size
        self.slots[layer * self.width + keys] = slots
        self.states[slots] = FILLING
        self.keys[slots] = keys + layer * self.width
        self.kept[slots] = self.means.raw[layer][keys]
        if not self.rule.by_score:
            mark += self.counters[BROUGHT]
        elif not urgent:
            mark += 1 + (layer - self.counters[LAYER] - 1) % self.layers
        self.marks[slots] = low(mark)
        if urgent:
            self.busy[layer * self.experts + keys // self.neurons] = 1

    def _put_free(self, slots: Slots) -> None:
        start = self.counters[FREE_COUNT]
        self.free[start : start + slots.size] = slots
        self.counters[FREE_COUNT] += slots.size

    def _evict(self, wanted: int, urgent: bool) -> Slots:
        """Evict up to `wanted` rows that are ready and not in use; returns their slots. Sets the bar anew."""
        target, count = max(self.rule.sample * wanted, self.rule.smallest_window), 0
        enough, left = max(target // 2, wanted), self.capacity if wanted else min(target, self.capacity)
        first = hand = int(self.counters[HAND])
        worths = [np.zeros(0, np.float32)]
        # If much is in use, a window has too few to choose from, and the hand continues, at most once round.
        while left and count < enough:
            end = min(hand + min(target, left), self.capacity)
            ready = (self.states[hand:end] == READY) & (self.busy[self.keys[hand:end] // self.neurons] == 0)
            worth = self._worth(slice(hand, end), urgent)
            np.copyto(worth, np.inf, where=~ready)
            worths.append(worth)
            count += np.count_nonzero(ready)
            left -= end - hand
            hand = end % self.capacity
        self.counters[HAND] = hand
        worth = np.concatenate(worths)
        some = worth[:BAR_SLOTS]
        if urgent and self.rule.by_score and (loose := np.sort(some[some < np.inf])).size:
            self.bar[0] = loose[int(self.rule.bar * loose.size)]
        best = np.argpartition(worth, wanted)[:wanted] if wanted < worth.size else np.arange(worth.size)
        best = best[worth[best] < np.inf]
        evicted = (first + best) % self.capacity if best.size else best
        self._drop(evicted)
        return evicted.astype(np.int32)

    def _factors(self) -> NDArray[np.float32]:
        """(L · E,) what the stored means are multiplied by: score, turn, growth."""
        means = self.means
        away = (np.arange(self.layers) - self.counters[LAYER] - 1) % self.layers
        turns = 1 - self.rule.turn * away / self.layers
        return np.fmax((means.recent * turns[:, None] / means.growth).astype(np.float32), 0).reshape(-1)

    def _worth(self, window: slice, urgent: bool) -> NDArray[np.floating[Any]]:
        """The worth of the rows in a window of slots by the rule; infinite if more than a prefetch may replace."""
        counters, keys = self.counters, self.keys[window]
        if not self.rule.by_score:
            return -(low(counters[FINDS] + counters[BROUGHT]) - self.marks[window]).view(np.uint32).astype(np.float64)
        worth = self.kept[window] * self._factors()[keys // self.neurons]
        promised, least = self.marks[window] - low(counters[FINDS]) > 0, np.float32(self.rule.prefetch_worth)
        np.maximum(worth, promised * least, out=worth)
        if not urgent:
            np.copyto(worth, np.inf, where=worth >= least)
        return worth

    def _drop(self, slots: NDArray[np.int64]) -> None:
        keys = self.keys[slots]
        self.slots[keys] = -1
        self.states[slots] = FREE
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
