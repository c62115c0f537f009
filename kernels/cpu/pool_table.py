"""The tables of a pool with the compiled calls that work on them (offload/): one call where numpy would take dozens."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from dataclasses import replace
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..checks import index
from ..offload.located import Keys, Part, Slots, check_landing, require
from ..offload.placing import Ahead, Found, Placed, Way
from ..offload.pool import EvictionRule, Means, RowTable
from ..offload.sharing import Lanes
from .binding import check, codes, library, records

# `require` compares these faster than numpy's types.
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
KINDS = {torch.float32: codes.FLOAT32, torch.float16: codes.FLOAT16, torch.bfloat16: codes.BFLOAT16}


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


class PoolTable(RowTable):
    """The tables, and what a step decides about its rows.

    A call that is refused changes nothing.
    """

    def __init__(self, layers: int, experts: int, neurons: int, rule: EvictionRule, means: Means) -> None:
        """See `RowTable`.

        Raises:
            NativeUnavailableError: the compiled kernels cannot be used here.
        """
        self._functions = functions = library()
        self._reserve, self._settle = functions.pool_reserve, functions.pool_settle
        super().__init__(layers, experts, neurons, rule, means)
        self.flags = np.zeros(self.width, np.uint8)
        self._lists = Lists()
        self._handed_over()

    def place(self, found: Found, lanes: Lanes, way: Way | None = None) -> Placed:
        """Place a step's rows. Those that are present stay until `release`; those that are copied are visitors.

        Args:
            way: to send for the copied rows at once.

        Raises:
            ValueError: an index out of range, or tensors that do not fit. RuntimeError: the link's failure.
        """
        record = self.record(found)
        lists, both, over = self._lists.of(record), records.lanes(**lanes._asdict()), way_record(way)
        self._check(self._functions.offload_place(self.native, record, both, over, lists.places, lists.placed), way)
        placed = lists.filled()
        return replace(placed, keys=placed.keys.copy(), slots=placed.slots.copy())

    def note(self, found: Found) -> None:
        """Count the use of a step's neurons.

        Raises:
            ValueError: an index out of range.
        """
        check(self._functions.offload_note(self.native, _readable(found), None))

    def ahead(self, guess: Found, way: Way | None = None) -> Ahead:
        """Slots for the absent neurons of a guess, those of the calls that weigh most first.

        Args:
            way: as for `place`.

        Raises:
            ValueError: an index out of range, or a weight that is no number. RuntimeError: the link's failure.
        """
        record = _readable(guess)
        guessed, keys, slots = np.empty((3, record.room), np.int32)
        runs = np.empty((record.calls, 2), np.int64)
        sent = None if way is None else np.empty((record.calls * way.pieces, 2), np.int64)
        taken = self._functions.offload_ahead(self.native, record, way_record(way), guessed, keys, slots, runs, sent)
        self._check(taken, way)
        numbers = [] if sent is None else [(number, end) for number, end in sent.tolist() if number]
        guessed = guessed[: int(guess.active.offsets[-1])]
        return Ahead(guessed, keys[:taken], slots[:taken], [(call, count) for call, count in runs.tolist()], numbers)

    def right(self, found: Found, guessed: NDArray[np.int32]) -> int:
        """How many of a step's active neurons are among the guessed keys.

        Raises:
            ValueError: an index out of range.
        """
        count: int = self._functions.offload_right(self.native, _readable(found), guessed.size, guessed, self.flags)
        check(count)
        return count

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """Slots for the first M of these absent neurons (N,), free ones first; the rows that were in them are evicted.
        `urgent` and the policy: see `engine/offload/row_pool.py`.

        Raises:
            ValueError: a key out of range, present or named twice.
        """
        index("layer", layer, self.layers)
        require("keys", keys, _INT64, (keys.size,))
        slots = np.empty(keys.size, np.int32)
        taken = self._reserve(self.native, layer, keys.size, keys, urgent, slots)
        check(taken)
        return slots[:taken]

    def visit(self, wanted: int) -> Slots:
        """Slots for visitors, free ones first; rows are evicted if there are too few. Maybe fewer than wanted.

        Raises:
            ValueError: fewer than none.
        """
        slots = np.empty(min(max(wanted, 0), self.capacity), np.int32)
        taken = self._functions.pool_visit(self.native, min(wanted, self.capacity), slots)
        check(taken)
        return slots[:taken]

    def keep(self, layer: int, keys: Keys, slots: Slots, spared: int) -> Slots:
        """Give a place to those of the last visitors that are worth it, and evict as many rows as are missing then.

        Args:
            keys, slots: (N,) of all rows of the last `visit`, each once. spared: by score slots are kept free for the
                next step's visitors, this small part of the pool at most; free ones beyond are filled in any case.

        Returns:
            (M,) the slots of the rows that stay; they are filling.

        Raises:
            ValueError: other slots than the last visitors', or a key out of range or present.
        """
        index("layer", layer, self.layers)
        require("keys", keys, _INT64, (keys.size,))
        require("slots", slots, _INT32, (keys.size,))
        kept = np.empty(keys.size, np.int32)
        spared = min(max(spared, -1), self.capacity + 1)  # more mean the same, and need not fit 64 bits
        total = self._functions.pool_keep(self.native, layer, keys.size, keys, slots, spared, kept)
        check(total)
        return kept[:total]

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """These filling rows have arrived, or never will: then they are absent and their slots free.

        Raises:
            ValueError: a slot that is not filling, or named twice.
        """
        require("slots", slots, _INT32, (slots.size,))
        check(self._settle(self.native, slots.size, slots, arrived))

    def resize(self, capacity: int) -> None:
        """See `RowTable`."""
        super().resize(capacity)
        self._handed_over()

    def record(self, found: Found) -> Any:
        """`floe_found` of a step; raises ValueError for tensors that do not fit."""
        if not self.hears(found):
            raise ValueError("heard must be the scores of all experts for each token")
        return _readable(found)

    def hears(self, found: Found) -> bool:
        """Whether the scores of all experts, if given, have the right shape."""
        return found.heard is None or found.heard.shape == (len(found.chosen), self.experts)

    def _check(self, code: int, way: Way | None) -> None:
        if way is not None and code == codes.LINK_FAILED:
            raise RuntimeError(self._functions.link_failure(way.link).decode())
        check(code)

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


def _readable(found: Found) -> Any:
    if (record := found_record(found)) is None:
        raise ValueError("the compiled kernels cannot read the tensors of this step")
    return record


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


def landing(source: NDArray[np.int64], slots: Slots, rows: int, capacity: int) -> NDArray[np.int64]:
    """The slots (N,) of a transfer as int64, after checking that nothing in it is out of range.

    Args:
        source: (N,) which of `rows` rows. slots: (N,) int32, which of `capacity` slots each goes to.

    Raises:
        ValueError: a row or slot out of range, or a slot named twice; not as many rows as slots.
    """
    check_landing(source, slots, rows, capacity)
    places = np.empty(source.size, np.int64)
    check(library().landing(source.size, source, slots, rows, capacity, places))
    return places
