"""The history's events for the screen; `History.poll` returns them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ready:
    """The history is open. `saved` is False if nothing is saved; `interrupted` answers were cut off by a crash."""

    saved: bool
    interrupted: int


@dataclass(frozen=True, slots=True)
class Changed:
    """Something was written, by this program or another: data read before may be stale."""


@dataclass(frozen=True, slots=True)
class HistoryTrouble:
    """A trouble to report to the user; the chat continues. It is reported once until it is over."""

    title: str
    cause: str
    hint: str


@dataclass(frozen=True, slots=True)
class Recovered:
    """Changes that could not be written for a while are on the disk now."""


HistoryEvent = Ready | Changed | HistoryTrouble | Recovered
