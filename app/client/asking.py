"""What both kinds of clients do with requests: a cancel is final, and each request ends once."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from ...engine.events import Failed, Finished, Sampling, Stats
from ...engine.mailbox import Mailbox
from .interface import Refused, Update


@dataclass(slots=True)
class Asked:
    """A request whose end was not polled yet.

    Attributes:
        begun: whether its prompt is being made, or was. cancelled: whether a person stopped it.
    """

    request: int
    begun: bool = False
    cancelled: bool = False
    _handed: threading.Lock = field(default_factory=threading.Lock)

    def hand_over(self) -> bool:
        """Whether what computes it is still to get it: true once, whichever threads ask, and signal handlers."""
        return self._handed.acquire(blocking=False)


One = TypeVar("One", bound=Asked)


class Asking(ABC, Generic[One]):
    """The requests of a client, and what is to be polled."""

    def __init__(self) -> None:
        self._news: Mailbox[Update] = Mailbox()
        self._asked: dict[int, One] = {}
        self._last_request = 0

    def listen(self, heard: Callable[[], None]) -> None:
        """Have `heard` called, on some thread, whenever there is something to `poll`."""
        self._news.heard = heard

    def poll(self, timeout: float = 0.0) -> list[Update]:
        """What happened since the last call, in order; waits at most `timeout` seconds for the first."""
        found: list[Update] = []
        for update in self._news.take(timeout):
            request = None if isinstance(update, Stats) else getattr(update, "request", None)
            asked = None if request is None else self._asked.get(request)
            if asked is None:
                if request is None:
                    found.append(update)
                continue  # it has ended
            if isinstance(update, Finished | Failed) or (isinstance(update, Refused) and not asked.cancelled):
                del self._asked[asked.request]
                cancelled = asked.cancelled and isinstance(update, Finished)
                found.append(replace(update, reason="cancelled") if cancelled else update)
            elif not asked.cancelled:
                found.append(update)
        return found

    def cancel(self, request: int | None = None) -> None:
        """Stop the answer to a request, or all: nothing comes of it any more but its end."""
        for asked in [*self._asked.values()]:
            if request in (None, asked.request):
                asked.begun = asked.cancelled = True
                self._stop(asked)

    @abstractmethod
    def _stop(self, asked: One) -> None:
        """Let what computes it end it, at once if it does not have it yet; never waits."""


def apart(sampling: Sampling, number: int) -> Sampling:
    """How the answer with this number of several to a question is drawn: each has a seed of its own."""
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + number) % (1 << 63))
