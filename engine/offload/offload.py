"""The state shared by the layers of a model whose rows do not fit device memory: the pool of rows, and its resizing.

The up projections of the pool's layers are on the device, all their rows in RAM, and some of them in the pool.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from ...kernels.layouts import RowLayout
from ...kernels.weights import ExpertRows
from ...models.errors import FloeError, UsageError
from ...models.pack.packed_model import PackedLayer
from ...models.pack.usage_file import Heat
from ...models.quantities import memory as size
from ..events import Advanced, CardRows, Notice
from ..ranges import PREDICTORS, TRANSFERS
from .device import Device
from .device_memory import ALIGNED, DeviceMemory
from .eviction import Policy
from .expert_ring import ExpertRing
from .links.transfer import TransferMode
from .looking import Looking
from .mix import Mix
from .predictor import Predictor
from .row_pool import RowPool
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Parts:
    """Which parts of the engine are on; each can be switched off, to measure its effect.

    None changes what is computed, only the order of sums: answers differ by rounding, as between two processors.

    Attributes:
        eviction: what the pool evicts first, see eviction.py. cpu: whether the CPU computes a share of absent rows.
        predictor: predicts the next layer's rows, see predictor.py; "none" prefetches nothing.
        transfer: how absent rows cross the link, see tuned_link.py.
        mix: where each layer's experts are; None: as planned, see `planning/mix_choice.py`.
        division: layers with experts of each of several cards; empty: as planned, see `planning/several/division.py`.
    """

    eviction: Policy = "score"
    cpu: bool = True
    predictor: str = "auto"
    transfer: TransferMode = "auto"
    mix: Mix | None = None
    division: tuple[int, ...] = ()

    @classmethod
    def of(cls, advanced: Advanced) -> Parts:
        """The parts by the user's settings.

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
        return cls(cpu=advanced.cpu_share, predictor=advanced.predictor, transfer=cast(TransferMode, advanced.transfer))


