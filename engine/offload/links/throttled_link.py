"""A test link: RAM to RAM, slow on purpose, for machines without a GPU."""

from __future__ import annotations

import time

import torch

from ....kernels import operations as kernels
from .link_queue import Job
from .threaded_link import LANES, ThreadedLink
from .transfer import CHUNK


class ThrottledLink(ThreadedLink):
    """A test device: real threads, lanes and bytes; a chunk takes at least latency + bytes / rate.

    Packing is hidden behind the chunk before, as on a real link. Its times show the queue's behaviour, never a GPU's:
    they are always labelled "throttled".
    """

    def __init__(self, nbytes: int, *, rate: float, latency: float = 0.0, chunk: int = CHUNK) -> None:
        """Rows of `nbytes`; `rate` in bytes per second, `latency` in seconds, `chunk` in rows.

        Raises:
            ValueError: no such rate, latency or size.
        """
        if not rate > 0 or not latency >= 0:
            raise ValueError(f"a link of {rate} bytes/s after {latency} s")
        self.rate, self.latency = rate, latency
        self._cpu = kernels.choose("cpu")
        self._staging = [torch.empty(max(chunk, 0), nbytes, dtype=torch.uint8).zero_() for _ in range(LANES)]
        self._due = [0.0] * LANES
        self._free_at = 0.0
        super().__init__("throttled", torch.device("cpu"), nbytes, chunk)

    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        packed = self._staging[lane][: last - first]
        self._cpu.gather_rows(job.rows(), 0, job.index[first:last], packed)
        seconds = self.latency + packed.nbytes / self.rate
        self._free_at = self._due[lane] = max(self._free_at, time.perf_counter()) + seconds

    def _arrived(self, lane: int) -> bool:
        return time.perf_counter() >= self._due[lane]

    def _land(self, lane: int, job: Job, first: int, last: int) -> None:
        while (left := self._due[lane] - time.perf_counter()) > 0:
            time.sleep(left)
        self._cpu.pool_scatter(job.transfer.target, job.places[first:last], self._staging[lane][: last - first])
