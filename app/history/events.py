"""What the history tells the screen; `History.poll` hands it out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """The history is open. `saved` is False where nothing is kept; `interrupted` answers were cut off by a crash."""

    saved: bool
    interrupted: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Something was written, by this program or by another: what was read before may be old."""


@dataclass(frozen=True, slots=True)
class HistoryTrouble:
    """Something that the person has to be told; the chat goes on. It is told once until it is over."""

    title: str
    cause: str
    hint: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """What could not be written for a while is on the disk now."""


HistoryEvent = Ready | Changed | HistoryTrouble | Recovered
