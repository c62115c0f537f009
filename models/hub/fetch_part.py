"""A file that arrives in pieces: NAME.part on the disk, and beside it a journal of the bytes that are in it."""

from __future__ import annotations

import json
import os
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path

from .. import private_file
from .repository_files import RepoFile

_GIVEN_BACK = 128 << 10  # bytes
_BLOCK = 4 << 20  # bytes hashed at a time, between checks whether to stop


class Ranges:
    """A set of byte positions, kept as disjoint intervals [start, end) in order."""

    def __init__(self, intervals: list[tuple[int, int]] | None = None) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in intervals or []:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        """Add [start, end), joined with what it touches."""
        first, last = bisect_left(self._ends, start), bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """The parts of [start, end) that are not in it."""
        found: list[tuple[int, int]] = []
        for index in range(bisect_right(self._ends, start), len(self._starts)):
            if self._starts[index] >= end:
                break
            if start < self._starts[index]:
                found.append((start, self._starts[index]))
            start = max(start, self._ends[index])
        if start < end:
            found.append((start, end))
        return found

    def intervals(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))

    @property
    def total(self) -> int:
        return sum(self._ends) - sum(self._starts)


class PartFile:
    """A partial `file` in `folder`, continued where an earlier process stopped.

    The journal is written after the bytes, so they are on the disk, and a kill or a power cut loses only later ones.
    One thread writes and `finish`es; `sync` may run in another one at the same time.

    Attributes:
        written: the file with the bytes. done: the ranges in it. news: why an earlier part could not be used, or None.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, file: RepoFile) -> None:
        self.path = folder / file.name
        self.file = file
        self.written, self._journal = _names(folder, file)
        self._lock = threading.Lock()
        self._open = True
        self.done, self.news = _resumed(folder, file)
        if not self.done.total:
            self.written.unlink(missing_ok=True)  # of any kind: a link would lead elsewhere, a pipe would hang
        self._raw = self.written.open("r+b" if self.done.total else "wb", buffering=0)
        self._saved = self.done.total
        self._turn = self._recorded = 0

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write `data` at `offset`. Raises: OSError, such as ENOSPC; earlier bytes stay."""
        self._raw.seek(offset)
        view = memoryview(data)
        while view:
            written = self._raw.write(view)
            with self._lock:
                self.done.add(offset, offset + written)
            offset, view = offset + written, view[written:]

    def sync(self, *, durable: bool = True) -> None:
        """Record in the journal what has been written so far.

        With `durable`, only once it is on the disk, which can take seconds. Without, the journal could claim too much
        after a power cut; then the hash is wrong and the file is fetched again.
        """
        with self._lock:
            if not self._open or self.done.total == self._saved:
                return
            total, intervals = self.done.total, self.done.intervals()
            self._turn += 1
            turn = self._turn
            descriptor = os.dup(self._raw.fileno())
        try:
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            if self._open and turn > self._recorded:
                fields = {"hash": self.file.hash, "size": self.file.size, "ranges": intervals}
                private_file.replace(self._journal, json.dumps(fields), durable=durable)
                self._saved, self._recorded = total, turn

    def close(self) -> None:
        """Stop writing; the bytes so far are recorded."""
        try:
            self.sync(durable=False)
        except OSError:
            self._make_room()
            self.sync(durable=False)
        finally:
            with self._lock:
                self._open = False
                self._raw.close()

    def _make_room(self) -> None:
        """Truncate the end of the part on a full disk, so that the journal has room."""
        with self._lock:
            *kept, (start, end) = self.done.intervals() or [(0, 0)]
            end = max(start, end - _GIVEN_BACK)
            self.done = Ranges([*kept, (start, end)] if end > start else kept)
            self._raw.truncate(end)
            self._turn += 1
            self._recorded = self._turn  # a sync under way would record bytes that are gone

    def finish(self) -> Path:
        """Rename the complete, verified file, once it is on the disk.

        Raises: InterruptedError: the part was closed meanwhile.
        """
        os.fsync(self._raw.fileno())
        with self._lock:
            if not self._open:
                raise InterruptedError
            self._open = False
            self._raw.close()
            self.written.replace(self.path)
            self._journal.unlink(missing_ok=True)
        return self.path

    def discard(self) -> None:
        """Delete everything that arrived."""
        with self._lock:
            self._open = False
            self._raw.close()
            self._journal.unlink(missing_ok=True)
            self.written.unlink(missing_ok=True)


def bytes_here(folder: Path, file: RepoFile) -> int:
    """Bytes of `file` that earlier downloads left in `folder`, whole or in part."""
    path = folder / file.name
    if path.is_file() and path.stat().st_size == file.size:
        return file.size
    return _resumed(folder, file)[0].total


def delete(folder: Path, name: str) -> None:
    """Delete the file `name` and parts of it from `folder`, as far as they are there."""
    for path in (folder / name, folder / f"{name}.part", folder / f"{name}.journal"):
        path.unlink(missing_ok=True)


def is_intact(path: Path, file: RepoFile, stop: Callable[[], bool] = lambda: False) -> bool:
    """Whether the file at `path` has the size and the hash of `file`; reads all of it. A stretch has no hash.

    Raises:
        OSError: it cannot be read. InterruptedError: `stop` became true.
    """
    if path.stat().st_size != file.size:
        return False
    if file.of is not None:
        return True
    digest, size = file.digest(), 0
    with path.open("rb", buffering=0) as raw:
        while block := raw.read(_BLOCK):
            digest.update(block)
            size += len(block)
            if stop():
                raise InterruptedError
    return size == file.size and digest.hexdigest() == file.hash


def _names(folder: Path, file: RepoFile) -> tuple[Path, Path]:
    return folder / f"{file.name}.part", folder / f"{file.name}.journal"


def _resumed(folder: Path, file: RepoFile) -> tuple[Ranges, str | None]:
    """The bytes in the part by its journal, or none and why they cannot be used."""
    part, journal = _names(folder, file)
    if part.is_symlink() or not part.is_file():
        return Ranges(), None
    try:
        fields = private_file.read_json(journal)
        intervals = [(start, end) for start, end in fields["ranges"]]
        if any(type(offset) is not int for interval in intervals for offset in interval):
            raise ValueError("an offset is not a whole number")
        same = (fields["hash"], fields["size"]) == (file.hash, file.size)
    except FileNotFoundError:
        return Ranges(), None  # stopped before the first entry
    except (OSError, ValueError, KeyError, TypeError):
        return Ranges(), f"The journal of {part.name} cannot be read: {file.name} is downloaded again."
    if not same:
        return Ranges(), f"{file.name} has changed on the hub: it is downloaded again."
    here = part.stat().st_size
    if any(not 0 <= start < end <= here for start, end in intervals) or here > file.size:
        return Ranges(), f"{part.name} does not fit its journal: {file.name} is downloaded again."
    return Ranges(intervals), None
