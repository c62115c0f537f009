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
from ..pool import CELL, Keys, Located, Means, Part, RowTable, Rule, Slots
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
        parts, lists = np.empty((3, calls + 1), np.int64), np.empty((6, total), np.int64)
        # An offset that ends elsewhere would have the library read beyond the neurons.
        code = -1
        if offsets.size == calls + 1 and offsets[-1] == total:
            code = self._locate(
                *(self._pointer, layer, width, calls, _address(experts), _address(offsets), _address(neurons)),
                *(_address(parts), _address(lists)),
            )
        if code:
            _check_memory(code)
            return super().locate(layer, experts, offsets, neurons, width)
        ends = parts[:, -1].tolist()
        return Located(*(Part(parts[i], lists[2 * i, : ends[i]], lists[2 * i + 1, : ends[i]]) for i in range(3)))

    def reserve(self, layer: int, keys: Keys, *, urgent: bool) -> Slots:
        """See `RowTable`."""
        slots = np.empty(keys.size, np.int32)
        taken = self._reserve(self._pointer, layer, keys.size, _address(keys), urgent, _address(slots, np.int32))
        if taken < 0:
            _check_memory(taken)
            return super().reserve(layer, keys, urgent=urgent)
        return slots[:taken]

    def spare(self, wanted: int) -> None:
        """See `RowTable`."""
        _check_memory(self._spare(self._pointer, wanted))

    def settle(self, slots: Slots, *, arrived: bool) -> None:
        """See `RowTable`."""
        if self._settle(self._pointer, slots.size, _address(slots, np.int32), arrived):
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
            *(_address(means.recent, np.float64), _address(means.growth, np.float64), _address(means.raw, np.float32)),
            *(_address(self.slots, np.int32), _address(self.free, np.int32), _address(self.cells, CELL)),
            *(_address(self.residents), _address(self.counters)),
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
    offsets, lists = np.empty((2, calls + 1), np.int64), np.empty((2, total), np.int64)
    given = (_address(array) for array in (part.offsets, kept, part.at, part.places, offsets, lists[0], lists[1]))
    # An offset that ends elsewhere would have the library read beyond the neurons.
    fits = part.offsets.size == calls + 1 and part.offsets[-1] == total == part.places.size
    if not fits or found(calls, *given):
        return pool.cut(part, kept)
    middle = int(offsets[0, -1])
    return Part(offsets[0], *lists[:, :middle]), Part(offsets[1], *lists[:, middle:])


def landing(index: NDArray[np.int64], slots: Slots, rows: int, capacity: int) -> NDArray[np.int64]:
    """See `pool.landing`, which runs where the library is not there."""
    places = np.empty(index.size, np.int64)
    try:
        check = functions().landing
    except NativeUnavailableError:
        return pool.landing(index, slots, rows, capacity)
    given = (index.size, _address(index), _address(slots, np.int32), rows, capacity, _address(places))
    return pool.landing(index, slots, rows, capacity) if check(*given) else places


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


def _address(array: NDArray[Any], dtype: Any = np.int64) -> int | None:
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(f"{np.dtype(dtype)} in one piece is wanted, not {array.dtype} of {array.shape}")
    # `array.ctypes` would take five times as long.
    return addressof(c_char.from_buffer(array.data)) if array.size else None
