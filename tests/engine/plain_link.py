"""What kernels/cpu/link does for a virtual card, in Python: a queue whose chunks take virtual time."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass

from floe_chat.engine.offload.cards import Card
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.offload.virtual.virtual_clock import Clock


@dataclass(eq=False, slots=True)
class Job:
    """A transfer that was asked for by the link's clock, `begun` of whose rows have begun."""

    transfer: Transfer
    asked_at: float
    begun: int = 0

    @property
    def total(self) -> int:
        return len(self.transfer.index)


@dataclass(slots=True)
class Chunk:
    """Rows of a job, up to its row `last`: by the link's clock, when they began and when they land."""

    job: Job
    rows: int
    last: int
    begun_at: float
    due: float


class PlainLink:
    """See `Link`. Urgent transfers go in order, then prefetches, highest score first, then the older.

    Bytes are in the target when `submit` returns, so that decisions and results are real; `done` follows the clock's
    link lane. Landed are the chunks due by the host's clock, and those that the GPU has waited for.
    """

    def __init__(self, card: Card, clock: Clock, nbytes: int, chunk: int, *, content: bool = True) -> None:
        self._card, self._clock, self._nbytes, self._chunk, self._content = card, clock, nbytes, chunk, content
        self.bytes_moved, self.busy_s, self._queued, self._landed_at = 0, 0.0, 0, -math.inf
        self._jobs: dict[Transfer, Job] = {}  # not landed
        self._urgent, self._prefetch = deque[Job](), list[Job]()
        self._flying, self._finished = deque[Chunk](), list[Transfer]()

    def queued_bytes(self) -> int:
        self._catch_up()
        return self._queued

    def submit(self, transfer: Transfer) -> None:
        self._catch_up()
        job = Job(transfer, self._clock.now)
        if not job.total:
            self._done(transfer)
        else:
            self._jobs[transfer] = job
            self._queued += job.total * self._nbytes
            if transfer.urgent:
                self._urgent.append(job)
            else:
                insort(self._prefetch, job, key=lambda other: -other.transfer.score)  # after those of the same rank
        with self._clock.aside():
            if self._content:
                transfer.target[transfer.slots.tolist()] = transfer.source[transfer.index.tolist()]

    def wait(self, transfer: Transfer) -> float:
        """The GPU's lane begins nothing more before the rows have landed; the virtual seconds that it idles."""
        if not transfer.done:
            self._catch_up()
        if transfer.done:
            return 0.0
        job = self._jobs[transfer]
        if job in self._prefetch:
            self._prefetch.remove(job)
            self._urgent.append(job)
        transfer.urgent = True
        with self._clock.aside():
            while job.begun < job.total:  # nothing submitted later can overtake what begins here
                self._begin()
            last = next(chunk for chunk in self._flying if chunk.job is job and chunk.last == job.total)
            self._land(last.due)
        idle = self._clock.wait("gpu", last.due)
        self._clock.wait("host", last.begun_at)  # as a real link returns once the last chunk is under way
        return idle

    def finished(self) -> list[Transfer]:
        self._catch_up()
        finished, self._finished = self._finished, []
        return finished

    def drop(self, layer: int | None) -> list[Transfer]:
        self._catch_up()
        gone = [job for job in self._prefetch if not job.begun and layer in (None, job.transfer.layer)]
        for job in gone:
            self._prefetch.remove(job)
            del self._jobs[job.transfer]
            self._queued -= job.total * self._nbytes
        return [job.transfer for job in gone]

    def _catch_up(self) -> None:
        """Begin the chunks that begin before now, and land those that end by now."""
        now = self._clock.now
        with self._clock.aside():  # on a real link its own thread does this
            while (self._urgent or self._prefetch) and self._begins() < now:
                self._begin()
            self._land(now)

    def _begins(self) -> float:
        return max(self._clock.end("link"), (self._urgent or self._prefetch)[0].asked_at)

    def _begin(self) -> None:
        queue, begins = self._urgent or self._prefetch, self._begins()
        job = queue[0]
        first, job.begun = job.begun, min(job.begun + self._chunk, job.total)
        if job.begun == job.total:
            del queue[0]
        rows = job.begun - first
        due = self._clock.run("link", self._card.copy_s(rows * self._nbytes), asked=begins)
        self._flying.append(Chunk(job, rows, job.begun, begins, due))

    def _land(self, until: float) -> None:
        while self._flying and self._flying[0].due <= until:
            chunk = self._flying.popleft()
            self._queued -= chunk.rows * self._nbytes
            self.bytes_moved += chunk.rows * self._nbytes
            self.busy_s += chunk.due - max(chunk.begun_at, self._landed_at)
            self._landed_at = chunk.due
            if chunk.last == chunk.job.total:
                del self._jobs[chunk.job.transfer]
                self._done(chunk.job.transfer)

    def _done(self, transfer: Transfer) -> None:
        transfer.done = True
        self._finished.append(transfer)
