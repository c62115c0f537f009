"""Finds text files by a few letters of their path."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..models.paths import expanded

_MOST = 20_000
_PLACES = ("~", "..")
_SKIPPED = {"node_modules", "__pycache__", "venv", "build", "dist", "target"}


def listing(folder: Path) -> list[str]:
    """Relative paths of the files below `folder`, without hidden ones; the least nested come first."""
    found: list[str] = []
    for path in _walk(folder):
        found.append(path)
        if len(found) >= _MOST:
            break
    return sorted(found, key=lambda path: (path.count("/"), path))


def outside(query: str) -> list[str]:
    """The files and folders that complete the path `query`, which names a place by itself; case does not matter."""
    if query in _PLACES:
        return [query + "/"]
    head, _slash, start = query.rpartition("/")
    folder = expanded(head + "/")
    try:
        fitting = [entry for entry in os.scandir(folder) if entry.name.lower().startswith(start.lower())]
        fitting.sort(key=lambda entry: entry.name)
        return [f"{head}/{entry.name}{'/' if entry.is_dir() else ''}" for entry in fitting[:_MOST]]
    except (OSError, ValueError):
        return []


def meant(written: str) -> Path:
    """The path that the user wrote; as in a shell, quotes or backslashes may protect its spaces, but need not."""
    with suppress(ValueError):  # an apostrophe is not a quote
        words = shlex.split(written)
        return expanded(words[0] if len(words) == 1 else written)
    return expanded(written)


def is_outside(query: str) -> bool:
    """Whether `query` names a place by itself instead of something below the working folder."""
    return query in _PLACES or query.startswith(("/", *(f"{place}/" for place in _PLACES), "./"))


def matching(query: str, paths: Sequence[str]) -> list[str]:
    """The matching paths, best first: those that contain `query`, in their last part first, then those with its letters
    in order.
    """
    wanted = query.lower()
    ranked: list[tuple[int, int, str]] = []
    for path in paths:
        lower = path.lower()
        name = lower.rstrip("/").rpartition("/")[2]
        if name.startswith(wanted):
            rank = 0
        elif wanted in name:
            rank = 1
        elif wanted in lower:
            rank = 2
        elif _in_order(wanted, lower):
            rank = 3
        else:
            continue
        ranked.append((rank, len(path), path))
    return [path for _rank, _length, path in sorted(ranked)]


def _walk(folder: Path) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
        place = Path(root).relative_to(folder)
        for name in sorted(names):
            if not name.startswith("."):
                yield (place / name).as_posix()


def _in_order(letters: str, text: str) -> bool:
    rest = iter(text)
    return all(letter in rest for letter in letters)
