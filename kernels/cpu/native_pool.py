"""`placing.StepTable` compiled from C++ (offload/): the same tables, worked on in one call where numpy takes dozens.

If the library refuses, the definition runs instead, which finds and reports the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import index
from ..offload import located
from ..offload.located import Keys, Part, Slots
from ..offload.placing import Ahead, Found, Placed, StepTable, Way
from ..offload.pool import EvictionRule, Means
from ..offload.sharing import Lanes
from .binding import NativeUnavailableError, codes, isa_is_forced, library, records, refused

# located.require compares these faster than numpy's types.
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
KINDS = {torch.float32: codes.FLOAT32, torch.float16: codes.FLOAT16, torch.bfloat16: codes.BFLOAT16}
_log = logging.getLogger("floe_chat.kernels")


class Lists:
    """Memory for a step's lists: `floe_places` and `floe_placed`."""

    def __init__(self) -> None:
        self.placed = records.placed(wanted=0, reserved=0, looked=0, hit=0, transfer=0, done=-1, waited=0.0)
        self.places: Any = None
        self._room = self._calls = -1

    def of(self, record: Any) -> Lists:
        """With room for what a step found."""
        if record.room > self._room:
            self._room = record.room
            self._at, self._places = np.empty((2, codes.PARTS, self._room), np.int32)
            self._keys, self._taken = np.empty((2, self._room), np.int32)
            self.places = records.places(
                room=self._room,
                offsets=np.zeros(1, np.int64),  # by the number of calls
                at=self._at,
                places=self._places,
                keys=self._keys,
                slots=self._taken,
            )
        if record.calls != self._calls:
            self._calls = record.calls
            offsets = torch.empty((codes.PARTS, self._calls + 1), dtype=torch.int64)
            self._bounds, self._at_offsets = offsets.numpy(), offsets.data_ptr()
        self.places.offsets = self._at_offsets
        return self

    def filled(self) -> Placed:
        """What a call has placed. It is valid until the next one."""
        placed, sizes = self.placed, self._bounds[: codes.PART_ARRIVED, -1].tolist()
        keys, slots = self._keys[: placed.wanted], self._taken[: placed.reserved]
        parts = _Parts(self._bounds, self._at, self._places)
        return Placed(parts, sizes, keys, slots, placed.looked, placed.hit, placed.transfer)

    def arrived(self) -> Part:
        """What a call has waited for."""
        return _part(codes.PART_ARRIVED, self._bounds, self._at, self._places)


class _Parts(Sequence[Part]):
    """Made when they are looked at."""

    def __init__(self, *lists: NDArray[Any]) -> None:
        self._lists = lists

    def __len__(self) -> int:
        return codes.PART_ARRIVED

    @overload
    def __getitem__(self, part: int) -> Part: ...
    @overload
    def __getitem__(self, part: slice) -> Sequence[Part]: ...
    def __getitem__(self, part: int | slice) -> Part | Sequence[Part]:
        if isinstance(part, slice):
            return [self[i] for i in range(*part.indices(len(self)))]
        if not 0 <= part < len(self):
            raise IndexError(part)
        return _part(part, *self._lists)


def _part(part: int, bounds: NDArray[np.int64], at: NDArray[np.int32], places: NDArray[np.int32]) -> Part:
    end = int(bounds[part, -1])
    return Part(bounds[part], at[part, :end], places[part, :end])


