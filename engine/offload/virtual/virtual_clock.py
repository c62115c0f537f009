"""Virtual time: the time a card would take, combined with the time that this program's own code takes here."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....kernels.cpu.binding import records

Timeline = Literal["host", "gpu", "cpu", "link"]


class Clock:
    """Virtual seconds of four parallel lanes, each working on one thing at a time.

    The host lane is the engine's thread: its end is now. Work handed to another lane begins when that lane is free. The
    host's own work counts only inside `host`, with its real processor time.

    Attributes:
        record: `floe_clock`, the whole state.
    """

    def __init__(self, ticks: NDArray[np.float64] | None = None) -> None:
        """`ticks`: the calling thread's processor seconds, as they are read one after the other; None: the system's."""
        lanes = dict.fromkeys(("host", "gpu", "cpu", "link", "host_busy", "gpu_busy", "cpu_busy", "link_busy"), 0.0)
        count = 0 if ticks is None else ticks.size
        self.record: Any = records.clock(
            **lanes, counted=0.0, ticks=ticks, tick=0, tick_count=count, counting=False, reserved=0
        )
        self._ticks = ticks

    @contextmanager
    def host(self) -> Generator[None]:
        """Inside, the host's own work counts with this thread's time."""
        self._resume()
        try:
            yield
        finally:
            self._count()
            self.record.counting = False

    @contextmanager
    def aside(self) -> Generator[None]:
        """Inside, this thread simulates another lane, whose time is counted separately."""
        self._count()
        counting, self.record.counting = self.record.counting, False
        try:
            yield
        finally:
            if counting:
                self._resume()

    def _resume(self) -> None:
        self.record.counted, self.record.counting = self._thread_time(), True

    def _count(self) -> None:
        record = self.record
        if record.counting:
            before, record.counted = record.counted, self._thread_time()
            record.host += record.counted - before
            record.host_busy += record.counted - before

    def _thread_time(self) -> float:
        if self._ticks is None:
            return time.thread_time()
        self.record.tick += 1
        return float(self._ticks[self.record.tick - 1])

    @property
    def now(self) -> float:
        """The engine thread's time."""
        self._count()
        return self.record.host

    def end(self, lane: Timeline) -> float:
        """When a lane will have finished all its work."""
        return self.now if lane == "host" else getattr(self.record, lane)

    def busy(self, lane: Timeline) -> float:
        """Seconds of work given to a lane so far."""
        self._count()
        return getattr(self.record, f"{lane}_busy")

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
        end = max(getattr(self.record, lane), after, now if asked is None else asked) + seconds
        setattr(self.record, f"{lane}_busy", getattr(self.record, f"{lane}_busy") + seconds)
        setattr(self.record, lane, end)
        return end

    def wait(self, lane: Timeline, until: float) -> float:
        """Let a lane begin nothing more before `until`; returns the seconds that it idles because of that."""
        now = self.now
        end = getattr(self.record, lane)
        setattr(self.record, lane, max(end, until))
        return max(0.0, until - max(end, now))

    def sync(self, lane: Timeline) -> float:
        """The host waits for all of a lane's work; returns the seconds waited."""
        return self.wait("host", getattr(self.record, lane))
