"""Virtual time: the time a card would take, combined with the time that this program's own code takes here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Literal

Timeline = Literal["host", "gpu", "cpu", "link"]


class Clock:
    """Virtual seconds of four parallel lanes, each working on one thing at a time.

    The host lane is the engine's thread: its end is now. Work handed to another lane begins when that lane is free. The
    host's own work counts only inside `host`, with its real processor time.
    """

    def __init__(self, thread_time: Callable[[], float] = time.thread_time) -> None:
        """`thread_time`: processor seconds of the calling thread."""
        self._ends: dict[Timeline, float] = {"host": 0.0, "gpu": 0.0, "cpu": 0.0, "link": 0.0}
        self._busy: dict[Timeline, float] = dict(self._ends)
        self._thread_time = thread_time
        self._counted: float | None = None  # thread time up to which the host's work is counted; None: not counting

    @contextmanager
    def host(self) -> Generator[None]:
        """Inside, the host's own work counts with this thread's time."""
        self._counted = self._thread_time()
        try:
            yield
        finally:
            self._count()
            self._counted = None

    @contextmanager
    def aside(self) -> Generator[None]:
        """Inside, this thread simulates another lane, whose time is counted separately."""
        self._count()
        counting, self._counted = self._counted is not None, None
        try:
            yield
        finally:
            self._counted = self._thread_time() if counting else None

    def _count(self) -> None:
        if self._counted is not None:
            before, self._counted = self._counted, self._thread_time()
            self._ends["host"] += self._counted - before
            self._busy["host"] += self._counted - before

    @property
    def now(self) -> float:
        """The engine thread's time."""
        self._count()
        return self._ends["host"]

    def end(self, lane: Timeline) -> float:
        """When a lane will have finished all its work."""
        return self.now if lane == "host" else self._ends[lane]

    def busy(self, lane: Timeline) -> float:
        """Seconds of work given to a lane so far."""
        self._count()
        return self._busy[lane]

    def run(self, lane: Timeline, seconds: float, after: float = 0.0, asked: float | None = None) -> float:
        """Give a lane work; returns when it ends.

        Args:
            after: earliest start, for work that needs another lane's result. asked: when it was handed over; None: now.

        Raises:
            ValueError: seconds that are negative or no number.
        """
        if not 0 <= seconds < math.inf:
            raise ValueError(f"no work takes {seconds} seconds")
        now = self.now
        begin = max(self._ends[lane], after, now if asked is None else asked)
        self._busy[lane] += seconds
        self._ends[lane] = begin + seconds
        return self._ends[lane]

    def wait(self, lane: Timeline, until: float) -> float:
        """Let a lane begin nothing more before `until`; returns the seconds that it idles because of that."""
        now = self.now
        free = max(self._ends[lane], now)
        self._ends[lane] = max(self._ends[lane], until)
        return max(0.0, until - free)

    def sync(self, lane: Timeline) -> float:
        """The host waits for all of a lane's work; returns the seconds waited."""
        return self.wait("host", self._ends[lane])
