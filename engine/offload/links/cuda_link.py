"""The link to a GPU, through pinned memory or by reading rows in place."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ....kernels import operations as kernels
from ....kernels.codes import align
from .link_queue import Job
from .pinning import Pinned
from .threaded_link import LANES, ThreadedLink
from .transfer import CHUNK, Transfer

STREAMS = 2  # one chunk's rows are put into their slots while the next chunk's cross the bus


@dataclass(frozen=True, slots=True)
class _Lane:
    """Buffers of one chunk: [numbers int64 | rows], in pinned memory (`here`) and on the device (`there`).

    Attributes:
        head: bytes in front of the rows.
        numbers_here, numbers_there: (1, chunk) slots, or (2, chunk) slots and rows of the source.
        rows_here, rows_there: (chunk, nbytes); none here when the device reads them in place.
        event: recorded after the chunk's last kernel.
    """

    here: Tensor
    there: Tensor
    head: int
    numbers_here: Tensor
    numbers_there: Tensor
    rows_here: Tensor
    rows_there: Tensor
    stream: Any
    event: Any


class CudaLink(ThreadedLink):
    """To a GPU (FloE section 3.4.2): all cores pack a chunk into pinned memory, one copy transfers it with its slot
    numbers, and a kernel puts its rows there.

    `wait` returns when the copies are under way, with the current stream ordered after them: the compute stream is the
    current one of the thread that submits and waits. `zero_copy`: rows in pinned memory are read by the device itself.
    Rows in RAM never change, so only unpinning has to wait for the kernels that read them: see `close`.

    Attributes:
        instead: why this is used, not the compiled one, which is faster; "" if it was asked for.
    """

    instead = ""

    def __init__(
        self,
        device: torch.device,
        nbytes: int,
        *,
        chunk: int = CHUNK,
        streams: int = STREAMS,
        zero_copy: bool = False,
        pinned: Pinned | None = None,
    ) -> None:
        """Buffers for rows of `nbytes` in chunks of `chunk` rows, on as many streams.

        Args:
            pinned: what holds the rows that are read in place; it is released when the link ends.

        Raises:
            ValueError: no such size, or zero_copy without the Triton kernels. RuntimeError: no memory.
        """
        self._cpu, self._gpu = kernels.choose("cpu"), kernels.choose(device)
        if zero_copy and self._gpu.name == "reference":
            raise ValueError(f"rows cannot be read in place: {self._gpu.reason}")
        self.zero_copy, self._pinned = zero_copy, pinned
        device = torch.empty(0, device=device).device  # with its number
        # Their small kernels run before the compute stream's large ones.
        self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(streams)]
        self._lanes = [_lane(self._streams[i % streams], device, nbytes, chunk, zero_copy) for i in range(LANES)]
        self._target: ref[Tensor] | None = None
        self._stalls: deque[tuple[Any, Any]] = deque()
        self._spare: list[tuple[Any, Any]] = []
        super().__init__("cuda, read in place" if zero_copy else "cuda", device, nbytes, chunk)

    def wait(self, transfer: Transfer) -> float:
        """See `Link`. Returns the host's seconds now, plus the compute stream's of earlier calls once known."""
        return super().wait(transfer) + self._stalled()

    def close(self) -> None:
        """See `Link`. Afterwards no kernel reads rows in RAM, and none is pinned."""
        super().close()
        if self._pinned is not None:
            self._pinned.release()

    def _accept(self, transfer: Transfer) -> Job:
        job, target = super()._accept(transfer), transfer.target
        if self.zero_copy and not transfer.source.is_pinned():
            raise ValueError("source is in pageable memory, which the device cannot read in place: pin it")
        if self._target is None or self._target() is not target:
            # A new target: pending work of its own stream on that memory comes first, and it is not reused before the
            # copies have ended.
            compute = torch.cuda.current_stream(self.device)
            for stream in self._streams:
                stream.wait_stream(compute)
                target.record_stream(stream)
            self._target = ref(target)
        return job

    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        place, count = self._lanes[lane], last - first
        place.numbers_here[0, :count] = job.places[first:last]
        if self.zero_copy:
            place.numbers_here[1, :count] = job.index[first:last]
        else:
            self._cpu.gather_rows(job.rows(), 0, job.index[first:last], place.rows_here[:count])
        used = place.head + (0 if self.zero_copy else count) * self.nbytes
        numbers, rows = place.numbers_there[:, :count], place.rows_there[:count]
        with torch.cuda.stream(place.stream):
            place.there[:used].copy_(place.here[:used], non_blocking=True)
            if self.zero_copy:
                self._gpu.gather_rows(job.rows(), 0, numbers[1], rows)
            self._gpu.pool_scatter(job.transfer.target, numbers[0], rows)
            place.event.record(place.stream)

    def _arrived(self, lane: int) -> bool:
        return self._lanes[lane].event.query()

    def _land(self, lane: int, job: Job, first: int, last: int) -> None:
        self._lanes[lane].event.synchronize()

    def _reached(self, job: Job) -> bool:
        return job.sent == job.total

    def _settle(self, job: Job) -> None:
        if lanes := self._lanes_of(job):
            compute = torch.cuda.current_stream(self.device)
            before, after = self._spare.pop() if self._spare else _pair()
            before.record(compute)
            for lane in lanes:
                compute.wait_event(self._lanes[lane].event)
            after.record(compute)
            self._stalls.append((before, after))
        super()._settle(job)

    def _stalled(self) -> float:
        """Seconds that the compute stream stalled on copies, for the waits that it has passed."""
        seconds = 0.0
        while self._stalls and self._stalls[0][1].query():
            pair = self._stalls.popleft()
            seconds += pair[0].elapsed_time(pair[1]) / 1e3
            self._spare.append(pair)
        return seconds


def _pair() -> tuple[Any, Any]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def _lane(stream: Any, device: torch.device, nbytes: int, chunk: int, zero_copy: bool) -> _Lane:
    kinds = 2 if zero_copy else 1
    head, body = align(8 * kinds * chunk), chunk * nbytes
    here = torch.empty(head + (0 if zero_copy else body), dtype=torch.uint8, pin_memory=device.type == "cuda")
    with torch.cuda.stream(stream):  # the memory belongs to this stream, also when it is freed
        there = torch.empty(head + body, dtype=torch.uint8, device=device)

    def numbers(buffer: Tensor) -> Tensor:
        return buffer[: 8 * kinds * chunk].view(torch.int64).view(kinds, chunk)

    def rows(buffer: Tensor) -> Tensor:
        return buffer[head:].view(-1, nbytes)

    event = torch.cuda.Event(blocking=True)  # the thread sleeps meanwhile: the cores are for computing
    return _Lane(here, there, head, numbers(here), numbers(there), rows(here), rows(there), stream, event)
