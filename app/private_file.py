"""Text files that only their owner may read, written whole or not at all."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ..models.errors import FloeError

_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def replace(file: Path, text: str) -> None:
    """Write `text` beside `file` and put it in its place at once; what was there stays whole until then.

    Raises:
        FloeError: the disk is full. OSError: it cannot be written.
    """
    try:
        if file.exists() and not file.is_file():  # a device or a pipe is written into, not replaced
            file.write_text(text, encoding="utf-8")
            return
        _replace(file.resolve(), text)  # people keep such files elsewhere and link to them
    except OSError as error:
        if error.errno in _FULL:
            cause = f"{file.absolute().parent} has no room for it."
            raise FloeError(f"{file} cannot be written", cause, "Make room on that disk.") from error
        raise


def create(file: Path, text: str) -> None:
    """Write `text` into `file`, which is not there yet.

    Raises:
        FileExistsError: it is. FloeError: the disk is full. OSError: it cannot be written.
    """
    os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # nobody else takes the name meanwhile
    try:
        replace(file, text)
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise


def _replace(file: Path, text: str) -> None:
    descriptor, name = tempfile.mkstemp(prefix=".floe-chat-", dir=file.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        Path(name).replace(file)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise
