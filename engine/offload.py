"""What the layers of a model share whose rows do not fit device memory: the pool of rows and the way into it.

The up projections of all layers lie on the device, all rows in RAM, and some of them in the pool (DESIGN section 5).
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from ..models.errors import FloeError, UsageError
from ..models.heat import Heat
from ..models.packed import PackedLayer
from ..models.quantities import memory as size
from . import placement
from .cache import Keys, NeuronPool, Policy, Slots
from .devices import Device
from .events import Advanced, Notice
from .kv import Store
from .ranges import PREDICTORS, TRANSFERS
from .transfer import Transfer, Wanted

if TYPE_CHECKING:
    from .offloaded import Ahead, Untold
    from .predictor import Predictor
    from .streaming import Early


# A prefetch goes in pieces that stand or fall together: of so many rows at least, few enough that most of a wrong guess
# is never sent, and so many at most, since each costs the host some microseconds.
PIECE, PIECES = 200, 12


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts of the engine work; each can be switched off, to see what it is worth.

    None changes what is computed, only the order of sums: an answer differs by rounding, as between two processors.

    Attributes:
        eviction: what the pool gives up first, see cache.py. cpu: whether the CPU computes a share of the absent rows.
        whole: share of active neurons above which an absent expert is moved in one piece (CORM).
        predictor: what names the next layer's rows, see predictor.py; "none" fetches nothing ahead.
        transfer: how absent rows cross the link, see tuned_link.py.
    """

    eviction: Policy = "score"
    cpu: bool = True
    whole: float = placement.WHOLE
    predictor: str = "auto"
    transfer: Wanted = "auto"

    @classmethod
    def of(cls, advanced: Advanced) -> Parts:
        """By a person's settings.

        Raises:
            UsageError: there is no such predictor or transfer.
        """
        for what, value, choices in (
            ("predictor", advanced.predictor, PREDICTORS),
            ("transfer", advanced.transfer, TRANSFERS),
        ):
            if value not in choices:
                raise UsageError(
                    f"There is no {what} {value!r}", "", f"Set advanced.{what} to one of {', '.join(choices)}."
                )
        return cls(cpu=advanced.cpu_share, predictor=advanced.predictor, transfer=cast(Wanted, advanced.transfer))


