"""The progress of a download, as plain values that can be read at any time."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Literal

_WINDOW = 10.0  # seconds over which the rate is taken
_STEP = 0.25  # seconds between two samples

FetchState = Literal["waiting", "fetching", "checking", "paused", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class FileProgress:
    """One file. `done` of `total` bytes are here; the state "done" also means that its hash was right."""

    name: str
    done: int
    total: int
    state: FetchState


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """A moment of a download.

    Attributes:
        done, total: bytes. rate: bytes/s over the last ten seconds. left: seconds to the end at that rate, or None.
        note: why it waits, if something is wrong; "" otherwise. notices: which files were fetched again, and why.
    """

    state: FetchState
    done: int
    total: int
    rate: float
    left: float | None
    files: tuple[FileProgress, ...]
    note: str = ""
    notices: tuple[str, ...] = ()


class RateMeter:
    """Bytes per second over the last ten seconds; any thread may add and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._samples: deque[tuple[float, int]] = deque()
        self._total = 0
        self.restart()

    def restart(self) -> None:
        """Forget the past, after a pause."""
        with self._lock:
            self._samples = deque([(time.monotonic(), self._total)])

    def add(self, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            self._total += count
            if now - self._samples[-1][0] >= _STEP:
                self._samples.append((now, self._total))
                while now - self._samples[0][0] > _WINDOW:
                    self._samples.popleft()

    def rate(self) -> float:
        now = time.monotonic()
        with self._lock:
            since, before = next((s for s in self._samples if now - s[0] <= _WINDOW), (now, self._total))
            return (self._total - before) / max(now - since, _STEP)