class NativeTable(StepTable):
    """`StepTable`, compiled.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
    """

    def __init__(self, layers: int, experts: int, neurons: int, rule: EvictionRule, means: Means) -> None:
        self._functions = functions = library()
        self._reserve, self._settle = functions.pool_reserve, functions.pool_settle
        super().__init__(layers, experts, neurons, rule, means)
        self.flags = np.zeros(self.width, np.uint8)
        self._lists = Lists()
        self._handed_over()

    def place(self, found: Found, lanes: Lanes, way: Way | None = None) -> Placed:
        """See `StepTable`."""
        record = found_record(found)
        if record is None or not self.hears(found):
            return super().place(found, lanes, way)
        lists, both, over = self._lists.of(record), records.lanes(**lanes._asdict()), way_record(way)
        code = self._functions.offload_place(self.native, record, both, over, lists.places, lists.placed)
        if self._refused(code, way):
            return super().place(found, lanes, way)
        placed = lists.filled()
        return replace(placed, keys=placed.keys.copy(), slots=placed.slots.copy())

    def note(self, found: Found) -> None:
        """See `StepTable`."""
        record = found_record(found)
        if record is None or refused(self._functions.offload_note(self.native, record, None)):
            super().note(found)

    def ahead(self, guess: Found, way: Way | None = None) -> Ahead:
        """See `StepTable`."""
        record = found_record(guess)
        if record is None:
            return super().ahead(guess, way)
        guessed, keys, slots = np.empty((3, record.room), np.int32)
        runs = np.empty((record.calls, 2), np.int64)
        sent = None if way is None else np.empty((record.calls * way.pieces, 2), np.int64)
        taken = self._functions.offload_ahead(self.native, record, way_record(way), guessed, keys, slots, runs, sent)
        if self._refused(taken, way):
            return super().ahead(guess, way)
        numbers = [] if sent is None else [(number, end) for number, end in sent.tolist() if number]
        guessed = guessed[: int(guess.active.offsets[-1])]
        return Ahead(guessed, keys[:taken], slots[:taken], [(call, count) for call, count in runs.tolist()], numbers)

    def right(self, found: Found, guessed: NDArray[np.int32]) -> int:
        """See `StepTable`."""
        record = found_record(found)
        count = -1
        if record is not None:
            count = self._functions.offload_right(self.native, record, guessed.size, guessed, self.flags)
        return super().right(found, guessed) if record is None or refused(count) else count

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """See `StepTable`."""
        index("layer", layer, self.layers)
        located.require("keys", keys, _INT64, (keys.size,))
        slots = np.empty(keys.size, np.int32)
        taken = self._reserve(self.native, layer, keys.size, keys, urgent, slots)
        return super().reserve(layer, keys, urgent=urgent) if refused(taken) else slots[:taken]

    def visit(self, wanted: int) -> Slots:
        """See `StepTable`."""
        slots = np.empty(min(max(wanted, 0), self.capacity), np.int32)
        taken = self._functions.pool_visit(self.native, min(wanted, self.capacity), slots)
        return super().visit(wanted) if refused(taken) else slots[:taken]

    def keep(self, layer: int, keys: Keys, slots: Slots, spared: int) -> Slots:
        """See `StepTable`."""
        index("layer", layer, self.layers)
        located.require("keys", keys, _INT64, (keys.size,))
        located.require("slots", slots, _INT32, (keys.size,))
        kept = np.empty(keys.size, np.int32)
        total = self._functions.pool_keep(self.native, layer, keys.size, keys, slots, spared, kept)
        return super().keep(layer, keys, slots, spared) if refused(total) else kept[:total]

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """See `StepTable`."""
        located.require("slots", slots, _INT32, (slots.size,))
        if refused(self._settle(self.native, slots.size, slots, arrived)):
            super().settle(slots, arrived=arrived)

    def resize(self, capacity: int) -> None:
        """See `StepTable`."""
        super().resize(capacity)
        self._handed_over()

    def _refused(self, code: int, way: Way | None) -> bool:
        """Whether the library refused the arguments; raises RuntimeError for a link's failure."""
        if way is not None and code == codes.LINK_FAILED:
            raise RuntimeError(self._functions.link_failure(way.link).decode())
        return refused(code)

    def _handed_over(self) -> None:
        """Tell the library where the tables are now."""
        rule, means = self.rule, self.means
        self.native = records.pool(
            layers=self.layers,
            experts=self.experts,
            neurons=self.neurons,
            capacity=self.capacity,
            by_score=rule.by_score,
            marks_use=rule.marks_use,
            sample=rule.sample,
            smallest_window=rule.smallest_window,
            bar_share=rule.bar,
            turn=rule.turn,
            use_rate=rule.use_rate,
            largest_growth=rule.largest_growth,
            score_rate=rule.score_rate,
            habit_rate=rule.habit_rate,
            prefetch_worth=rule.prefetch_worth,
            recent=means.recent,
            habit=means.habit,
            growth=means.growth,
            raw=means.raw,
            slots=self.slots,
            free_slots=self.free,
            visitors=self.visitors,
            busy=self.busy,
            bar=self.bar,
            cells=self.cells,
            residents=self.residents,
            counters=self.counters,
        )
        self.address = addressof(self.native)


