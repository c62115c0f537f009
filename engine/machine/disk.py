"""How fast a folder's disk reads, past the page cache: a small file of our own, written, read and removed."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

_PIECE = 8 << 20
_MOST = 512 << 20
_LEAST = 2 * _PIECE
_SHARE = 0.05  # largest share of the free space
_SECONDS = 1.0  # for writing, and again for reading


def read_rate(folder: Path, *, most: int = _MOST, seconds: float = _SECONDS) -> float:
    """Bytes per second of large reads from the disk that holds `folder`, or would hold it.

    Random bytes are written for at most `seconds` and up to `most` bytes, less where the disk has little space, then
    read for as long. Where the system offers no way past its cache (tmpfs, some network disks), the cache is measured.

    Raises:
        OSError: no room for a small file, or a folder or disk that cannot be written.
    """
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    room = min(most, int(_SHARE * shutil.disk_usage(existing).free))
    if room < _LEAST:
        raise OSError(f"{existing} has too little free space for a test file")
    handle, name = tempfile.mkstemp(prefix=".floe-chat-", suffix=".part", dir=existing)
    try:
        with os.fdopen(handle, "wb", buffering=0) as file:
            size = _write(file.fileno(), room, seconds)
        return _read(name, size, seconds)
    finally:
        with contextlib.suppress(OSError):
            Path(name).unlink()


def _write(file: int, room: int, seconds: float) -> int:
    piece, size, until = os.urandom(_PIECE), 0, time.perf_counter() + seconds
    while size + _PIECE <= room and (size < _LEAST or time.perf_counter() < until):
        size += os.write(file, piece)
        os.fsync(file)  # data must be on the disk before it can be read from it
    return size


def _read(name: str, size: int, seconds: float) -> float:
    file = _open_past_cache(name)
    try:
        buffer = mmap.mmap(-1, _PIECE)  # page-aligned, as direct reads require
        done, begun = 0, time.perf_counter()
        passed = 0.0
        while done < size and passed < seconds:
            count = os.readv(file, [buffer]) if hasattr(os, "readv") else len(os.read(file, _PIECE))
            if not count:
                break
            done += count
            passed = time.perf_counter() - begun
    finally:
        os.close(file)
    if not done or passed <= 0:
        raise OSError("nothing could be read back")
    return done / passed


def _open_past_cache(name: str) -> int:
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0)
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # tmpfs and others refuse it
            return os.open(name, flags | os.O_DIRECT)
    file = os.open(name, flags)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    elif sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
    return file
