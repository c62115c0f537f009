"""Rows on their way from RAM into slots of device memory: what a link is, and the queue and thread of the real ones.

A link moves chunks of rows: packed into a lane (a staging buffer), sent, landed in their slots. While one chunk is on
its way the next is packed (FloE section 3.4.2). Before each chunk the queue is asked anew, so that an urgent transfer
waits for the chunks in the lanes at most; a prefetch that was begun goes on later.

Who may touch what: from `submit` until it is done a transfer's slots belong to it. A slot may be given to a transfer
once the kernels that read its former row have ended, seen by the host (the pool's `release`). So a link need not wait
for the compute stream, which would put every copy behind the very kernels it is to run beside.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels.cpu.native_pool import landing
from ..kernels.layouts import ALIGN, ExpertRows, RowLayout, VectorLayout

CHUNK = 50  # rows: FloE's best for 16-bit rows on an RTX 3090 (section 4.1, figure 7); see tuned_link.py
Kind = Literal["staged", "in place"]  # packed by the CPU and copied, or read by the device where they lie
Wanted = Literal["auto", "staged", "in place"]  # "auto": what was measured to be faster here
LANES = 4  # chunks between packing and landing: one being packed, one on its way, and some slack for late wake-ups


@dataclass(eq=False, slots=True)
class Transfer:
    """Rows of RAM that are wanted in slots of device memory.

    Attributes:
        source: (R, nbytes) uint8 in RAM. index: (N,) int64, which of its rows.
        target: (S, nbytes) uint8 on the device. slots: (N,) int32, where they go, each slot once.
        urgent: goes before every prefetch; waiting for a prefetch makes it urgent.
        score: among prefetches the highest goes first. layer: the layer whose rows these are.
        done: the rows are in their slots for the compute that follows.
    """

    source: Tensor
    index: NDArray[np.int64]
    target: Tensor
    slots: NDArray[np.int32]
    urgent: bool
    score: float
    layer: int
    done: bool = False


def as_expert(rows: Tensor) -> ExpertRows:
    """Rows (R, nbytes) as those of one expert, to be gathered."""
    return ExpertRows(_plain(rows.shape[1]), rows[None])


@cache
def _plain(nbytes: int) -> RowLayout:
    """To move bytes, any layout of as many will do."""
    half = VectorLayout(nbytes // 4, 16, nbytes // 4)
    return RowLayout(half, half, torch.float16)


class Link(Protocol):
    """A way for rows from RAM into device memory. All methods are the engine thread's.

    Attributes:
        name: for people. bytes_moved: landed so far. busy_s: seconds in which rows were on their way.
    """

    name: str
    bytes_moved: int
    busy_s: float

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        ...

    def submit(self, transfer: Transfer) -> None:
        """Take a transfer and return at once. Urgent ones go first, in order; then prefetches, highest score first.

        Raises:
            ValueError: rows, slots or tensors that do not fit. Exception: what the link failed with.
        """
        ...

    def wait(self, transfer: Transfer) -> float:
        """Until the compute that follows finds the rows in their slots; seconds that were waited.

        Raises:
            ValueError: it was not submitted, or dropped. Exception: what the link failed with.
        """
        ...

    def finished(self) -> list[Transfer]:
        """What became done since the last call."""
        ...

    def drop(self, layer: int | None) -> list[Transfer]:
        """Take prefetches of a layer (None: of all) that have not begun out of the queue."""
        ...

    def close(self) -> None:
        """End: what is on its way lands, what is queued stays undone."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """A transfer as a `Mover` works on it; `begun` and `sent` count its rows.

    Attributes:
        rows: the source as one expert. index, places: (N,) int64, rows of the source and slots of the target.
    """

    transfer: Transfer
    rows: ExpertRows
    index: Tensor
    places: Tensor
    begun: int = 0
    sent: int = 0

    @property
    def total(self) -> int:
        return self.index.numel()


@dataclass(frozen=True, slots=True)
class _Chunk:
    job: Job
    first: int
    last: int
    lane: int
    begun_at: float


class Mover(ABC):
    """What the real links share: the queue, and a thread that packs, sends and lands chunk after chunk.

    A link says how a chunk is sent and landed. `busy_s` counts packing as well where nothing else is on its way
    meanwhile: bytes_moved / busy_s is the rate that rows really get.
    """

    def __init__(self, name: str, device: torch.device, nbytes: int, chunk: int) -> None:
        """Start the thread: the last thing in a link's own constructor.

        Args:
            nbytes: of one row. chunk: rows at a time, at most.

        Raises:
            ValueError: sizes that no rows have.
        """
        if nbytes < 1 or nbytes % ALIGN or chunk < 1:
            raise ValueError(f"chunks of {chunk} rows of {nbytes} bytes: rows are multiples of {ALIGN} bytes")
        self.name, self.device, self.nbytes, self.chunk = name, device, nbytes, chunk
        self.bytes_moved, self.busy_s = 0, 0.0
        self._jobs: dict[Transfer, Job] = {}  # taken, not landed
        self._urgent: deque[Job] = deque()
        self._prefetch: list[Job] = []
        self._flying: deque[_Chunk] = deque()  # changed by the thread alone
        self._finished: list[Transfer] = []
        self._queued = 0
        self._lane = 0
        self._landed_at = 0.0
        self._closing = self._ended = False
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"floe {name}", daemon=True)
        self._thread.start()

    def queued_bytes(self) -> int:
        """Bytes that were submitted and have not landed."""
        return self._queued

    def submit(self, transfer: Transfer) -> None:
        """See `Link`."""
        job = self._accept(transfer)
        with self._changed:
            if self._failure or self._closing:
                raise self._failure or RuntimeError("the link is closed")
            if transfer.done or transfer in self._jobs:
                raise ValueError("the transfer was submitted before")
            if not job.total:
                self._done(job)
                return
            self._jobs[transfer] = job
            self._queued += job.total * self.nbytes
            if transfer.urgent:
                self._urgent.append(job)
            else:
                insort(self._prefetch, job, key=lambda other: -other.transfer.score)  # behind its equals
            self._changed.notify_all()

    def wait(self, transfer: Transfer) -> float:
        """See `Link`."""
        begun = time.perf_counter()
        with self._changed:
            if transfer.done:
                return 0.0
            job = self._jobs.get(transfer)
            if job is None:
                raise ValueError("the transfer is not on this link: it was never submitted, or dropped")
            if job in self._prefetch:
                self._prefetch.remove(job)
                self._urgent.append(job)
            transfer.urgent = True
            self._until(lambda: self._reached(job))
            self._settle(job)
        return time.perf_counter() - begun

    def finished(self) -> list[Transfer]:
        """See `Link`."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def drop(self, layer: int | None) -> list[Transfer]:
        """See `Link`."""
        with self._changed:
            gone = [job for job in self._prefetch if not job.begun and layer in (None, job.transfer.layer)]
            for job in gone:
                self._prefetch.remove(job)
                del self._jobs[job.transfer]
                self._queued -= job.total * self.nbytes
        return [job.transfer for job in gone]

    def drain(self) -> None:
        """Until all that was submitted has landed, as when the target is about to go.

        Raises:
            Exception: what the link failed with.
        """
        with self._changed:
            self._until(lambda: not self._jobs)

    def close(self) -> None:
        """See `Link`. No row moves afterwards."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    @abstractmethod
    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        """Pack the job's rows first..last-1 into a free lane and start them on their way."""

    @abstractmethod
    def _arrived(self, lane: int) -> bool:
        """Whether `_land` would not have to wait."""

    @abstractmethod
    def _land(self, lane: int, job: Job, first: int, last: int) -> None:
        """Until the lane's rows are in their slots; the lane is free then."""

    def _reached(self, job: Job) -> bool:
        """Whether `wait` may go on."""
        return job.transfer.done

    def _settle(self, job: Job) -> None:
        """What `wait` does once that is `_reached`, the lock held."""
        self._done(job)

    def _done(self, job: Job) -> None:
        if not job.transfer.done:
            job.transfer.done = True
            self._finished.append(job.transfer)

    def _lanes_of(self, job: Job) -> list[int]:
        """Where its rows are on their way; the lock is held."""
        return [chunk.lane for chunk in self._flying if chunk.job is job]

    def _accept(self, transfer: Transfer) -> Job:
        """In `submit`: check everything, so that no chunk need be checked again."""
        source, target, index, slots = transfer.source, transfer.target, transfer.index, transfer.slots
        for what, tensor, device in (("source", source, torch.device("cpu")), ("target", target, self.device)):
            if tensor.dtype != torch.uint8 or tensor.ndim != 2 or not tensor.is_contiguous():
                raise ValueError(f"{what} must be contiguous 2-D uint8, not {tensor.ndim}-D {tensor.dtype}")
            if tensor.shape[1] != self.nbytes or tensor.device != device:
                raise ValueError(
                    f"{what} must be rows of {self.nbytes} bytes on {device}, "
                    f"not of {tensor.shape[1]} on {tensor.device}"
                )
        if index.dtype != np.int64 or slots.dtype != np.int32 or index.ndim != 1 or index.shape != slots.shape:
            raise ValueError(
                f"index and slots must be (N,) int64 and int32, "
                f"not {index.shape} {index.dtype} and {slots.shape} {slots.dtype}"
            )
        if math.isnan(transfer.score):
            raise ValueError("a score must be a number")
        places = landing(index, slots, len(source), len(target))
        return Job(transfer, as_expert(source), torch.from_numpy(index.copy()), torch.from_numpy(places))

    def _until(self, reached: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: reached() or self._ended)
        if not reached():
            raise self._failure or RuntimeError("the link is closed")

    # Tensors that the engine thread made in inference mode may be written in that mode only, which is a thread's own.
    @torch.inference_mode()
    def _run(self) -> None:
        try:
            while self._step():
                pass
        except Exception as error:  # noqa: BLE001
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _step(self) -> bool:
        """Land what has arrived, then send one chunk, else wait for one that is on its way; False at the end."""
        while self._flying and self._arrived(self._flying[0].lane):
            self._take_in()
        with self._changed:
            self._changed.wait_for(lambda: self._flying or self._urgent or self._prefetch or self._closing)
            chunk = self._next() if len(self._flying) < LANES and not self._closing else None
        if chunk is not None:
            self._put_out(chunk)
        elif self._flying:
            self._take_in()
        else:
            return False
        return True

    def _next(self) -> _Chunk | None:
        queue = self._urgent or self._prefetch
        if not queue:
            return None
        job = queue[0]
        first = job.begun
        job.begun = min(first + self.chunk, job.total)
        if job.begun == job.total:
            del queue[0]
        self._lane = (self._lane + 1) % LANES  # free, since they land in the order in which they were sent
        return _Chunk(job, first, job.begun, self._lane, time.perf_counter())

    def _put_out(self, chunk: _Chunk) -> None:
        self._send(chunk.lane, chunk.job, chunk.first, chunk.last)
        with self._changed:
            self._flying.append(chunk)
            chunk.job.sent = chunk.last
            if chunk.job.sent == chunk.job.total:
                self._changed.notify_all()

    def _take_in(self) -> None:
        chunk = self._flying[0]
        job = chunk.job
        self._land(chunk.lane, job, chunk.first, chunk.last)
        now = time.perf_counter()
        with self._changed:
            self._flying.popleft()
            nbytes = (chunk.last - chunk.first) * self.nbytes
            self._queued -= nbytes
            self.bytes_moved += nbytes
            self.busy_s += now - max(chunk.begun_at, self._landed_at)
            self._landed_at = now
            if chunk.last == job.total:
                del self._jobs[job.transfer]
                self._done(job)
                self._changed.notify_all()
