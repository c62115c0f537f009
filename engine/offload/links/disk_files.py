"""The files behind rows of which memory holds a part: opened so that reading takes none of the system's own memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from .link import FileFields, Link

READERS = 32
"""Requests at once. An SSD answers a single one in 0.1 to 0.2 ms, and dozens in the same time."""
READ_THROUGH = 16 << 10
"""Bytes between two wanted rows that are read with them, rather than a request more: an SSD reads about as many in the
time that a request takes of it."""


@dataclass(frozen=True, slots=True)
class RowFile:
    """Rows in memory that a file has too.

    Attributes:
        rows: uint8, contiguous, mapped from the file or equal to it. offset: of their first byte in the file.
    """

    rows: Tensor
    path: Path
    offset: int


class DiskFiles:
    """Open files.

    Attributes:
        extents: (files, 4) int64: address of the rows, bytes, descriptor, offset. sector: what offsets, lengths and
            addresses of reads have to be multiples of.
    """

    def __init__(self, files: Sequence[RowFile]) -> None:
        """Raises OSError: a file cannot be opened."""
        self._open: list[int] = []
        self._end = weakref.finalize(self, _close, self._open)
        extents: list[tuple[int, int, int, int]] = []
        try:
            for file in files:
                self._open.append(_opened(file.path))
                extents.append((file.rows.data_ptr(), file.rows.nbytes, self._open[-1], file.offset))
        except OSError:
            self.close()
            raise
        self.sector = 512 if all(map(_by_512, self._open)) else 4096
        self.extents: NDArray[np.int64] = np.array(extents, dtype=np.int64).reshape(-1, 4)

    def close(self) -> None:
        """Close them, which happens anyway when nobody needs them; the link has to be closed before."""
        _close(self._open)


def disk_link(files: DiskFiles, nbytes: int, chunk: int) -> Link:
    """A link that reads rows of `nbytes` from the files, `chunk` of them at a time; it keeps the files open.

    Raises:
        NativeUnavailableError: there is no compiled library. ValueError: no such size.
    """
    fields = FileFields(
        extents=files.extents,
        extent_count=len(files.extents),
        readers=READERS,
        gap=READ_THROUGH // nbytes,
        sector=files.sector,
    )
    return Link("disk", "disk", nbytes, chunk=chunk, files=fields, held=files)


def _close(files: list[int]) -> None:
    while files:
        os.close(files.pop())


def _by_512(file: int) -> bool:
    """Whether half a page of a file can be read: most disks have sectors of 512 bytes, whatever their pages are."""
    with mmap.mmap(-1, 1 << 12) as page, memoryview(page) as whole, whole[:512] as half:
        try:
            return os.preadv(file, [half], 512) >= 0
        except OSError:
            return False


def _opened(path: Path) -> int:
    """A descriptor that reads past the system's cache, where the file system can do that."""
    flags = os.O_RDONLY | os.O_CLOEXEC
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_DIRECT)
    file = os.open(path, flags)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    return file
