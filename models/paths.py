"""Paths as people write them, and folder names as saved in notes."""

from __future__ import annotations

import re
from pathlib import Path

_LONGEST = 120  # bytes of a name: file systems take 255, and endings are added


def expanded(path: str | Path) -> Path:
    """`path` with the home folder in place of its ~; unchanged if there is no such home."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # no such user, or nothing that a user could be called
        return Path(path)


def is_file(path: str | Path) -> bool:
    """Whether a path as people write it names a file; not if it cannot be looked at, or no path is that long."""
    try:
        return expanded(path).is_file()
    except (OSError, ValueError):
        return False


def is_folder_name(name: object) -> bool:
    """Whether `name` is one component of a path and nothing else: letters, digits, "_", "-" and "."."""
    return isinstance(name, str) and bool(re.fullmatch(r"\w[\w.-]*", name)) and len(name.encode()) <= _LONGEST
