"""`pool.RowTable` compiled from C++ (pool.cpp): the same tables, worked on in one call where numpy takes dozens.

Where the library refuses, the definition runs instead, which finds the reason and says it.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import POINTER, Structure, addressof, byref, c_char, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import pool
from ..checks import index
from ..pool import Keys, Located, Means, Part, RowTable, Rule, Slots
from . import native
from .native import NativeUnavailableError

_log = logging.getLogger("floe_chat.kernels")
_NO_MEMORY = -4


class _Pool(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("layers", "experts", "neurons", "capacity")),
        *((name, c_int32) for name in ("by_score", "marks_use")),
        *((name, c_int64) for name in ("sample", "smallest_window")),
        *((name, c_double) for name in ("turn", "use_rate", "largest_growth")),
        ("prefetch_worth", c_float),
        *((name, c_void_p) for name in ("recent", "growth", "raw", "slots", "free", "cells", "residents", "counters")),
    )


class NativeTable(RowTable):
    """`RowTable`, compiled.

    Raises:
        NativeUnavailableError: the compiled kernels cannot be used here.
    """

    def __init__(self, layers: int, experts: int, neurons: int, rule: Rule, means: Means) -> None:
        library = functions()
        self._locate, self._reserve, self._settle = library.locate, library.reserve, library.settle
        self._spare = library.spare
        super().__init__(layers, experts, neurons, rule, means)
        self._handed_over()

    def locate(
        self, layer: int, experts: NDArray[np.int64], offsets: NDArray[np.int64], neurons: Keys, width: int
    ) -> Located:
        """See `RowTable`."""
        calls, total = experts.size, neurons.size
        given = (
            _address("experts", experts, (calls,)),
            _address("offsets", offsets, (calls + 1,)),
            _address("neurons", neurons, (total,)),
        )
        parts, lists = np.empty((3, calls + 1), np.int64), np.empty((6, total), np.int64)
        # An offset that ends elsewhere would have the library read beyond the neurons.
        code = -1
        if offsets[-1] == total and 0 <= layer < self.layers and 1 <= width <= self.neurons:
            code = self._locate(self._pointer, layer, width, calls, *given, _place(parts), _place(lists))
        if code:
            _check_memory(code)
            return super().locate(layer, experts, offsets, neurons, width)
        ends = parts[:, -1].tolist()
        return Located(*(Part(parts[i], lists[2 * i, : ends[i]], lists[2 * i + 1, : ends[i]]) for i in range(3)))

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """See `RowTable`."""
        index("layer", layer, self.layers)
        slots, given = np.empty(keys.size, np.int32), _address("keys", keys, (keys.size,))
        taken = self._reserve(self._pointer, layer, keys.size, given, urgent, _place(slots))
        if taken < 0:
            _check_memory(taken)
            return super().reserve(layer, keys, urgent=urgent)
        return slots[:taken]

    def spare(self, wanted: int) -> None:
        """See `RowTable`."""
        _check_memory(self._spare(self._pointer, self._slots(wanted)))

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """See `RowTable`."""
        given = _address("slots", slots, (slots.size,), np.int32)
        if self._settle(self._pointer, slots.size, given, arrived):
            super().settle(slots, arrived=arrived)

    def resize(self, capacity: int) -> None:
        """See `RowTable`."""
        super().resize(capacity)
        self._handed_over()

    def _handed_over(self) -> None:
        """Tell the library where the tables lie now."""
        rule, means = self.rule, self.means
        self._pool = _Pool(
            *(self.layers, self.experts, self.neurons, self.capacity, rule.by_score, rule.marks_use, rule.sample),
            *(rule.smallest_window, rule.turn, rule.use_rate, rule.largest_growth, rule.prefetch_worth),
            *map(_place, (means.recent, means.growth, means.raw, self.slots, self.free, self.cells)),
            *map(_place, (self.residents, self.counters)),
        )
        self._pointer = byref(self._pool)


def make(layers: int, experts: int, neurons: int, rule: Rule, means: Means) -> tuple[RowTable, str]:
    """The table that works here, and why that one.

    Raises:
        NativeUnavailableError: an instruction set is asked for by name, and cannot be had.
    """
    try:
        return NativeTable(layers, experts, neurons, rule, means), "compiled"
    except NativeUnavailableError as error:
        if native.isa_is_forced():
            raise
        _log.info("the pool's tables are numpy's: %s", error)
        return RowTable(layers, experts, neurons, rule, means), f"numpy, since {error}"


def cut(part: Part, kept: NDArray[np.int64]) -> tuple[Part, Part]:
    """See `pool.cut`, which runs where the library is not there."""
    calls, total = kept.size, part.at.size
    try:
        found = functions().cut
    except NativeUnavailableError:
        return pool.cut(part, kept)
    given = (
        *(_address("offsets", part.offsets, (calls + 1,)), _address("kept", kept, (calls,))),
        *(_address("at", part.at, (total,)), _address("places", part.places, (total,))),
    )
    offsets, lists = np.empty((2, calls + 1), np.int64), np.empty((2, total), np.int64)
    # An offset that ends elsewhere would have the library read beyond the neurons.
    if part.offsets[-1] != total or found(calls, *given, *map(_place, (offsets, lists[0], lists[1]))):
        return pool.cut(part, kept)
    middle = int(offsets[0, -1])
    return Part(offsets[0], *lists[:, :middle]), Part(offsets[1], *lists[:, middle:])


def landing(source: NDArray[np.int64], slots: Slots, rows: int, capacity: int) -> NDArray[np.int64]:
    """See `pool.landing`, which runs where the library is not there."""
    try:
        check = functions().landing
    except NativeUnavailableError:
        return pool.landing(source, slots, rows, capacity)
    pool.check_landing(source, slots, rows, capacity)
    places = np.empty(source.size, np.int64)
    given = (source.size, _place(source), _place(slots), rows, capacity, _place(places))
    return pool.landing(source, slots, rows, capacity) if check(*given) else places


class _Functions(NamedTuple):
    locate: Any
    reserve: Any
    spare: Any
    settle: Any
    cut: Any
    landing: Any


@cache
def functions() -> _Functions:
    """Those of the library.

    Raises:
        NativeUnavailableError: they cannot be used here.
    """
    native.isa()  # the library is there, of this version, and runs the instruction set that was asked for
    library = ctypes.CDLL(str(native.library_path()))
    arguments = {
        "floe_pool_locate": (c_int, [POINTER(_Pool), *[c_int64] * 3, *[c_void_p] * 5]),
        "floe_pool_reserve": (c_int64, [POINTER(_Pool), c_int64, c_int64, c_void_p, c_int, c_void_p]),
        "floe_pool_spare": (c_int, [POINTER(_Pool), c_int64]),
        "floe_pool_settle": (c_int, [POINTER(_Pool), c_int64, c_void_p, c_int]),
        "floe_cut": (c_int, [c_int64, *[c_void_p] * 7]),
        "floe_landing": (c_int, [c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    }
    found: list[Any] = []
    for name, (result, types) in arguments.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:
            raise NativeUnavailableError(f"the compiled CPU kernels do not load: {error}") from error
        function.restype, function.argtypes = result, types
        found.append(function)
    return _Functions(*found)


def _check_memory(code: int) -> None:
    if code == _NO_MEMORY:
        raise MemoryError("the pool's tables got no memory")


def _address(name: str, array: NDArray[Any], shape: tuple[int, ...], dtype: Any = np.int64) -> int | None:
    pool.require(name, array, dtype, shape)
    return _place(array)


def _place(array: NDArray[Any]) -> int | None:
    """The address of a contiguous array; None if it is empty."""
    if not array.size:
        return None
    if not array.flags.writeable:
        return array.ctypes.data
    return addressof(c_char.from_buffer(array.data))  # five times as fast
