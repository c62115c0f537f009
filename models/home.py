"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path


def expanded(path: str | Path) -> Path:
    """`path` with the home folder in the place of its ~; as it is where nobody has that home."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):  # no such user, or nothing that a user could be called
        return Path(path)
