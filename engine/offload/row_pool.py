"""Which neurons' rows are in device memory, and in which slots: one pool for all layers.

Bookkeeping only, on one thread: the bytes are in `device_memory.py`'s tensor. Caching is per neuron, as CORM's
limitations suggest, and experts have no fixed shares. A slot is free, filling (its row is on the way) or ready, or lent
to a row that a step copies: such a visitor stays only if it is worth more than others. A slot keeps its row while
filling, and until `release` if the running step uses its expert. `eviction.py` says which rows give way.

A neuron's key within its layer is e * F + n. The tables and the work on them are in `kernels/cpu/pool_table.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...kernels.cpu.pool_table import PoolTable
from ...kernels.offload.located import Keys, Slots
from ...kernels.offload.placing import Ahead, Found, Placed, Way
from ...kernels.offload.pool import EVICTED, FREE_COUNT, VISITING
from ...kernels.offload.sharing import Lanes
from ...models.pack.usage_file import Heat
from . import eviction
from .eviction import Policy, Uses

__all__ = ["Keys", "RowPool", "Slots"]

SPARED = 8  # at most this small part of the pool is kept free for visitors


class RowPool:
    """The slot table of all layers.

    Attributes:
        slots: (L, E, F) int32, -1 for an absent neuron; an assigned slot may still be filling. To be read only.
        layers: (L, E * F), the same. table: all of it.
    """

    def __init__(self, layers: int, experts: int, neurons: int, capacity: int, policy: Policy = "score") -> None:
        """Raises ValueError: no such policy, or sizes that no pool has. NativeUnavailableError: no compiled library."""
        self._uses = Uses(layers, experts, neurons)
        self.table = PoolTable(layers, experts, neurons, eviction.rule(policy, experts), self._uses.means)
        self.slots = self.table.slots.reshape(layers, experts, neurons)
        self.layers = self.table.slots.reshape(layers, experts * neurons)
        self.table.resize(capacity)

    def place(self, found: Found, lanes: Lanes, way: Way | None = None) -> Placed:
        """Where a step's active neurons are, and which absent ones visit. All of these stay until `release`.

        Args:
            found: several calls may name the same neuron. way: to send for copied rows at once.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        return self.table.place(found, lanes, way)

    def note(self, found: Found) -> None:
        """Record the use of a step's neurons. What the step waits for is asked for before.

        Raises:
            ValueError: an index out of range. Nothing has changed then.
        """
        self.table.note(found)

    def ahead(self, guess: Found, way: Way | None = None) -> Ahead:
        """Slots for the absent neurons of a guess, see `reserve`, those of the calls that weigh most first."""
        return self.table.ahead(guess, way)

    def right(self, found: Found, guessed: NDArray[np.int32]) -> int:
        """How many of a step's active neurons are among these keys."""
        return self.table.right(found, guessed)

    def keys(self, layer: int, slots: NDArray[np.integer[Any]]) -> Keys:
        """The neurons of a layer whose rows these slots hold or wait for."""
        return self.table.keys[slots].astype(np.int64) - layer * self.layers.shape[1]

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
        return self.table.reserve(layer, keys, urgent=urgent)

    def visit(self, wanted: int) -> Slots:
        """Slots for visitors, at most as many as wanted, until `release`."""
        return self.table.visit(wanted)

    def keep(self, layer: int, keys: Keys, slots: Slots) -> Slots:
        """Let those of the last visitors stay that are worth it, and make room for as many in the next step. What the
        step waits for is asked for before.

        Args:
            keys, slots: (N,) of all of them.

        Returns:
            (M,) the slots of those that stay, filling until they are given to `filled`.

        Raises:
            ValueError: other slots, or a key out of range or present. Nothing has changed then.
        """
        return self.table.keep(layer, keys, slots, SPARED)

    def filled(self, slots: Slots) -> None:
        """The bytes of these filling rows are in their slots.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        self.table.settle(slots, arrived=True)

    def abandon(self, slots: Slots) -> None:
        """The transfers into these filling slots were dropped: their rows are absent and the slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice. Nothing has changed then.
        """
        self.table.settle(slots, arrived=False)

    def release(self) -> None:
        """The kernels that read this step's rows have ended: the rows may be evicted, and visitors leave."""
        self.table.release()

    def favoured(self, layer: int) -> list[int]:
        """All experts, those that the router has favoured recently first."""
        return (-self._uses.means.recent[layer]).argsort(kind="stable").tolist()

    def resident(self, layer: int) -> NDArray[np.float32]:
        """(E,) share of each expert's neurons that are ready."""
        _, experts, neurons = self.slots.shape
        return (self.table.residents[layer * experts : (layer + 1) * experts] / neurons).astype(np.float32)

    @property
    def capacity(self) -> int:
        """Slots in all."""
        return self.table.capacity

    @property
    def used(self) -> int:
        """Slots that hold a row or wait for one that is to stay."""
        return self.capacity - int(self.table.counters[FREE_COUNT] + self.table.counters[VISITING])

    @property
    def evicted(self) -> int:
        """Rows that gave way to others so far."""
        return int(self.table.counters[EVICTED])

    def resize(self, capacity: int) -> None:
        """More slots, all free, or fewer: the rows in slots from `capacity` on are dropped.

        Raises:
            ValueError: one of those is filling or in use, or capacity is negative. Nothing has changed then.
        """
        self.table.resize(capacity)

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
        self.table.recall()
        worth = (heat.scores[..., None] * heat.uses).reshape(-1)
        count = min(self.capacity, worth.size)
        best = np.argpartition(-worth, count - 1)[:count] if 0 < count < worth.size else np.arange(count)
        return np.divmod(best[np.argsort(-worth[best], kind="stable")], self.layers.shape[1])


def _check(keys: Keys) -> None:
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise ValueError(f"keys must be (N,) int64, not {keys.ndim}-D {keys.dtype}")
