"""Earlier measurements on this machine, to detect a release that made something slower.

One file per machine and benchmark, a JSON object per line, for the user's eyes only; nothing is ever sent anywhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ...models import private_file
from .measure import NOISY

_LARGEST = 1 << 26  # bytes of a file: a run takes a few kilobytes

# The facts of a table that two runs must share to be compared.
_SAME = ("model", "sizes", "threads", "prompt")


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run compares with the last run of another release here; `version` is None if there is none."""

    version: str | None
    regressions: tuple[str, ...]

    def told(self) -> tuple[str, ...]:
        """The verdict in words, one line each."""
        if self.version is None:
            return ("history: nothing to compare with: no other release was measured here",)
        if not self.regressions:
            return (f"history: nothing became slower than in {self.version}",)
        return tuple(f"regression: {line}" for line in self.regressions)


def file_of(machine: str, bench: str) -> Path:
    """The file with the runs of a benchmark on a machine."""
    state = Path(platformdirs.user_state_dir("floe-chat", appauthor=False))
    return state / "bench" / f"{machine}-{bench}.jsonl"


def append(file: Path, entry: Mapping[str, Any]) -> None:
    """Add one run.

    A line is written at once to the end of the file, so two processes cannot mix theirs, and it begins with a line
    break: a line that a crash left unfinished stays separate.

    Raises:
        OSError: it cannot be written.
    """
    private_file.own_folder(file.parent)
    descriptor = private_file.open_for(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, ("\n" + json.dumps(entry) + "\n").encode())
    finally:
        os.close(descriptor)


def read(file: Path) -> list[dict[str, Any]]:
    """All runs that can be read, oldest first; torn or foreign lines are passed over."""
    try:
        lines = private_file.read(file, _LARGEST).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [entry for line in lines if (entry := _parsed(line)) is not None]


def compare(now: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> Verdict:
    """Report what became slower since the last run of another version with the same device, threads and model.

    A figure is slower if it lost more than its spread in either run and more than 15 %: of its share of the floor if it
    has one, since the floor is as noisy as the machine, else of its time.
    """
    others = [entry for entry in before if entry["version"] != now["version"] and _alike(entry, now)]
    if not others:
        return Verdict(None, ())
    last = others[-1]
    old = {(section, row["name"]): row for section, row in _figures(last)}
    found = [
        f"{section}: {row['name']} {change}"
        for section, row in _figures(now)
        if (was := old.get((section, row["name"]))) is not None and (change := _slower(was, row, str(last["version"])))
    ]
    return Verdict(str(last["version"]), tuple(found))


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        sound = all(isinstance(entry[name], str) for name in ("version", "bench", "device"))
        for _, row in _figures(entry):
            shares = row["spread"], row["of_floor"]
            sound = sound and row["ms"] > 0 and all(share is None or share > 0 or share == 0 for share in shares)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return entry if sound and isinstance(entry.get("facts"), dict) else None


def _alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return (one["bench"], one["device"]) == (other["bench"], other["device"]) and all(
        one["facts"].get(name) == other["facts"].get(name) for name in _SAME
    )


def _figures(entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of our own code, each with its section's title.

    A row that others are compared with, and that is itself compared with nothing, is a yardstick: a floor, another
    program.
    """
    for section in entry["sections"]:
        against = {row[what] for row in section["rows"] for what in ("floor", "peer")}
        for row in section["rows"]:
            if row["name"] not in against or row["peer"] is not None:
                yield section["title"], row


def _slower(was: Mapping[str, Any], now: Mapping[str, Any], version: str) -> str:
    allowed = 1 + max(NOISY, was["spread"] or 0.0, now["spread"] or 0.0)
    times = f"was {was['ms']:.3g} ms in {version}, now {now['ms']:.3g} ms"
    if was["of_floor"] and now["of_floor"]:
        lost = was["of_floor"] / now["of_floor"] > allowed
        return f"{times} ({was['of_floor']:.0%} of its floor, now {now['of_floor']:.0%})" if lost else ""
    return times if now["ms"] / was["ms"] > allowed else ""
