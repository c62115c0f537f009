"""The virtual-time device "sim:NAME": decisions, bytes and results are real; time is counted from a card's profile.

It shows, and tests, what a schedule would cost on a card (`cards.py`), on any machine. The time that this program's own
code takes on the host is measured here, as it runs (`Clock.host`).
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..kernels import operations as kernels
from ..kernels.cpu.native_pool import landing
from .cards import CHUNK_BYTES, PREFIX, Card
from .transfer import Transfer, as_expert

Timeline = Literal["host", "gpu", "cpu", "link"]


class Clock:
    """Virtual seconds of four lanes that work side by side, each on one thing at a time.

    The host lane is the engine's thread: its end is now. What it hands to another lane begins when that lane is free.
    The host's own work takes no time but inside `host`, where it takes the processor time that it really takes.
    """

    def __init__(self, thread_time: Callable[[], float] = time.thread_time) -> None:
        """`thread_time`: processor seconds of the calling thread."""
        self._ends: dict[Timeline, float] = {"host": 0.0, "gpu": 0.0, "cpu": 0.0, "link": 0.0}
        self._busy: dict[Timeline, float] = dict(self._ends)
        self._thread_time = thread_time
        self._counted: float | None = None  # thread time up to which the host's work is counted; None: it is not

    @contextmanager
    def host(self) -> Generator[None]:
        """Inside, the host's own work takes the time that it takes this thread."""
        self._counted = self._thread_time()
        try:
            yield
        finally:
            self._count()
            self._counted = None

    @contextmanager
    def aside(self) -> Generator[None]:
        """Inside, this thread stands in for another lane, whose time is counted otherwise."""
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
        """When a lane will have done all that it was given."""
        return self.now if lane == "host" else self._ends[lane]

    def busy(self, lane: Timeline) -> float:
        """Seconds of work that a lane was given so far."""
        self._count()
        return self._busy[lane]

    def run(self, lane: Timeline, seconds: float, after: float = 0.0, asked: float | None = None) -> float:
        """Give a lane work; returns when it ends.

        Args:
            after: not before, for work that needs another lane's result. asked: when it was handed over; None: now.

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
        """Let a lane begin nothing more before `until`; returns the seconds that it idles for that alone."""
        now = self.now
        free = max(self._ends[lane], now)
        self._ends[lane] = max(self._ends[lane], until)
        return max(0.0, until - free)

    def sync(self, lane: Timeline) -> float:
        """The host waits for all that a lane was given; returns the seconds waited."""
        return self.wait("host", self._ends[lane])


@dataclass(eq=False, slots=True)
class _Job:
    transfer: Transfer
    asked: float
    rows: int  # that have not begun


@dataclass(frozen=True, slots=True)
class _Chunk:
    end: float
    nbytes: int
    seconds: float
    job: _Job | None  # whose last one it is


class VirtualLink:
    """A link whose bytes arrive at once and whose time is virtual (see transfer.Link).

    Bytes are in the target when `submit` returns, so that decisions and results are real; `done` follows the clock's
    link lane. A chunk is chosen when it begins: urgent transfers in order, then prefetches by score, highest first; a
    chunk under way is finished. What has landed is what the host's clock says, and what the GPU has waited for.
    """

    def __init__(self, card: Card, clock: Clock, nbytes: int, chunk: int | None = None) -> None:
        """`nbytes`: of one row. `chunk`: rows at a time, at most; None: as many as make up `CHUNK_BYTES`."""
        self.name = PREFIX + card.name
        self.bytes_moved = 0
        self.busy_s = 0.0
        self._card = card
        self._clock = clock
        self._nbytes = nbytes
        self._chunk = chunk or max(1, CHUNK_BYTES // nbytes)
        self._staging = torch.empty(self._chunk, nbytes, dtype=torch.uint8)
        self._jobs: dict[Transfer, _Job] = {}  # taken, not landed
        self._urgent: deque[_Job] = deque()
        self._prefetch: list[_Job] = []
        self._flying: deque[_Chunk] = deque()
        self._finished: list[Transfer] = []
        self._queued = 0
        self._closed = False

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        self._catch_up()
        return self._queued

    def submit(self, transfer: Transfer) -> None:
        """Take a transfer.

        Raises:
            ValueError: submitted before, or rows, slots or sizes that do not fit.
        """
        if self._closed:
            raise RuntimeError("the link is closed")
        if transfer.done or transfer in self._jobs:
            raise ValueError("the transfer was submitted before")
        if transfer.source.shape[1] != self._nbytes or len(transfer.index) != len(transfer.slots):
            raise ValueError(f"{len(transfer.index)} rows of {transfer.source.shape[1]} bytes, not of {self._nbytes}")
        if math.isnan(transfer.score):
            raise ValueError("a score must be a number")
        self._catch_up()
        places = landing(transfer.index, transfer.slots, len(transfer.source), len(transfer.target))
        with self._clock.aside():
            self._move(transfer, torch.from_numpy(places))
        if not len(transfer.index):
            self._done(transfer)
            return
        job = self._jobs[transfer] = _Job(transfer, self._clock.now, len(transfer.index))
        self._queued += job.rows * self._nbytes
        if transfer.urgent:
            self._urgent.append(job)
        else:
            insort(self._prefetch, job, key=lambda other: -other.transfer.score)  # behind its equals

    def wait(self, transfer: Transfer) -> float:
        """The GPU's lane begins nothing more before the rows have landed; virtual seconds that it idles for that alone.

        Raises:
            ValueError: it was not submitted, or dropped.
        """
        if transfer.done:
            return 0.0
        job = self._jobs.get(transfer)
        if job is None:
            raise ValueError("the transfer is not on this link: it was never submitted, or dropped")
        self._catch_up()
        if transfer.done:
            return 0.0
        if job in self._prefetch:
            self._prefetch.remove(job)
            self._urgent.append(job)
        transfer.urgent = True
        with self._clock.aside():
            while job.rows:  # nothing that is submitted later can overtake what is begun here
                self._begin_chunk()
            last = next(chunk for chunk in self._flying if chunk.job is job)
            self._land(last.end)
        idle = self._clock.wait("gpu", last.end)
        self._clock.wait("host", last.end - last.seconds)  # as a real link returns once the last chunk is under way
        return idle

    def finished(self) -> list[Transfer]:
        """What became done since the last call."""
        self._catch_up()
        finished, self._finished = self._finished, []
        return finished

    def drop(self, layer: int | None) -> list[Transfer]:
        """Take prefetches of a layer (None: of all) that have not begun out of the queue."""
        self._catch_up()
        gone = [
            job for job in self._prefetch if job.rows == len(job.transfer.index) and layer in (None, job.transfer.layer)
        ]
        for job in gone:
            self._prefetch.remove(job)
            del self._jobs[job.transfer]
            self._queued -= job.rows * self._nbytes
        return [job.transfer for job in gone]

    def close(self) -> None:
        """End: what is queued stays undone."""
        self._urgent.clear()
        self._prefetch.clear()
        self._closed = True

    def _move(self, transfer: Transfer, places: Tensor) -> None:
        rows, cpu = as_expert(transfer.source), kernels.choose("cpu")
        index = torch.from_numpy(transfer.index)
        for wanted, slots in zip(index.split(self._chunk), places.split(self._chunk), strict=True):
            packed = self._staging[: len(wanted)]
            kernels.gather_rows(rows, 0, wanted, packed)
            cpu.pool_scatter(transfer.target, slots, packed)

    def _catch_up(self) -> None:
        """Begin the chunks that begin before now, and land those that end by now."""
        now = self._clock.now
        with self._clock.aside():  # a real link's chunks are its own thread's work
            while (self._urgent or self._prefetch) and self._begins() < now:
                self._begin_chunk()
            self._land(now)

    def _first(self) -> _Job:
        return self._urgent[0] if self._urgent else self._prefetch[0]

    def _begins(self) -> float:
        return max(self._clock.end("link"), self._first().asked)

    def _begin_chunk(self) -> None:
        job = self._first()
        rows = min(job.rows, self._chunk)
        nbytes = rows * self._nbytes
        seconds = self._card.copy_s(nbytes)
        end = self._clock.run("link", seconds, asked=job.asked)
        job.rows -= rows
        if not job.rows:
            del (self._urgent or self._prefetch)[0]
        self._flying.append(_Chunk(end, nbytes, seconds, None if job.rows else job))

    def _land(self, until: float) -> None:
        while self._flying and self._flying[0].end <= until:
            chunk = self._flying.popleft()
            self.bytes_moved += chunk.nbytes
            self.busy_s += chunk.seconds
            self._queued -= chunk.nbytes
            if chunk.job:
                del self._jobs[chunk.job.transfer]
                self._done(chunk.job.transfer)

    def _done(self, transfer: Transfer) -> None:
        transfer.done = True
        self._finished.append(transfer)
