"""The folder that a pack is written into: no other files, no second writer, enough room."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .. import private_file
from ..errors import FloeError, TryAgainError, UsageError
from ..pack.manifest import COPIED, FETCHING, FILE_NAME, UNFINISHED
from . import journal
from .journal import Journal, Settings


@contextmanager
def claimed(folder: Path, source: Path, settings: Settings, needed: int, *, fresh: bool) -> Generator[Journal]:
    """Hold `folder` for a pack of `needed` bytes, and its journal: that of an interrupted pack, or a new one.

    Leaving it after an exception keeps finished work, so that the same pack can continue. `fresh` starts over instead.

    Raises:
        UsageError: it is the source, a file, a finished pack, holds files that are not ours, or a pack with other
            settings was interrupted there. TryAgainError: another process packs into it.
        FloeError: the disk is too small.
    """
    if folder.resolve() == source.resolve():
        raise UsageError("The pack cannot be written over its source", "", "Choose another folder.")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "", "Choose a folder that is empty or does not exist.")
    marker = folder / UNFINISHED
    if not marker.exists():
        _refuse_content(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tidy = False
    try:
        with locked(marker, f"Another floe-chat is packing into {folder}"):
            finished = (folder / FILE_NAME).exists()  # and only tidying up was interrupted
            if not finished and (fresh or not Journal.exists(folder)):
                _wipe(folder)
            found = Journal.open(folder, settings)
            if not finished:
                tidy = not found.resumed
                _need_room(folder, needed)
            tidy = False
            yield found
            tidy = True
    finally:
        if tidy:
            shutil.rmtree(folder / journal.FOLDER, ignore_errors=True)
            marker.unlink(missing_ok=True)  # last, so that a cut in between is noticed


@contextmanager
def locked(marker: Path, title: str) -> Generator[None]:
    """Lock a file that names the process working in its folder; the system releases it when the process ends.

    Raises:
        TryAgainError: another process holds it. FloeError: the disk does not support locks.
    """
    import filelock  # takes time, and only packing and downloading need it

    lock = filelock.FileLock(marker, blocking=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise TryAgainError(title, _holder(marker), "Wait until it has finished, or choose another folder.") from None
    except (OSError, NotImplementedError) as error:  # filelock raises the second where the system has no such locks
        cause = f"{getattr(error, 'strerror', None) or error}."
        raise FloeError(f"{marker} cannot be locked", cause, "Choose a folder on another disk.") from error
    try:
        marker.write_text(json.dumps({"pid": os.getpid()}), encoding="utf-8")
        yield
    finally:
        lock.release()


def _holder(marker: Path) -> str:
    try:
        pid = private_file.read_json(marker)["pid"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"It is process {pid}." if type(pid) is int and 0 < pid < 1 << 32 else ""


def is_ours(folder: Path) -> bool:
    """Whether a folder may be written into and deleted: it is absent, empty, a pack, or a download."""
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        return True
    except OSError:  # it is a file, or may not be read
        return False
    return not names or bool(names & {FILE_NAME, UNFINISHED, FETCHING})


def _refuse_content(folder: Path) -> None:
    if (folder / FILE_NAME).exists():
        raise UsageError(
            f"{folder} already holds a packed model", "", "Choose another folder, or delete that one first."
        )
    if folder.exists() and (strangers := sorted({path.name for path in folder.iterdir()} - {UNFINISHED})):
        raise UsageError(
            f"{folder} holds other files",
            f"For example {strangers[0]}.",
            "Choose an empty folder: nothing was changed.",
        )


def _wipe(folder: Path) -> None:
    """Delete what an interrupted pack left."""
    for path in folder.iterdir():
        if path.name in COPIED or path.suffix in (".safetensors", ".part"):
            path.unlink()
    shutil.rmtree(folder / journal.FOLDER, ignore_errors=True)


def _need_room(folder: Path, needed: int) -> None:
    free, have = shutil.disk_usage(folder).free, sum(map(_allocated, folder.rglob("*")))
    if needed - have > free:
        raise FloeError(
            f"The disk of {folder} is too small",
            f"The pack takes {(needed - have) / 1e9:.1f} GB and {free / 1e9:.1f} GB are free.",
            "Free some space or choose another disk.",
        )


def _allocated(path: Path) -> int:
    """Bytes of disk that a file takes, those that it has claimed and not yet written among them."""
    stat = path.stat()
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size
