"""Reading a file that a person sends along with a question."""

from __future__ import annotations

import stat
from pathlib import Path

from ...models.errors import UsageError
from .records import Attachment

LARGEST = 1_000_000
"""Bytes of an attachment: several times the window of any model here."""


def read_attachment(path: Path) -> Attachment:
    """The text file `path`, unchanged but for a byte order mark, which is left out.

    Raises:
        UsageError: it cannot be read, is not a file, is too large, or is not text.
    """
    try:
        found = path.stat()  # opening a pipe or a device could block
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(
                f"{path} cannot be attached", "It is not an ordinary file.", "Give the path of a text file."
            )
        if found.st_size > LARGEST:
            raise _too_large(path, found.st_size)
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "It is not a valid path"
        raise UsageError(f"{path} cannot be attached", f"{reason}.", "Give the path of a text file.") from error
    if len(content) > LARGEST:
        raise _too_large(path, len(content))
    hint = "Attach a text file in UTF-8."
    if b"\0" in content:
        raise UsageError(f"{path} cannot be attached", "It is binary: it contains zero bytes.", hint)
    try:
        return Attachment(path.name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        where = f"It is not UTF-8 text: byte {error.start:,} is not part of a character."
        raise UsageError(f"{path} cannot be attached", where, hint) from error


def _too_large(path: Path, size: int) -> UsageError:
    cause = f"It has {size:,} bytes; at most {LARGEST:,} can be attached."
    return UsageError(f"{path} cannot be attached", cause, "Attach a part of it.")
