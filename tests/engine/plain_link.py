"""What kernels/cpu/link does for a virtual card, in Python: its queue, and a link whose chunks take virtual time."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass
from functools import cache

import torch
from floe_chat.engine.offload.cards import PREFIX, Card
from floe_chat.engine.offload.links.link import check_ends
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.engine.offload.virtual.virtual_clock import Clock
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.codes import ALIGN
from floe_chat.kernels.layouts import RowLayout, VectorLayout
from floe_chat.kernels.weights import ExpertRows
from torch import Tensor

from ..kernels.plain_pool import landing


@dataclass(eq=False, slots=True)
class Job:
    """A transfer in the queue.

    Attributes:
        index, places: (N,) int64, rows of the source and slots of the target.
        asked_at: by the link's clock. begun: rows whose chunks have begun. sent: rows on their way or landed.
    """

    transfer: Transfer
    index: Tensor
    places: Tensor
    asked_at: float = 0.0
    begun: int = 0
    sent: int = 0

    @property
    def total(self) -> int:
        """The number of rows."""
        return self.index.numel()

    def rows(self) -> ExpertRows:
        """The source as one expert, for moving bytes: any layout with rows of that size will do."""
        source = self.transfer.source
        return ExpertRows(_plain(source.shape[1]), source[None])


@dataclass(slots=True)
class Chunk:
    """Rows first..last-1 of a job.

    Attributes:
        number: of the link's chunks, in the order in which they begin and land.
        begun_at, due: by the link's clock, when it began and when it lands; `due` is 0 if unknown in advance.
    """

    job: Job
    first: int
    last: int
    number: int
    begun_at: float
    due: float = 0.0

    @property
    def total(self) -> int:
        """Rows."""
        return self.last - self.first


class LinkQueue:
    """Transfers from `put` until they have landed: urgent ones in order, then prefetches, highest score first.

    Attributes:
        flying: chunks on their way, in the order in which they land.
        queued_bytes: of rows that were put and have not landed. bytes_moved: of rows that have.
        busy_s: seconds in which rows were on their way or being packed: bytes_moved / busy_s is the link's rate.
    """

    def __init__(self, nbytes: int, chunk: int, device: torch.device) -> None:
        """For rows of `nbytes` to a device, `chunk` of them at a time, at most.

        Raises:
            ValueError: sizes that no rows have.
        """
        if nbytes < 1 or nbytes % ALIGN or chunk < 1:
            raise ValueError(f"chunks of {chunk} rows of {nbytes} bytes: rows are multiples of {ALIGN} bytes")
        self.nbytes, self.chunk, self._device = nbytes, chunk, device
        self.flying: deque[Chunk] = deque()
        self.queued_bytes = self.bytes_moved = 0
        self.busy_s = 0.0
        self._jobs: dict[Transfer, Job] = {}  # put, not landed
        self._urgent: deque[Job] = deque()
        self._prefetch: list[Job] = []
        self._finished: list[Transfer] = []
        self._begun = 0
        self._landed_at = -math.inf

    def __bool__(self) -> bool:
        """Whether some chunk has not begun."""
        return bool(self._urgent or self._prefetch)

    def accept(self, transfer: Transfer) -> Job:
        """Check everything, so that chunks need no checks. Nothing is queued yet.

        Raises:
            ValueError: rows, slots, tensors or a score that do not fit.
        """
        check_ends(transfer, self.nbytes, self._device)
        source, target, index, slots = transfer.source, transfer.target, transfer.index, transfer.slots
        places = landing(index, slots, len(source), len(target))
        return Job(transfer, torch.from_numpy(index.copy()), torch.from_numpy(places))

    def put(self, job: Job, now: float) -> None:
        """Queue an accepted transfer; one without rows is done at once.

        Raises:
            ValueError: it was submitted before.
        """
        transfer = job.transfer
        if transfer.done or transfer in self._jobs:
            raise ValueError("the transfer was submitted before")
        if not job.total:
            self.done(job)
            return
        self._jobs[transfer], job.asked_at = job, now
        self.queued_bytes += job.total * self.nbytes
        if transfer.urgent:
            self._urgent.append(job)
        else:
            insort(self._prefetch, job, key=lambda other: -other.transfer.score)  # after transfers of the same rank

    def urge(self, transfer: Transfer) -> Job:
        """Make a transfer that has not landed urgent.

        Raises:
            ValueError: it was never submitted, or was dropped.
        """
        job = self._jobs.get(transfer)
        if job is None:
            raise ValueError("the transfer is not on this link: it was never submitted, or dropped")
        if job in self._prefetch:
            self._prefetch.remove(job)
            self._urgent.append(job)
        transfer.urgent = True
        return job

    def drop(self, layer: int | None) -> list[Transfer]:
        """Take prefetches of a layer (None: of all) that have not begun out of the queue."""
        gone = [job for job in self._prefetch if not job.begun and layer in (None, job.transfer.layer)]
        for job in gone:
            self._prefetch.remove(job)
            del self._jobs[job.transfer]
            self.queued_bytes -= job.total * self.nbytes
        return [job.transfer for job in gone]

    def asked_at(self) -> float:
        """When the transfer whose chunk is next was submitted."""
        return (self._urgent or self._prefetch)[0].asked_at

    def begin(self, now: float) -> Chunk:
        """The next chunk, which begins now; it is on its way once it is `sent`."""
        queue = self._urgent or self._prefetch
        job = queue[0]
        first = job.begun
        job.begun = min(first + self.chunk, job.total)
        if job.begun == job.total:
            del queue[0]
        self._begun += 1
        return Chunk(job, first, job.begun, self._begun, now)

    def sent(self, chunk: Chunk) -> None:
        """Note that a chunk is on its way."""
        self.flying.append(chunk)
        chunk.job.sent = chunk.last

    def landed(self, now: float) -> None:
        """Note that the oldest chunk has landed; a transfer is done with its last chunk."""
        chunk = self.flying.popleft()
        nbytes = chunk.total * self.nbytes
        self.queued_bytes -= nbytes
        self.bytes_moved += nbytes
        self.busy_s += now - max(chunk.begun_at, self._landed_at)
        self._landed_at = now
        if chunk.last == chunk.job.total:
            del self._jobs[chunk.job.transfer]
            self.done(chunk.job)

    def done(self, job: Job) -> None:
        """Mark a job as done: later computation finds its rows in their slots, even if not all chunks have landed."""
        if not job.transfer.done:
            job.transfer.done = True
            self._finished.append(job.transfer)

    def finished(self) -> list[Transfer]:
        """The transfers done since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def landed_all(self) -> bool:
        """Whether all queued transfers have landed."""
        return not self._jobs