class Offload:
    """The pool, its bytes, and the transfers into them. Only the engine thread uses it.

    Rows and the keys and values of a conversation share one piece of device memory: rows give way as keys and values
    need more of it (`kv.Room`).

    Attributes:
        pool: which rows are on the device. memory: their bytes. scheduler: what is on its way.
        pooled: the model's layers that the pool serves -> their numbers in its tables.
        predictors: predict what the next layer will need; none if nothing is prefetched. looking: which of them pays in
            which layers; None: the first in all. tried: makes `looking` for predictors of these names if measured.
        ring: through which a prompt's experts stream.
        notices: for the user, until collected.
    """

    def __init__(
        self,
        device: Device,
        parts: Parts,
        layers: Sequence[PackedLayer],
        capacity: int,
        uses: Mapping[str, int] | None = None,
        keys: int = 0,
        mix: Mix | None = None,
        first: int = 0,
    ) -> None:
        """A pool of `capacity` rows, or fewer if its layers have fewer.

        Args:
            layers: of the model. mix: which of them the pool serves; None: all. first: the number of the first one that
                `mix` is about, where other cards have others.
            uses: bytes of device memory by use, of which those of up projections and the dense part are shown.
            keys: bytes for keys and values, which rows may use too once `share` was called.

        Raises:
            ValueError: a pool without a row.
        """
        which = range(len(layers)) if mix is None else [first + layer for layer in mix.pooled]
        if capacity < 1 and which:
            raise ValueError("a pool needs room for at least one row")
        self.pooled = {layer: number for number, layer in enumerate(which)}
        experts, (_, neurons, nbytes) = len(layers[0].thresholds), layers[0].rows.data.shape
        total = len(which) * experts * neurons
        capacity = min(capacity, total)
        self.device, self.parts = device, parts
        self.predictors: tuple[Predictor, ...] = ()
        self.looking: Looking | None = None
        self.tried: Callable[[Sequence[str]], Looking] | None = None
        self.memory = DeviceMemory(device.place, nbytes, capacity, neurons, total)
        capacity = len(self.memory.rows)
        # Tables have a layer at least: where none uses the pool, it stays empty.
        self.pool = RowPool(len(which) or 1, experts, neurons, capacity, parts.eviction)
        sources = [layers[layer].rows.data.view(-1, nbytes) for layer in which]
        self.scheduler = Scheduler(device, self.pool, self.memory, sources)
        self.ring = ExpertRing(device, self.pool, self.memory)
        self.notices: list[Notice] = []
        self._fixed, self._keys = {name: (uses or {}).get(name, 0) for name in ("up", "dense")}, keys
        self._fixed["whole"] = (uses or {}).get("rows", 0)
        self._view: ExpertRows | None = None
        self._borrower: weakref.ref[object] | None = None
        self._peak = device.rates.link_bytes_s
        self.called = ""  # where there are several cards, this one's name for people
        self._least = min(capacity, neurons)  # rows: with fewer, a step takes many loads

    def predict_by(self, predictors: Sequence[Predictor]) -> None:
        """Fetch ahead by these, each where it pays, or by the only one in all layers."""
        self.predictors = tuple(predictors)
        self.looking = None if self.tried is None else self.tried([one.name for one in predictors])

    @property
    def predicts(self) -> bool:
        """Whether anything is predicted."""
        return bool(self.predictors) and (self.looking is None or self.looking.any)

    def looks(self, layer: int) -> Predictor | None:
        """What predicts in this token's layer of the pool's, if anything does."""
        at = 1 if self.looking is None else self.looking.does(layer)
        return self.predictors[at - 1] if at and self.predictors else None

    def may_look(self, layer: int) -> tuple[Predictor, ...]:
        """What predicts in this layer of the pool's in some tokens."""
        if self.looking is not None and not self.looking.settled:
            return self.predictors
        chosen = self.looks(layer)
        return () if chosen is None else (chosen,)

    def found(self, layer: int) -> None:
        """The active neurons of one token in this layer of the pool's are known, and where they are is not."""
        if self.looking is not None and self.predictors:
            self.looking.found(layer, self.device.now)

    def rows(self, layout: RowLayout) -> ExpertRows:
        """The pool's rows, as those of one expert."""
        if self._view is None or self._view.layout != layout:
            self._view = ExpertRows(layout, self.memory.rows[None])
        return self._view

    def settle(self) -> None:
        """Nothing is on its way, no row is in use, and no view of the rows is left: their memory may change."""
        self.scheduler.settle()
        self._view = None

    def moved(self) -> tuple[int, float]:
        """Bytes that the link moved so far, and its busy seconds."""
        return self.device.link.bytes_moved, self.device.link.busy_s

    def sizes(self) -> dict[str, int]:
        """Bytes of device memory, by use."""
        used = self.pool.used * self.memory.row_bytes
        return {"pool": self.memory.rows.nbytes, "pool_used": used, **self._fixed}

    def resident(self) -> dict[int, float]:
        """The pool's layers, and the share of each one's rows that are in it."""
        return {layer: float(self.pool.resident(number).mean()) for layer, number in self.pooled.items()}

    def evicted(self) -> int:
        """Rows of the pool that gave way to others so far."""
        return self.pool.evicted

    def link_peak(self) -> float:
        """The link's bytes per second when nothing delays it."""
        return self._peak

    def cards(self) -> tuple[CardRows, ...]:
        """There is one."""
        return ()

    def share(self) -> None:
        """Let rows use the room of keys and values too, while those do not need it; call before the pool is filled."""
        # What is lent lies at the end, and a number's address has to be a multiple of its size.
        nbytes = (self.memory.nbytes + self._keys) // ALIGNED * ALIGNED
        self.settle()
        self.pool.resize(0)
        self.memory.give()
        self.memory.take(nbytes)
        self._fit()

    def vacant(self) -> bool:
        """See `kv.Room`."""
        return self._borrower is None or self._borrower() is None

    def let(self, store: object) -> None:
        """See `kv.Room`."""
        self._borrower = weakref.ref(store)
        self.lend(0)

    def lent(self) -> Tensor:
        """See `kv.Room`."""
        return self.memory.lent()

    def lend(self, nbytes: int) -> None:
        """See `kv.Room`; between two steps. Rows that were there are fetched again when needed."""
        before = self.lent().numel()
        if nbytes == before:
            return
        left = self.memory.rows_beside(nbytes)
        if left < min(self._least, self.pool.capacity):
            raise FloeError(
                "This chat no longer fits the device's memory",
                f"Its keys and values need {size(nbytes)}, which leaves {max(0, left):,} rows of weights.",
                "Start a new chat, or allow more memory with --vram.",
            )
        self.settle()
        if before <= self._keys < nbytes:
            self.notices.append(
                Notice(
                    "This chat takes memory from the pool of rows",
                    f"It is longer than the reserved context. {size(left * self.memory.row_bytes)} is left for rows, "
                    "so answers take longer. A new chat gives the memory back.",
                )
            )
        self.memory.lend(nbytes)
        self._fit()

    @property
    def name(self) -> str:
        """Of its device, for people."""
        return self.device.name

    def now(self) -> float:
        """Seconds by its device's clock."""
        return self.device.now()

    def make_room(self, ran_out: str = "") -> bool:
        """Return a quarter of the pool to the device after its memory ran out; False at the last rows.

        The caller must hold no view of rows, keys or values, since their memory could not be freed. ran_out: what the
        driver said.
        """
        capacity = self.pool.capacity * 3 // 4
        if capacity < max(1, self._least):
            return False
        self.settle()
        self.pool.resize(0)
        self.memory.renew(capacity)
        self._fit()
        self.notices.append(
            Notice(
                "The graphics card ran out of memory",
                f"The pool of rows{self.called and f' on {self.called}'} is now smaller: "
                f"{size(self.memory.rows.nbytes)}. The answer continues.",
            )
        )
        return True

    def warm(self, heat: Heat) -> None:
        """Fill the pool with the most used neurons, and wait for them. `heat`: of all layers of the model.

        Raises:
            ValueError: heat of another model's shape.
        """
        if not self.pooled:
            return
        layers, keys = self.pool.warm(heat.of([*self.pooled]))
        for layer in range(len(self.pool.layers)):
            self.scheduler.fetch(layer, keys[layers == layer])
        self.scheduler.await_all()

    def heat(self, before: Heat) -> Heat:
        """How much each layer's experts and neurons were used; of layers that the pool does not serve, as before."""
        return before.updated([*self.pooled], self.pool.heat()) if self.pooled else before

    def close(self) -> None:
        """Stop background work."""
        self.scheduler.forget(None)
        self.device.close()

    def _fit(self) -> None:
        """Resize the pool to the rows that memory has room for."""
        self.pool.resize(len(self.memory.rows))
