"""The queue of a link: which rows go next, in which chunks, and which have landed. It has no thread and no clock.

A link moves chunks of rows. Before each chunk the queue is asked again, so that an urgent transfer waits for the chunks
on their way at most; an interrupted prefetch continues later. Two kinds of link work through it: `threaded_link.py`
by the machine's clock, `virtual_link.py` by a virtual one. It defines what kernels/cpu/link/link_queue.cpp does.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ....kernels.codes import ALIGN
from ....kernels.cpu.native_pool import landing
from ....kernels.layouts import RowLayout, VectorLayout
from ....kernels.weights import ExpertRows
from .transfer import Transfer


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


def check_tensors(source: Tensor, target: Tensor, nbytes: int, device: torch.device) -> None:
    """Check both ends of transfers.

    Raises:
        ValueError: tensors that do not fit.
    """
    for what, tensor, place in (("source", source, torch.device("cpu")), ("target", target, device)):
        if tensor.dtype != torch.uint8 or tensor.ndim != 2 or not tensor.is_contiguous():
            raise ValueError(f"{what} must be contiguous 2-D uint8, not {tensor.ndim}-D {tensor.dtype}")
        if tensor.shape[1] != nbytes or tensor.device != place:
            raise ValueError(
                f"{what} must be rows of {nbytes} bytes on {place}, not of {tensor.shape[1]} on {tensor.device}"
            )


def check_ends(transfer: Transfer, nbytes: int, device: torch.device) -> None:
    """Check a transfer's tensors and arrays, but not what index and slots hold.

    Raises:
        ValueError: rows, slots, tensors or a score that do not fit.
    """
    index, slots = transfer.index, transfer.slots
    check_tensors(transfer.source, transfer.target, nbytes, device)
    if index.dtype != np.int64 or slots.dtype != np.int32 or index.ndim != 1 or index.shape != slots.shape:
        raise ValueError(
            f"index and slots must be (N,) int64 and int32, "
            f"not {index.shape} {index.dtype} and {slots.shape} {slots.dtype}"
        )
    if math.isnan(transfer.score):
        raise ValueError("a score must be a number")


@cache
def _plain(nbytes: int) -> RowLayout:
    half = VectorLayout(nbytes // 4, 16, nbytes // 4)
    return RowLayout(half, half, torch.float16)
