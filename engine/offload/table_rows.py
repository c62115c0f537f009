"""Rows of a table (models/pack/table.py) on the disk, those used last in RAM: what a pass asks for is read at once."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...models.errors import FloeError, verify_hint
from ...models.pack.table import Lookup, Table

CACHE = 256 << 20
"""Bytes of RAM for the rows of all tables that were used last: a million rows of 256, some 60,000 tokens of n-grams."""
_WAYS = 8  # places that a row may have


class TableRows:
    """The rows of one table.

    The system is asked for all of them before the first one is waited for: so a disk that answers dozens of requests
    in the time of one does so, without a thread for each. A cache of sets: a row may be in `_WAYS` slots, those of its
    set, and takes the one that was used longest ago.

    Args:
        rows: (R, nbytes) uint8, mapped from a file. offset: where in it they begin. budget: bytes of RAM.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, rows: Tensor, path: Path, offset: int, budget: int) -> None:
        count, self._nbytes = rows.shape
        sets = max(1, -(-min(budget // self._nbytes, count) // _WAYS))
        self._rows, self._path, self._offset = rows, path, offset
        self._cache = np.empty((sets * _WAYS, self._nbytes), dtype=np.uint8)  # takes RAM as it is filled
        self._held = np.full((sets, _WAYS), -1, dtype=np.int64)
        self._used = np.zeros((sets, _WAYS), dtype=np.int32)
        self._turn = 0
        self.read = 0  # rows, so far
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)

    def __call__(self, wanted: Tensor) -> Tensor:
        """wanted (N,) int64, each row once -> (N, nbytes) uint8.

        Raises:
            FloeError: the file cannot be read any more.
        """
        numbers, cache = wanted.numpy(), self._cache
        slots, there = self._placed(numbers)
        found, left = cache[slots], np.flatnonzero(~there)
        while left.size:  # of more rows of one set than it has slots, the others follow
            slots, there = self._placed(numbers[left])
            found[left[there]] = cache[slots[there]]
            left = left[~there]
        return torch.from_numpy(found)

    def _placed(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The slots of rows that are now in the cache, and which these are."""
        self._turn += 1
        sets = numbers % len(self._held)
        known = self._held[sets] == numbers[:, None]
        there, way = known.any(1), known.argmax(1)
        self._used[sets[there], way[there]] = self._turn
        absent = np.flatnonzero(~there)
        if absent.size:
            order = absent[np.argsort(sets[absent], kind="stable")]
            grouped = sets[order]
            # The first absent row of a set takes the slot that was used longest ago, and so on.
            rank = np.arange(len(order)) - np.searchsorted(grouped, grouped)
            oldest = np.argsort(self._used[grouped], axis=1, kind="stable")
            way[order] = oldest[np.arange(len(order)), np.minimum(rank, _WAYS - 1)]
            fits = (rank < _WAYS) & (self._used[grouped, way[order]] < self._turn)
            order = order[fits]
            there[order] = True
            self._held[sets[order], way[order]] = -1  # until they have been read
            self._fetch(numbers[order], sets[order] * _WAYS + way[order])
            self._held[sets[order], way[order]] = numbers[order]
            self._used[sets[order], way[order]] = self._turn
        return sets * _WAYS + way, there

    def _fetch(self, numbers: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        self.read += len(numbers)
        if not hasattr(os, "pread"):
            self._cache[slots] = self._rows[torch.from_numpy(numbers)].numpy()
            return
        places = (self._offset + numbers * self._nbytes).tolist()
        try:
            if hasattr(os, "posix_fadvise"):
                for place in places:
                    os.posix_fadvise(self._file, place, self._nbytes, os.POSIX_FADV_WILLNEED)
            found = b"".join([os.pread(self._file, self._nbytes, place) for place in places])
        except OSError as error:
            raise self._unreadable(f"{error.strerror or error}.") from error
        if len(found) != len(numbers) * self._nbytes:
            raise self._unreadable("It is shorter than it was.")
        self._cache[slots] = np.frombuffer(found, dtype=np.uint8).reshape(-1, self._nbytes)

    def _unreadable(self, cause: str) -> FloeError:
        return FloeError(f"{self._path.name} cannot be read", cause, verify_hint(self._path.parent))


def cached(nbytes: int) -> int:
    """Bytes of RAM for rows of tables that take so many."""
    return min(CACHE, nbytes)


def lookups(tables: Sequence[Table], folder: Path, dtype: torch.dtype) -> dict[str, Lookup]:
    """What takes the place of a pack's tables, by their modules' names.

    Raises:
        PackError: a file is not one of its table.
    """
    whole, found = sum(table.nbytes for table in tables), dict[str, Lookup]()
    for table in tables:
        rows, offset = table.opened(folder)
        reader = TableRows(rows, folder / table.file, offset, cached(whole) * table.nbytes // whole)
        found[table.name] = Lookup(table, reader, dtype)
    return found
