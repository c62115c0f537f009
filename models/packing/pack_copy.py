"""A finished pack arrives in its folder: file by file, each with its hash, and manifest.json last."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from .. import private_file
from ..errors import PackError, UsageError
from ..pack.manifest import FETCHING, FILE_NAME, UNFINISHED, FileEntry, file_entry

_BLOCK = 4 << 20  # bytes copied between two reports


def need_unpacked(folder: Path) -> None:
    """Raises: UsageError: a model is being packed in the folder; the files of two packs would mix."""
    if (folder / UNFINISHED).exists():
        raise UsageError(
            f"{folder} holds an interrupted pack", "It is of another setup.", "Delete that one, or choose another name."
        )


def copy_file(source: Path, folder: Path, name: str, entry: FileEntry, told: Callable[[int], None]) -> None:
    """Copy a pack's file into `folder` as `name`; one that is there and intact stays.

    Args:
        source: may be a link, as in the hub's cache. told: called with the bytes of each block; what it raises ends the
            copying, and what was copied of this file.

    Raises:
        PackError: it is not the file that `entry` describes. OSError: it cannot be read or written.
    """
    to = folder / name
    if to.is_file() and not to.is_symlink() and to.stat().st_size == entry.size and file_entry(to) == entry:
        told(entry.size)
        return
    part, digest, size = to.with_name(f"{name}.part"), hashlib.sha256(), 0
    part.unlink(missing_ok=True)
    with os.fdopen(private_file.open_for(source, os.O_RDONLY), "rb") as reading, part.open("wb") as writing:
        while size <= entry.size and (block := reading.read(_BLOCK)):
            writing.write(block)
            digest.update(block)
            size += len(block)
            told(len(block))
        writing.flush()
        os.fsync(writing.fileno())
    if (size, digest.hexdigest()) != (entry.size, entry.sha256):
        part.unlink()
        cause = "Its size or sha256 differs from the manifest's."
        raise PackError(f"{source} is damaged", cause, "Restore it from a copy, or get the pack again.")
    part.replace(to)


def finish(folder: Path, files: Iterable[str], content: bytes) -> None:
    """Write manifest.json, now that all of `files` are here and verified, and delete what their arrival left.

    Raises: OSError: of the disk.
    """
    for name in files:
        for left in (f"{name}.part", f"{name}.journal"):
            (folder / left).unlink(missing_ok=True)
    private_file.replace(folder / FILE_NAME, content, private_file.SHARED)


def tidy(folder: Path) -> None:
    """Delete the mark of an arrival that has ended. Raises: OSError: it cannot be deleted."""
    (folder / FETCHING).unlink(missing_ok=True)
