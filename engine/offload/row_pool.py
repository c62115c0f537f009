"""Which neurons' rows are in device memory, and in which slots: one pool for all layers.

Bookkeeping only, on one thread: the bytes are in `device_memory.py`'s tensor. Caching is per neuron, as CORM's
limitations suggest, and experts have no fixed shares. A slot is free, filling (its row is on the way) or ready. It
keeps its row while filling, and until `release` if the running step uses it. `eviction.py` says which rows give way.

A neuron's key within its layer is e * F + n. The tables and the work on them are in `kernels/pool.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.cpu.native_pool import make
from ...kernels.located import Keys, Located, Slots
from ...kernels.pool import FREE_COUNT, STEP
from ...kernels.types import Active
from ...models.pack.usage_file import Heat
from . import eviction
from .eviction import Policy, Uses

__all__ = ["Keys", "RowPool", "Slots", "keys_of"]

SPARED = 32  # at most this small part of the pool is kept free for future rows


def keys_of(experts: Tensor, active: Active, width: int) -> Keys:
    """(N,) keys of the active neurons of calls of experts (P,), each of `width` neurons: F, or less for parts of one.

    A neuron of an expert has the same key as that of the expert's part.
    """
    starts = experts.numpy() * width
    return np.repeat(starts, np.diff(active.offsets.numpy())) + active.neurons.numpy()


class RowPool:
    """The slot table of all layers.

    Attributes:
        slots: (L, E, F) int32, -1 for an absent neuron; an assigned slot may still be filling. To be read only.
        layers: (L, E * F), the same. reason: in words, which code works on the tables and why.
        marks: (E * F,) bool, all False: scratch space for comparing sets of keys; users reset what they set.
    """

    def __init__(self, layers: int, experts: int, neurons: int, capacity: int, policy: Policy = "score") -> None:
        """Raises ValueError: no such policy, or sizes that no pool has."""
        self._uses = Uses(layers, experts, neurons)
        self._table, self.reason = make(layers, experts, neurons, eviction.rule(policy, experts), self._uses.means)
        self.slots = self._table.slots.reshape(layers, experts, neurons)
        self.layers = self._table.slots.reshape(layers, experts * neurons)
        self.marks = np.zeros(experts * neurons, np.bool_)
        self._table.resize(capacity)

    def locate(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> Located:
        """Where a step's active neurons are. Records their use; those present stay until `release`.

        Args:
            experts: (P,) of each call. offsets, neurons: (P + 1,) and (N,) as in `Active`; several calls may name the
                same neuron. width: neurons of one of these experts, F or less where they are parts of the layer's.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        return self._table.locate(layer, experts, offsets, neurons, width)

    def keys(self, layer: int, slots: NDArray[np.int64]) -> Keys:
        """The neurons of a layer whose rows these slots hold or wait for."""
        return self._table.keys[slots].astype(np.int64) - layer * self.layers.shape[1]

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """Slots for the first M of these absent neurons; the rows that were in them are evicted.

        With `urgent` the running step needs the rows: they stay until `release`, and M is N unless all other slots
        are filling or in use. Without, it is a prefetch: under the policy "score" it replaces only rows worth less than
        `eviction.PREFETCH_WORTH`, and its own rows are worth that until their layer's turn; so no prefetch displaces
        another.

        Returns:
            (M,) int32. Each is filling until it is given to `filled` or `abandon`.

        Raises:
            ValueError: a key out of range, present or named twice. Nothing has changed then.
        """
        _check(keys)
        return self._table.reserve(layer, keys, urgent=urgent)

    def spare(self, wanted: int) -> None:
        """Evict the rows worth least until this many slots are free, for later urgent rows.

        Choosing them takes longer than all else in a step, so it is done while the engine waits anyway. A pool that is
        small in comparison keeps its rows: they would be missed.
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
        """The transfers into these filling slots were dropped: their rows are absent and the slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        self._table.settle(slots, arrived=False)

    def release(self) -> None:
        """The kernels that read this step's rows have ended: the rows may be evicted. Filling ones stay."""
        self._table.counters[STEP] += 1

    def heard(self, layer: int, scores: Sequence[float]) -> None:
        """Record the router's scores (E,) of this step, after softmax; the mean over several tokens. Ignored if not
        finite.
        """
        self._uses.heard(layer, scores)

    def likeliest(self, layer: int) -> int:
        """The expert that the router has favoured recently."""
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
        """How much each expert and neuron was used so far, for the next start."""
        return self._uses.heat()

    def warm(self, heat: Heat) -> tuple[NDArray[np.int64], Keys]:
        """Start from earlier use.

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
