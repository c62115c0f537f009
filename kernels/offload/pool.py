"""Which neuron's row is in which slot of a pool, which rows are evicted, and how much each neuron is used: the tables.

What a step does with them is compiled, see `cpu/pool_table.py`. Policies are in `engine/offload/eviction.py`.

Shapes: L layers, E experts, F neurons of each, S slots, P calls, N active neurons. A neuron's key is e · F + n within
its layer, and flat l · E · F + e · F + n.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .located import Slots, require

FREE, FILLING, READY = 0, 1, 2  # a slot's state
FINDS, BROUGHT, LAYER, FREE_COUNT, HAND, SPARE, VISITING, COMING, EVICTED, ASKED, MOST = range(
    11
)  # places in `RowTable.counters`

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
        counters: (11,) int64, see FINDS and so on; SPARE slots are for urgent rows, VISITING are visitors', COMING are
            filling, EVICTED rows gave way so far; of the rows that the last guess wanted, slots were ASKED for, and the
            next one's may be for MOST.
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
        self.counters = np.zeros(11, np.int64)
        self.counters[MOST] = self.width

    def release(self) -> None:
        """The kernels that read this step's rows have ended: they may be evicted, and visitors' slots are free."""
        self.busy[:] = 0
        self._put_free(self.visitors[: self.counters[VISITING]])
        self.counters[VISITING] = 0

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

    def recall(self) -> None:
        """The means were changed elsewhere: copy those of the rows in slots again."""
        self.kept[:] = self.means.raw.reshape(-1)[self.keys]

    def _have(self, cells: NDArray[np.void]) -> None:
        self.cells = cells
        self.states, self.keys, self.marks, self.kept = (cells[name] for name in CELL.names or ())

    def _put_free(self, slots: Slots) -> None:
        start = self.counters[FREE_COUNT]
        self.free[start : start + slots.size] = slots
        self.counters[FREE_COUNT] += slots.size

    def _drop(self, slots: NDArray[np.int64]) -> None:
        keys = self.keys[slots]
        self.slots[keys] = -1
        self.states[slots] = FREE
        self.residents -= self._per_expert(keys)

    def _per_expert(self, keys: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.bincount(keys // self.neurons, minlength=self.residents.size)


def _resized(old: NDArray[Number], kept: int, capacity: int) -> NDArray[Number]:
    new = np.zeros(capacity + 1, old.dtype)
    new[:kept] = old[:kept]
    return new
