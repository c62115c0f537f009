"""JSON files that floe-chat wrote and reads back: setup notes, journals of downloads, stamps, measured rates.

Anybody may have changed them since, and they may be anything by now, a pipe or a link to a device included.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

MOST = 1 << 20  # bytes: what such a file takes at the most


def read(path: Path, most: int = MOST) -> Any:
    """The value in the file at `path`.

    Raises:
        FileNotFoundError: there is none. OSError: it cannot be read. ValueError: it is not a file, has more than
        `most` bytes, or is not JSON as floe-chat writes it (without infinities, and not nested by the hundreds).
    """
    text = text_of(path, most)
    try:
        return json.loads(text, parse_constant=_refused)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def text_of(path: Path, most: int = MOST) -> str:
    """The UTF-8 text in the file at `path`. Raises: as `read`."""
    # O_NONBLOCK: opening a pipe would wait for its writer.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a file")
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode("utf-8")


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}")