class VirtualLink:
    """A link (see `transfer.Link`) whose chunks take a card's time.

    Bytes are in the target when `submit` returns, so that decisions and results are real; `done` follows the clock's
    link lane. Landed are the chunks due by the host's clock, and those that the GPU has waited for.
    """

    def __init__(self, card: Card, clock: Clock, nbytes: int, chunk: int, *, content: bool = True) -> None:
        """`nbytes`: of one row. `chunk`: rows at a time, at most. `content`: whether bytes are moved."""
        self.name = PREFIX + card.name
        self._card, self._clock, self._content = card, clock, content
        self._queue = LinkQueue(nbytes, chunk, torch.device("cpu"))
        self._staging = torch.empty(self._queue.chunk, nbytes, dtype=torch.uint8)
        self._closed = False

    @property
    def bytes_moved(self) -> int:
        """Bytes landed so far."""
        return self._queue.bytes_moved

    @property
    def busy_s(self) -> float:
        """Virtual seconds, see `LinkQueue`."""
        return self._queue.busy_s

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        self._catch_up()
        return self._queue.queued_bytes

    def submit(self, transfer: Transfer) -> None:
        """See `Link`."""
        if self._closed:
            raise RuntimeError("the link is closed")
        job = self._queue.accept(transfer)
        self._catch_up()
        self._queue.put(job, self._clock.now)
        with self._clock.aside():
            if self._content:
                self._move(job)

    def wait(self, transfer: Transfer) -> float:
        """The GPU's lane begins nothing more before the rows have landed; returns the virtual seconds that it idles
        because of that.

        Raises:
            ValueError: it was never submitted, or was dropped.
        """
        if not transfer.done:
            self._catch_up()
        if transfer.done:
            return 0.0
        job = self._queue.urge(transfer)
        with self._clock.aside():
            while job.begun < job.total:  # nothing submitted later can overtake what begins here
                self._begin_chunk()
            last = next(chunk for chunk in self._queue.flying if chunk.last == job.total and chunk.job is job)
            self._land(last.due)
        idle = self._clock.wait("gpu", last.due)
        self._clock.wait("host", last.begun_at)  # as a real link returns once the last chunk is under way
        return idle

    def finished(self) -> list[Transfer]:
        """See `Link`."""
        self._catch_up()
        return self._queue.finished()

    def drop(self, layer: int | None) -> list[Transfer]:
        """See `Link`."""
        self._catch_up()
        return self._queue.drop(layer)

    def close(self) -> None:
        """End: queued transfers are not done."""
        self._closed = True

    def _move(self, job: Job) -> None:
        cpu, size, rows = kernels.choose("cpu"), self._queue.chunk, job.rows()
        for wanted, slots in zip(job.index.split(size), job.places.split(size), strict=True):
            packed = self._staging[: len(wanted)]
            cpu.gather_rows(rows, 0, wanted, packed)
            cpu.pool_scatter(job.transfer.target, slots, packed)

    def _catch_up(self) -> None:
        """Begin the chunks that begin before now, and land those that end by now."""
        now = self._clock.now
        with self._clock.aside():  # on a real link its own thread does this
            while self._queue and not self._closed and self._begins() < now:
                self._begin_chunk()
            self._land(now)

    def _begins(self) -> float:
        return max(self._clock.end("link"), self._queue.asked_at())

    def _begin_chunk(self) -> None:
        chunk = self._queue.begin(self._begins())
        chunk.due = self._clock.run("link", self._card.copy_s(chunk.total * self._queue.nbytes), asked=chunk.begun_at)
        self._queue.sent(chunk)

    def _land(self, until: float) -> None:
        flying = self._queue.flying
        while flying and flying[0].due <= until:
            self._queue.landed(flying[0].due)


@cache
def _plain(nbytes: int) -> RowLayout:
    half = VectorLayout(nbytes // 4, 16, nbytes // 4)
    return RowLayout(half, half, torch.float16)
