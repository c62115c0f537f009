"""Which neuron rows lie in device memory, where, and which give way: one pool for all layers (DESIGN section 5).

Bookkeeping only, on one thread: the bytes lie in a tensor (capacity, row bytes) that the device owns. Caching is per
neuron, as CORM's limitations ask for, and no expert has a share of its own. A slot is free, filling (its row is on the
way) or ready. It keeps its row while that is filling, and until `release` if the step that runs uses it.

A neuron's key within its layer is e * F + n. The tables and the work on them are `kernels/pool.py`'s; here is by what
rule they are kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..kernels.cpu.native_pool import make
from ..kernels.pool import FREE_COUNT, STEP, Keys, Located, Rule, Slots
from ..models.heat import Heat
from . import uses
from .uses import Uses

__all__ = ["Found", "Keys", "NeuronPool", "Policy", "Slots"]

Policy = Literal["score", "lru", "fifo"]

# Eviction looks at so many slots for each that is wanted, and takes those worth least.
SAMPLE, SMALLEST_WINDOW = 6, 256
SPARED = 32  # at most so small a part of the pool is kept free for rows to come
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
        layers: (L, E * F), the same. reason: in words, what works on the tables and why.
    """

    def __init__(self, layers: int, experts: int, neurons: int, capacity: int, policy: Policy = "score") -> None:
        if policy not in ("score", "lru", "fifo"):
            raise ValueError(f"there is no policy {policy!r}: choose score, lru or fifo")
        self._uses = Uses(layers, experts, neurons)
        rule = Rule(
            by_score=policy == "score",
            marks_use=policy == "lru",
            sample=SAMPLE,
            smallest_window=SMALLEST_WINDOW,
            prefetch_worth=PREFETCH_WORTH / experts,
            turn=TURN,
            use_rate=uses.USE_RATE,
            largest_growth=uses.LARGEST_GROWTH,
        )
        self._table, self.reason = make(layers, experts, neurons, rule, self._uses.means)
        self.slots = self._table.slots.reshape(layers, experts, neurons)
        self.layers = self._table.slots.reshape(layers, experts * neurons)
        self._table.resize(capacity)

    def locate(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> Located:
        """Where a step's active neurons are. Notes their use; those present stay until `release`.

        Args:
            experts: (P,) of each call. offsets, neurons: (P + 1,) and (N,) as in `Active`; several calls may name the
                same neuron. width: neurons of one of these experts, F or less where they are parts of the layer's.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        return self._table.locate(layer, experts, offsets, neurons, width)

    def find(self, layer: int, keys: Keys) -> Found:
        """`locate` for neurons in any order, which may be named twice.

        Raises:
            ValueError: a key out of range.
        """
        _check(keys)
        experts, neurons = np.divmod(keys, self.slots.shape[2])
        located = self.locate(layer, experts, np.arange(keys.size + 1), neurons, self.slots.shape[2])
        slots = np.full(keys.size, -1, np.int32)
        ready, coming = np.zeros(keys.size, np.bool_), np.zeros(keys.size, np.bool_)
        for part, mask in ((located.ready, ready), (located.coming, coming)):
            slots[part.at], mask[part.at] = part.places, True
        return Found(slots, ready, coming)

    def keys(self, layer: int, slots: NDArray[np.int64]) -> Keys:
        """The neurons of a layer whose rows these slots hold or wait for."""
        return self._table.keys[slots].astype(np.int64) - layer * self.layers.shape[1]

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
        _check(keys)
        return self._table.reserve(layer, keys, urgent=urgent)

    def spare(self, wanted: int) -> None:
        """Give up the rows worth least until so many slots are free, for urgent rows that are asked for later.

        Choosing them takes longer than all else in a step; so it can be done while the engine waits anyway. A pool that
        is small beside that keeps its rows: they would be missed sooner than time was gained.
        """
        if wanted <= self.capacity // SPARED:
            self._table.spare(wanted)

    def filled(self, slots: Slots) -> None:
        """The bytes of these filling rows are in their slots.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        self._table.settle(slots, arrived=True)

    def abandon(self, slots: Slots) -> None:
        """The transfers into these filling slots were dropped: their rows are absent, the slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        self._table.settle(slots, arrived=False)

    def release(self) -> None:
        """The kernels that read rows of this step have ended: the rows may go. Those that are filling stay."""
        self._table.counters[STEP] += 1

    def heard(self, layer: int, scores: Sequence[float]) -> None:
        """The router's scores (E,) of this step, after softmax; the mean of several tokens. Ignored if not finite."""
        self._uses.heard(layer, scores)

    def likeliest(self, layer: int) -> int:
        """The expert that the router has favoured of late."""
        return int(self._uses.means.recent[layer].argmax())

    def resident(self, layer: int) -> NDArray[np.float32]:
        """(E,) share of each expert's neurons that are ready."""
        _, experts, neurons = self.slots.shape
        return (self._table.residents[layer * experts : (layer + 1) * experts] / neurons).astype(np.float32)

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self._table.capacity

    @property
    def used(self) -> int:
        """Slots that hold a row or wait for one."""
        return self.capacity - int(self._table.counters[FREE_COUNT])

    def resize(self, capacity: int) -> None:
        """More slots, all free, or fewer: the rows in slots from `capacity` on are dropped.

        Raises:
            ValueError: one of those is filling or in use, or capacity is negative. Nothing has changed then.
        """
        self._table.resize(capacity)

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
        self._table.recall()
        worth = (heat.scores[..., None] * heat.uses).reshape(-1)
        count = min(self.capacity, worth.size)
        best = np.argpartition(-worth, count - 1)[:count] if 0 < count < worth.size else np.arange(count)
        return np.divmod(best[np.argsort(-worth[best], kind="stable")], self.layers.shape[1])


def _check(keys: Keys) -> None:
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ValueError(f"keys must be (N,) int64, not {keys.ndim}-D {keys.dtype}")
