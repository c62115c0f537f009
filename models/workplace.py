"""The folder that a pack is written into: nobody else's files, no second writer, enough room."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil

from .errors import FloeError, TryAgainError, UsageError
from .manifest import COPIED, FILE_NAME, UNFINISHED


@contextmanager
def claimed(folder: Path, source: Path, needed: int) -> Generator[None]:
    """Hold `folder` for a pack of `needed` bytes, emptied of what an interrupted one left there.

    Leaving it after an exception keeps the mark of an unfinished pack, which the next one may take over.

    Raises:
        UsageError: it is the source, a file, a finished pack, or holds files that are not ours.
        TryAgainError: another running process packs into it. FloeError: the disk is too small.
    """
    if folder.resolve() == source.resolve():
        raise UsageError("The pack cannot be written over its source", "", "Choose another folder.")
    if (folder / FILE_NAME).exists():
        raise UsageError(
            f"{folder} already holds a packed model", "", "Choose another folder, or delete that one first."
        )
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file", "", "Choose a folder that is empty or does not exist.")
    folder.mkdir(parents=True, exist_ok=True)
    _take_marker(folder)
    for path in folder.iterdir():
        if path.name in (*COPIED, FILE_NAME + ".part") or path.suffix == ".safetensors":
            path.unlink()
    marker = folder / UNFINISHED
    if needed > (free := shutil.disk_usage(folder).free):
        marker.unlink()
        raise FloeError(
            f"The disk of {folder} is too small",
            f"The pack takes {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free.",
            "Free some space or choose another disk.",
        )
    try:
        yield
    except BaseException:
        marker.write_text("{}", encoding="utf-8")
        raise
    marker.unlink()


def _take_marker(folder: Path) -> None:
    """Mark `folder` as being written by this process."""
    marker = folder / UNFINISHED
    partial = marker.with_suffix(".part")
    if not marker.exists() and (strangers := sorted({path.name for path in folder.iterdir()} - {partial.name})):
        raise UsageError(
            f"{folder} holds other files",
            f"For example {strangers[0]}.",
            "Choose an empty folder: nothing was changed.",
        )
    if (writer := _writer(marker)) is not None:
        raise TryAgainError(
            f"Another floe-chat is packing into {folder}",
            f"It is process {writer}.",
            "Wait until it has finished, or choose another folder.",
        )
    partial.write_text(json.dumps({"pid": os.getpid(), "started": psutil.Process().create_time()}), encoding="utf-8")
    partial.replace(marker)
    if _writer(marker) != os.getpid():  # two began at once, and the other was later
        raise TryAgainError(f"Another floe-chat is packing into {folder}", "", "Wait until it has finished.")


def _writer(marker: Path) -> int | None:
    """The process that wrote the marker, if it still runs; a number given to a newer process does not count."""
    try:
        fields = json.loads(marker.read_text(encoding="utf-8"))
        process = psutil.Process(int(fields["pid"]))
        return process.pid if process.create_time() == fields["started"] else None
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
