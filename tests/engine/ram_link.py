"""A link by Python's thread, from RAM to RAM: what `threaded_link.py` does without a GPU's streams."""

from __future__ import annotations

import threading

import torch
from floe_chat.engine.offload.links.link_queue import Job
from floe_chat.engine.offload.links.threaded_link import LANES, ThreadedLink
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.kernels import operations as kernels


class RamLink(ThreadedLink):
    """Chunks land as soon as they are packed. It begins one for each `gate.release()`, and notes what it began."""

    def __init__(self, nbytes: int, chunk: int, fail_at: int = -1) -> None:
        self.gate = threading.Semaphore(0)
        self.asked: list[tuple[Transfer, int, int]] = []
        self.fail_at = fail_at
        self._cpu = kernels.choose("cpu")
        self._staging = [torch.zeros(chunk, nbytes, dtype=torch.uint8) for _ in range(LANES)]
        super().__init__("throttled", torch.device("cpu"), nbytes, chunk)

    def open(self) -> None:
        self.gate.release(10_000)

    def urged(self, transfer: Transfer) -> bool:
        """Whether somebody has begun to wait for it."""
        return transfer.urgent

    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        self.asked.append((job.transfer, first, last))
        self.gate.acquire()
        if len(self.asked) > self.fail_at >= 0:
            raise RuntimeError("the gate is broken")
        self._cpu.gather_rows(job.rows(), 0, job.index[first:last], self._staging[lane][: last - first])

    def _arrived(self, lane: int) -> bool:
        return True

    def _land(self, lane: int, job: Job, first: int, last: int) -> None:
        self._cpu.pool_scatter(job.transfer.target, job.places[first:last], self._staging[lane][: last - first])
