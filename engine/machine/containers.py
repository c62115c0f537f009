"""A container's limits on memory and CPU time, from Linux control groups of both versions.

Each group may limit what is in it, and all groups above it do as well, so the smallest limit counts. Everything is read
below a root folder, so that tests can fake machines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 says "none" by a number of this size


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that a group may use, bytes in use that it cannot release, and the file that says so."""

    limit: int
    used: int
    source: str


def memory(root: Path = ROOT) -> MemoryLimit | None:
    """Of this process's groups the one that leaves the least memory; None if none has a limit."""
    found: list[MemoryLimit] = []
    for folder in _groups(root, "memory"):
        v2 = (folder / "memory.max").exists()
        file = folder / ("memory.max" if v2 else "memory.limit_in_bytes")
        limit = _number(file)
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(folder / ("memory.current" if v2 else "memory.usage_in_bytes")) or 0
        files = _field(folder / "memory.stat", "inactive_file" if v2 else "total_inactive_file")
        found.append(MemoryLimit(limit, max(0, used - files), f"/{file.relative_to(root)}"))
    return min(found, key=lambda group: group.limit - group.used, default=None)


def cores(root: Path = ROOT) -> float | None:
    """How many cores' time this process's groups may use; None if none has a limit."""
    found: list[float] = []
    for folder in _groups(root, "cpu"):
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            quota, period = (str(_number(folder / f"cpu.cfs_{name}_us") or "max") for name in ("quota", "period"))
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            found.append(int(quota) / int(period))
    return min(found, default=None)


def usable_cores(allowed: int, root: Path = ROOT) -> int:
    """The number of cores that this process may run on, limited by its groups' CPU time."""
    limit = cores(root)
    return allowed if limit is None else min(allowed, max(1, math.ceil(limit)))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that this process is in, the innermost first.

    In a container /proc names groups as the host knows them, while the mount begins at the container's own: missing
    names are skipped, and the mount itself always counts.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            mount = mounts / "unified" if (mounts / "unified").is_dir() else mounts
        elif controller in controllers.split(","):
            mount = next((place for place in (mounts / controllers, mounts / controller) if place.is_dir()), mounts)
        else:
            continue
        inside = PurePosixPath(path.strip().lstrip("/"))
        if ".." in inside.parts:
            inside = PurePosixPath()
        for group in (inside, *inside.parents) if inside.parts else (inside,):
            if (mount / group).is_dir():
                yield mount / group


def _number(file: Path) -> int | None:
    """The number in a file; None for another word, "max" or -1, or where there is no such file."""
    try:
        text = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _field(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return 0
    return next((int(value) for key, _, value in map(_cut, lines) if key == name and value.isdecimal()), 0)


def _cut(line: str) -> tuple[str, str, str]:
    return line.partition(" ")
