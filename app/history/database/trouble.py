"""Explains what SQLite and the file system refuse."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ....models.errors import FloeError, TryAgainError

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_PASSING = {
    *_BUSY,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
# Errors that an undamaged file of ours cannot cause while it is opened.
_FOREIGN = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG}


SQLITE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
"""What sqlite3 raises; the second if a damaged file's bytes get into an error's text."""


class DamagedError(FloeError):
    """The history's file is damaged."""


def is_passing(error: BaseException) -> bool:
    """Whether the same call may work later: after a lock, a full or a missing disk."""
    return isinstance(error, sqlite3.Error) and _code(error) in _PASSING


def is_busy(error: BaseException) -> bool:
    """Whether another program's lock is the reason."""
    return isinstance(error, sqlite3.Error) and _code(error) in _BUSY


def is_damage(error: BaseException, *, opening: bool = False) -> bool:
    """Whether `error` means that the file is damaged; while `opening` it, more errors can only mean that."""
    if isinstance(error, sqlite3.Error):
        return _code(error) in (_DAMAGED | _FOREIGN if opening else _DAMAGED)
    return isinstance(error, DamagedError | UnicodeDecodeError)


def checked(file: Path) -> Path:
    """An empty file, dated when the history in `file` was last found undamaged; 1970: a sign of damage since."""
    return file.with_name(file.name + "-checked")


@contextmanager
def explaining(file: Path) -> Generator[None]:
    """Errors of SQLite inside become a FloeError; after a sign of damage the next start checks the file."""
    try:
        yield
    except SQLITE_ERRORS as error:
        raise explain(error, file) from error


def explain(error: sqlite3.Error | UnicodeDecodeError | OSError, file: Path) -> FloeError:
    """An explanation of `error` in the history `file`. After a sign of damage the next start checks the file."""
    if is_damage(error):
        with suppress(OSError):
            os.utime(checked(file), (0, 0))
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return _no_room(file)
    if isinstance(error, OSError):
        where = error.filename or file
        return FloeError("The history cannot be saved", f"{where}: {error.strerror or error}.", _PERMISSION)
    if isinstance(error, UnicodeDecodeError):
        return damaged(file, "its schema is not text")
    match _code(error):
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED:
            hint = "Another program is using it, perhaps a backup. Try again when it has finished."
            return TryAgainError("The history is locked", f"{file} is in use.", hint)
        case sqlite3.SQLITE_FULL:
            return _no_room(file)
        case sqlite3.SQLITE_IOERR | sqlite3.SQLITE_CANTOPEN if _is_full(file):
            return _no_room(file)
        case sqlite3.SQLITE_CANTOPEN:
            return FloeError("The history cannot be opened", f"{file}: {error}.", _PERMISSION)
        case sqlite3.SQLITE_READONLY:
            return FloeError("The history cannot be saved", f"{file} cannot be written: {error}.", _PERMISSION)
        case sqlite3.SQLITE_CONSTRAINT:
            # Every row belongs to a conversation: this one's was wiped meanwhile.
            cause = "It was deleted, perhaps by another floe-chat, before this could be saved in it."
            return FloeError("There is no such chat", cause)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            return damaged(file, str(error))
        case _:
            return FloeError("The history failed", f"{file}: {error}.", "Check the disk.")


def damaged(file: Path, finding: str) -> DamagedError:
    """The error that says so."""
    hint = "The next start moves the file aside and copies what can be read of it to a new history."
    return DamagedError("The history is damaged", f"{file}: {finding}.", hint)


_PERMISSION = "Make it writable, or set XDG_DATA_HOME to another folder."


def _no_room(file: Path) -> FloeError:
    return FloeError("The disk is full", f"The history in {file} cannot be written.", "Free some space on that disk.")


def _is_full(file: Path) -> bool:
    # The index of its log, which SQLite maps, grows by 32 KiB; without room for it the error names no reason.
    with suppress(OSError):
        return shutil.disk_usage(file.parent).free < 1 << 16
    return False


def _code(error: sqlite3.Error) -> int:
    # Errors of the module itself, such as a closed connection, carry no code.
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
