"""What the layers of a model share whose rows do not fit device memory: the pool of rows and the way into it.

The up projections of all layers lie on the device, all rows in RAM, and some of them in the pool (DESIGN section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..models.heat import Heat
from ..models.packed import PackedLayer
from . import placement
from .cache import Keys, NeuronPool, Policy
from .devices import Device
from .events import Notice
from .transfer import Transfer

if TYPE_CHECKING:
    from .offloaded import Untold
    from .predictor import Predictor


# A prefetch goes in pieces that stand or fall together: of so many rows at least, few enough that most of a wrong guess
# is never sent, and so many at most, since each costs the host some microseconds.
PIECE, PIECES = 200, 12


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts of the engine work; each can be switched, to see what it is worth. None changes a token.

    Attributes:
        eviction: what the pool gives up first, see cache.py. cpu: whether the CPU computes a share of the absent rows.
        whole: share of active neurons above which an absent expert is moved in one piece (CORM).
        predictor: what names the next layer's rows, see predictor.py; "none" fetches nothing ahead.
    """

    eviction: Policy = "score"
    cpu: bool = True
    whole: float = placement.WHOLE
    predictor: str = "auto"


class Offload:
    """The pool, its bytes, and what is on its way into them. One thread's: the engine's.

    Attributes:
        pool, rows: which rows are on the device, and their bytes (capacity, nbytes) there.
        sources: layer by layer all rows, (E * F, nbytes) uint8 in RAM.
        predictor: names what the next layer will need; None where nothing is fetched ahead.
        buffers: for prompts, two times the rows of one expert, (F, nbytes) each.
        marks: (E * F,) bool, for whoever compares sets of keys, and puts them back to False.
        notices: what a person should know, until somebody takes it.
        under_way: transfers into the pool that are not known to have arrived, the oldest first.
        untold: what layers have still to count, once the host has waited for it.
    """

    def __init__(
        self,
        device: Device,
        parts: Parts,
        layers: Sequence[PackedLayer],
        capacity: int,
        fixed: Mapping[str, int] | None = None,
    ) -> None:
        """A pool of `capacity` rows, or of as many as the layers have.

        Args:
            fixed: bytes of device memory for up projections ("up") and the dense part ("dense"), to be told.

        Raises:
            ValueError: a pool without a row.
        """
        if capacity < 1:
            raise ValueError("a pool needs room for at least one row")
        experts, neurons, nbytes = layers[0].rows.data.shape
        capacity = min(capacity, len(layers) * experts * neurons)
        self.device, self.parts = device, parts
        self._fixed = {"up": 0, "dense": 0, **(fixed or {})}
        self.predictor: Predictor | None = None
        self.sources = [layer.rows.data.view(-1, nbytes) for layer in layers]
        self.pool = NeuronPool(len(layers), experts, neurons, capacity, parts.eviction)
        self.rows = self._room(capacity, nbytes)
        self.buffers = [self._room(neurons, nbytes) for _ in range(2)]
        self.under_way: dict[Transfer, None] = {}
        self.untold: list[Untold] = []
        self.notices: list[Notice] = []
        self.marks = np.zeros(experts * neurons, np.bool_)
        self._least = min(capacity, neurons)  # rows: with fewer, a step takes many loads

    def _room(self, capacity: int, nbytes: int) -> Tensor:
        return torch.empty((capacity, nbytes), dtype=torch.uint8, device=self.device.place)

    def moved(self) -> tuple[int, float]:
        """Bytes that the link moved so far, and the seconds in which it was busy."""
        return self.device.link.bytes_moved, self.device.link.busy_s

    def sizes(self) -> dict[str, int]:
        """Bytes of device memory, by use."""
        used = self.pool.used * self.rows.shape[1]
        return {"pool": self.rows.nbytes, "pool_used": used, **self._fixed}

    def link_peak(self) -> float:
        """Bytes per second that the link moves when nothing holds it up."""
        return self.device.rates.link_bytes_s

    def collect(self) -> None:
        """Note what has arrived."""
        for transfer in self.device.link.finished():
            if transfer in self.under_way:  # others go to a prompt's buffers
                self.pool.filled(transfer.slots)
                del self.under_way[transfer]

    def fetch(self, layer: int, keys: Keys, *, urgent: bool, score: float = 0.0) -> Transfer:
        """Ask for the rows of the first of these absent neurons that get a slot; `transfer.index` are those."""
        slots = self.pool.reserve(layer, keys, urgent=urgent)
        transfer = Transfer(self.sources[layer], keys[: slots.size], self.rows, slots, urgent, score, layer)
        if slots.size:
            self.under_way[transfer] = None
            self.device.link.submit(transfer)
        return transfer

    def prefetch(self, layer: int, keys: Keys, score: float) -> bool:
        """Ask for the rows of these absent neurons behind everything urgent; False if the pool has no room for all.

        They go in pieces, so that those that have not begun can be given up.
        """
        slots = self.pool.reserve(layer, keys, urgent=False)
        source, piece = self.sources[layer], max(PIECE, -(-slots.size // PIECES))
        for start in range(0, slots.size, piece):
            part = slice(start, min(start + piece, slots.size))
            transfer = Transfer(source, keys[part], self.rows, slots[part], False, score, layer)
            self.under_way[transfer] = None
            self.device.link.submit(transfer)
        return slots.size == keys.size

    def forget(self, layer: int | None) -> None:
        """Give up prefetches for a layer (None: for all) that have not begun."""
        for transfer in self.device.link.drop(layer):
            self.pool.abandon(transfer.slots)
            del self.under_way[transfer]

    def await_rows(self, layer: int, keys: Keys) -> float:
        """Until these rows of a layer, all on their way, have arrived; seconds that this took."""
        waited = 0.0
        self.marks[keys] = True
        wanted = [t for t in self.under_way if t.layer == layer and self.marks[t.index].any()]
        self.marks[keys] = False
        for transfer in wanted:
            waited += self.device.wait(transfer)
        self.collect()
        return waited

    def settle(self) -> None:
        """Until nothing is on its way and no row is in use."""
        self.forget(None)
        for transfer in list(self.under_way):
            self.device.wait(transfer)
        self.collect()
        self.device.finish()
        self.pool.release()

    def resize(self, capacity: int) -> None:
        """Another size for the pool, between two steps; rows stay, as many as fit.

        Where there is no room for the old and the new one at once, all rows are given up and fetched again.

        Raises:
            torch.OutOfMemoryError: there is no room for the new size either.
        """
        self.settle()
        kept, nbytes = min(capacity, self.pool.capacity), self.rows.shape[1]
        try:
            rows = self._room(capacity, nbytes)
            rows[:kept] = self.rows[:kept]
        except torch.OutOfMemoryError:
            self.pool.resize(0)
            self.rows = self._room(0, nbytes)
            rows = self._room(capacity, nbytes)
        self.pool.resize(capacity)
        self.rows = rows

    def make_room(self) -> bool:
        """Give a quarter of the pool back to the device after its memory ran out; False at the last rows."""
        capacity = self.pool.capacity * 3 // 4
        if capacity < self._least:
            return False
        self.settle()
        self.pool.resize(0)
        nbytes = self.rows.shape[1]
        self.rows = self._room(0, nbytes)  # the old rows go first: there is no room to copy any
        if self.rows.is_cuda:
            torch.cuda.empty_cache()
        self.rows = self._room(capacity, nbytes)
        self.pool.resize(capacity)
        self.notices.append(
            Notice(
                "The graphics card ran out of memory",
                f"The pool of rows was made smaller, to {capacity * nbytes / 2**20:,.0f} MB. The answer goes on.",
            )
        )
        return True

    def warm(self, heat: Heat) -> None:
        """Fill the pool with the neurons that were used most, and wait for them.

        Raises:
            ValueError: heat of another model's shape.
        """
        layers, keys = self.pool.warm(heat)
        for layer in range(len(self.sources)):
            self.fetch(layer, keys[layers == layer], urgent=False)
        for transfer in list(self.under_way):
            self.device.wait(transfer)
        self.collect()

    def close(self) -> None:
        """End what runs beside the engine."""
        self.forget(None)
        self.device.close()
