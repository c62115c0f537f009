"""`pool.RowTable` compiled from C++ (pool.cpp): the same tables, worked on in one call where numpy takes dozens.

If the library refuses, the definition runs instead, which finds and reports the reason.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from .. import located
from ..checks import index
from ..located import Keys, Located, Part, Slots
from ..pool import EvictionRule, Means, RowTable
from .binding import NativeUnavailableError, check, isa_is_forced, library, records, refused

# located.require compares these faster than numpy's types.
_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)
_log = logging.getLogger("floe_chat.kernels")


class NativeTable(RowTable):
    """`RowTable`, compiled.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
    """

    def __init__(self, layers: int, experts: int, neurons: int, rule: EvictionRule, means: Means) -> None:
        functions = library()
        self._locate, self._reserve = functions.pool_locate, functions.pool_reserve
        self._settle, self._spare = functions.pool_settle, functions.pool_spare
        super().__init__(layers, experts, neurons, rule, means)
        self._handed_over()

    def locate(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> Located:
        """See `RowTable`."""
        calls, total = experts.size, neurons.size
        located.require("experts", experts, _INT64, (calls,))
        located.require("offsets", offsets, _INT64, (calls + 1,))
        located.require("neurons", neurons, _INT64, (total,))
        parts, lists = np.empty((3, calls + 1), np.int64), np.empty((6, total), np.int64)
        # With a wrong last offset the library would read beyond the neurons.
        fits = offsets[-1] == total and 0 <= layer < self.layers and 1 <= width <= self.neurons
        if not fits or refused(
            self._locate(self._tables, layer, width, calls, experts, offsets, neurons, parts, lists)
        ):
            return super().locate(layer, experts, offsets, neurons, width)
        ends = parts[:, -1].tolist()
        return Located(*(Part(parts[i], lists[2 * i, : ends[i]], lists[2 * i + 1, : ends[i]]) for i in range(3)))

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """See `RowTable`."""
        index("layer", layer, self.layers)
        located.require("keys", keys, _INT64, (keys.size,))
        slots = np.empty(keys.size, np.int32)
        taken = self._reserve(self._tables, layer, keys.size, keys, urgent, slots)
        return super().reserve(layer, keys, urgent=urgent) if refused(taken) else slots[:taken]

    def spare(self, wanted: int) -> None:
        """See `RowTable`."""
        check(self._spare(self._tables, self._slots(wanted)))

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """See `RowTable`."""
        located.require("slots", slots, _INT32, (slots.size,))
        if refused(self._settle(self._tables, slots.size, slots, arrived)):
            super().settle(slots, arrived=arrived)

    def resize(self, capacity: int) -> None:
        """See `RowTable`."""
        super().resize(capacity)
        self._handed_over()

    def _handed_over(self) -> None:
        """Tell the library where the tables are now."""
        rule, means = self.rule, self.means
        self._tables = records.pool(
            layers=self.layers,
            experts=self.experts,
            neurons=self.neurons,
            capacity=self.capacity,
            by_score=rule.by_score,
            marks_use=rule.marks_use,
            sample=rule.sample,
            smallest_window=rule.smallest_window,
            turn=rule.turn,
            use_rate=rule.use_rate,
            largest_growth=rule.largest_growth,
            prefetch_worth=rule.prefetch_worth,
            recent=means.recent,
            growth=means.growth,
            raw=means.raw,
            slots=self.slots,
            free_slots=self.free,
            cells=self.cells,
            residents=self.residents,
            counters=self.counters,
        )


def make(layers: int, experts: int, neurons: int, rule: EvictionRule, means: Means) -> tuple[RowTable, str]:
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
        return RowTable(layers, experts, neurons, rule, means), f"numpy, since {error}"


def cut(part: Part, kept: NDArray[np.int64]) -> tuple[Part, Part]:
    """See `located.cut`, which runs if the library is missing."""
    calls, total = kept.size, part.at.size
    try:
        functions = library()
    except NativeUnavailableError:
        return located.cut(part, kept)
    located.require("offsets", part.offsets, _INT64, (calls + 1,))
    located.require("kept", kept, _INT64, (calls,))
    located.require("at", part.at, _INT64, (total,))
    located.require("places", part.places, _INT64, (total,))
    offsets, lists = np.empty((2, calls + 1), np.int64), np.empty((2, total), np.int64)
    # With a wrong last offset the library would read beyond the neurons.
    if part.offsets[-1] != total or refused(
        functions.cut(calls, part.offsets, kept, part.at, part.places, offsets, lists[0], lists[1])
    ):
        return located.cut(part, kept)
    middle = int(offsets[0, -1])
    return Part(offsets[0], *lists[:, :middle]), Part(offsets[1], *lists[:, middle:])


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