class Offload:
    """The pool, its bytes, and what is on its way into them. One thread's: the engine's.

    Rows and the keys and values of a conversation share one piece of device memory, which never grows: rows lie at its
    beginning, and give way as keys and values need more at its end (`kv.Room`).

    Attributes:
        pool, rows: which rows are on the device, and their bytes (capacity, nbytes) there.
        sources: layer by layer all rows, (E * F, nbytes) uint8 in RAM.
        predictor: names what the next layer will need; None where nothing is fetched ahead.
        buffers: for prompts, two times the rows of one expert, (F, nbytes) each.
        marks: (E * F,) bool, for whoever compares sets of keys, and puts them back to False.
        notices: what a person should know, until somebody takes it.
        under_way: transfers into the pool that are not known to have arrived, the oldest first.
        ahead: what the next layer will probably need, until it was fetched or its turn has come.
        guessed: by layer, what was asked for ahead, to be compared with what its step needs: neurons, each once or once
            per token, and experts (B, K).
        early: of a prompt, the next layer's first expert in a buffer.
        untold: what layers have still to count, once the host has waited for it.
    """

    def __init__(
        self,
        device: Device,
        parts: Parts,
        layers: Sequence[PackedLayer],
        capacity: int,
        fixed: Mapping[str, int] | None = None,
        keys: int = 0,
    ) -> None:
        """A pool of `capacity` rows, or of as many as the layers have.

        Args:
            fixed: bytes of device memory for up projections ("up") and the dense part ("dense"), to be told.
            keys: bytes for keys and values, which rows use as well once `share` was called.

        Raises:
            ValueError: a pool without a row.
        """
        if capacity < 1:
            raise ValueError("a pool needs room for at least one row")
        experts, (_, neurons, nbytes) = len(layers[0].thresholds), layers[0].rows.data.shape
        self._all = len(layers) * experts * neurons
        capacity = min(capacity, self._all)
        self.device, self.parts = device, parts
        self._fixed = {"up": 0, "dense": 0, **(fixed or {})}
        self.predictor: Predictor | None = None
        self.sources = [layer.rows.data.view(-1, nbytes) for layer in layers]
        self.pool = NeuronPool(len(layers), experts, neurons, capacity, parts.eviction)
        self._keys, self._lent, self._nbytes = keys, 0, nbytes
        self._borrower: weakref.ref[Store] | None = None
        self._take(capacity * nbytes)
        self.buffers = [self._room(neurons * nbytes).view(-1, nbytes) for _ in range(2)]
        self.under_way: dict[Transfer, None] = {}
        self.untold: list[Untold] = []
        self.ahead: Ahead | None = None
        self.guessed: dict[int, tuple[Keys, Tensor]] = {}
        self.early: Early | None = None
        self._seen, self._peak = self.moved(), device.rates.link_bytes_s
        self.notices: list[Notice] = []
        self.marks = np.zeros(experts * neurons, np.bool_)
        self._least = min(capacity, neurons)  # rows: with fewer, a step takes many loads

    def _room(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device.place)

    def _take(self, nbytes: int) -> None:
        """Have so much memory for rows and what is lent."""
        self._memory = self._room(nbytes)
        self._fit()

    def _fit(self) -> None:
        """As many rows as there is room for beside what is lent."""
        capacity = min(self._all, (self._memory.numel() - self._lent) // self._nbytes)
        self.pool.resize(capacity)
        self.rows = self._memory[: capacity * self._nbytes].view(capacity, self._nbytes)

    def _give(self) -> None:
        """Give all memory back to the device, rows and all."""
        self.pool.resize(0)
        self._memory = self._room(0)
        self.rows = self._memory.view(0, self._nbytes)
        if self.rows.is_cuda:
            torch.cuda.empty_cache()

    def moved(self) -> tuple[int, float]:
        """Bytes that the link moved so far, and the seconds in which it was busy."""
        return self.device.link.bytes_moved, self.device.link.busy_s

    def sizes(self) -> dict[str, int]:
        """Bytes of device memory, by use."""
        used = self.pool.used * self._nbytes
        return {"pool": self.rows.nbytes, "pool_used": used, **self._fixed}

    def link_peak(self) -> float:
        """Bytes per second that the link moves when nothing holds it up."""
        return self._peak

    def collect(self) -> None:
        """Note what has arrived, and how fast."""
        moved, busy = self.moved()
        self.device.rates.observed("link", moved - self._seen[0], busy - self._seen[1])
        self._seen = moved, busy
        for transfer in self.device.link.finished():
            if transfer in self.under_way:  # others go to a prompt's buffers
                self.pool.filled(transfer.slots)
                del self.under_way[transfer]

    def transfer(
        self, layer: int, keys: Keys, target: Tensor, slots: Slots, *, urgent: bool, score: float = 0.0
    ) -> Transfer:
        """One of the rows of these neurons."""
        return Transfer(self.sources[layer], keys, target, slots, urgent, score, layer)

    def fetch(self, layer: int, keys: Keys, *, urgent: bool, score: float = 0.0) -> Transfer:
        """Ask for the rows of the first of these absent neurons that get a slot; `transfer.index` are those."""
        slots = self.pool.reserve(layer, keys, urgent=urgent)
        transfer = self.transfer(layer, keys[: slots.size], self.rows, slots, urgent=urgent, score=score)
        if slots.size:
            self.under_way[transfer] = None
            self.device.link.submit(transfer)
        return transfer

    def prefetch(self, layer: int, keys: Keys, score: float) -> bool:
        """Ask for the rows of these absent neurons behind everything urgent; False if the pool has no room for all.

        They go in pieces, so that those that have not begun can be given up.
        """
        slots = self.pool.reserve(layer, keys, urgent=False)
        piece = max(PIECE, -(-slots.size // PIECES))
        for start in range(0, slots.size, piece):
            part = slice(start, min(start + piece, slots.size))
            transfer = self.transfer(layer, keys[part], self.rows, slots[part], urgent=False, score=score)
            self.under_way[transfer] = None
            self.device.link.submit(transfer)
        return slots.size == keys.size

    def look(self) -> None:
        """Fetch what the next layer will probably need, if the device has found it by now. Nobody waits."""
        if self.ahead is not None and self.device.there(self.ahead.asked.copy):
            self.ahead.fetch()
            self.ahead = None

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

    def count(self) -> None:
        """Let layers count what they have still to count: waits for the device, so at the end of an answer."""
        untold, self.untold = self.untold, []
        for late, counts in zip(untold, self.device.fetched(*(late.result.counts for late in untold)), strict=True):
            late.layer.tell(late, counts)

    def settle(self) -> None:
        """Until nothing is on its way and no row is in use."""
        self.forget(None)
        for transfer in list(self.under_way):
            self.device.wait(transfer)
        self.collect()
        self.device.finish()
        self.pool.release()

    def share(self) -> None:
        """Let rows have the room of keys and values too, as long as those do not need it; before the pool is filled."""
        nbytes = self._memory.numel() + self._keys
        self._give()
        self._take(nbytes)

    def vacant(self) -> bool:
        """See `kv.Room`."""
        return self._borrower is None or self._borrower() is None

    def let(self, store: Store) -> None:
        """See `kv.Room`."""
        self._borrower = weakref.ref(store)
        self.lend(0)

    def lent(self) -> Tensor:
        """See `kv.Room`."""
        return self._memory[self._memory.numel() - self._lent :]

    def lend(self, nbytes: int) -> None:
        """See `kv.Room`; between two steps. Rows that lay there are fetched again when they are wanted."""
        if nbytes == self._lent:
            return
        left = (self._memory.numel() - nbytes) // self._nbytes
        if left < min(self._least, self.pool.capacity):
            raise FloeError(
                "This chat no longer fits the device's memory",
                f"Its keys and values need {size(nbytes)}, which leaves {max(0, left):,} rows of weights.",
                "Start a new chat, or allow more memory with --vram.",
            )
        self.settle()
        if self._lent <= self._keys < nbytes:
            self.notices.append(
                Notice(
                    "This chat takes memory from the pool of rows",
                    f"It is longer than the reserved context. {size(left * self._nbytes)} is left for rows, so answers "
                    "take longer. A new chat gives the memory back.",
                )
            )
        self._lent = nbytes
        self._fit()

    def resize(self, capacity: int) -> None:
        """Another size for the pool, between two steps; rows stay, as many as fit, and what is lent.

        Where there is no room for the old and the new one at once, all rows are given up and fetched again.

        Raises:
            torch.OutOfMemoryError: there is no room for the new size either.
        """
        self.settle()
        nbytes = capacity * self._nbytes + self._lent
        before, lent = self._memory, self.lent()
        try:
            memory = self._room(nbytes)
        except torch.OutOfMemoryError:
            memory = None
        if memory is None:
            self._take_anew(nbytes)
            return
        kept = min(capacity, self.pool.capacity) * self._nbytes
        memory[:kept] = before[:kept]
        memory[memory.numel() - self._lent :] = lent
        self._memory = memory
        self._fit()

    def make_room(self) -> bool:
        """Give a quarter of the pool back to the device after its memory ran out; False at the last rows.

        Whoever calls it holds no view of rows, keys or values: their memory would not come back.
        """
        capacity = self.pool.capacity * 3 // 4
        if capacity < self._least:
            return False
        self.settle()
        self._take_anew(capacity * self._nbytes + self._lent)
        self.notices.append(
            Notice(
                "The graphics card ran out of memory",
                f"The pool of rows is now smaller: {size(self.rows.nbytes)}. The answer continues.",
            )
        )
        return True

    def _take_anew(self, nbytes: int) -> None:
        """Have so much memory instead: all of the old one goes first, since there is no room for both."""
        lent = self.lent().to("cpu", copy=True)
        self._give()
        self._take(nbytes)
        self.lent().copy_(lent)

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