def way_record(way: Way | None) -> Any:
    """`floe_way`, made once."""
    if way is None or way.native is not None:
        return None if way is None else way.native
    made = records.way(
        link=way.link,
        rows=way.rows,
        capacity=way.capacity,
        piece=way.piece,
        pieces=way.pieces,
        pooled=way.pooled,
        source=way.source,
        target=way.target,
    )
    object.__setattr__(way, "native", made)
    return made


def _float32(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype is torch.float32 else tensor.float()).contiguous()


def found_record(found: Found) -> Any:
    """`floe_found`, made once; None for tensors that the library would misread."""
    if found.native is not None:
        return found.native
    active, experts, weights, chosen, late = found.active, found.experts, found.weights, found.chosen, found.late
    heard = found.heard
    count, total = experts.numel(), active.neurons.numel()
    if active.offsets.shape != (count + 1,) or not experts.ndim == active.neurons.ndim == 1:
        return None
    if weights.numel() != count or chosen.ndim != 2 or chosen.shape != found.scores.shape:
        return None
    if active.neurons.dtype is not torch.int32 or not 0 <= found.layer < 1 << 31 or not 0 <= found.width < 1 << 31:
        return None
    if not active.offsets.dtype is experts.dtype is chosen.dtype is torch.int64:
        return None
    if active.values.numel() != total or (late is not None and late.numel() != count):
        return None
    values = active.values.contiguous()
    if values.dtype not in KINDS:
        values = values.float()
    made = records.found(
        layer=found.layer,
        width=found.width,
        tokens=chosen.shape[0],
        top_k=chosen.shape[1],
        calls=count,
        room=total,
        offsets=active.offsets.contiguous(),
        experts=experts.contiguous(),
        chosen=chosen.contiguous(),
        neurons=active.neurons.contiguous(),
        weights=_float32(weights),
        scores=_float32(found.scores),
        values=values,
        late=None if late is None else _float32(late),
        heard=None if heard is None else _float32(heard),
        kind=KINDS[values.dtype],
    )
    object.__setattr__(found, "native", made)
    return made


def make(layers: int, experts: int, neurons: int, rule: EvictionRule, means: Means) -> tuple[StepTable, str]:
    """The best table available here, and the reason.

    Raises:
        NativeUnavailableError: an instruction set is requested by name and is not available.
    """
    try:
        return NativeTable(layers, experts, neurons, rule, means), "compiled"
    except NativeUnavailableError as error:
        if isa_is_forced():
            raise
        _log.info("the pool's tables are numpy's: %s", error)
        return StepTable(layers, experts, neurons, rule, means), f"numpy, since {error}"


def landing(source: NDArray[np.int64], slots: Slots, rows: int, capacity: int) -> NDArray[np.int64]:
    """See `located.landing`, which runs if the library is missing."""
    try:
        functions = library()
    except NativeUnavailableError:
        return located.landing(source, slots, rows, capacity)
    located.check_landing(source, slots, rows, capacity)
    places = np.empty(source.size, np.int64)
    if refused(functions.landing(source.size, source, slots, rows, capacity, places)):
        return located.landing(source, slots, rows, capacity)
    return places
