"""What the tests of links share: rows with their number in each, a link that a test lets go chunk by chunk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from floe_chat.engine.offload.links.link_queue import Job
from floe_chat.engine.offload.links.throttled_link import ThrottledLink
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.kernels import operations as kernels
from torch import Tensor

NBYTES = 128
ROWS = 600
SLOTS = 400
SENTINEL = 0xA5
FAST = 1e12


def compute_with(backend: kernels.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(_device: str) -> kernels.Backend:
        return backend

    monkeypatch.setattr(kernels, "choose", choose)


class Gated(ThrottledLink):
    """Sends one chunk for each `gate.release()`, and notes what it was asked to send."""

    def __init__(self, chunk: int, fail_at: int = -1) -> None:
        self.gate = threading.Semaphore(0)
        self.asked: list[tuple[Transfer, int, int]] = []
        self.fail_at = fail_at
        super().__init__(NBYTES, rate=FAST, chunk=chunk)

    def _send(self, lane: int, job: Job, first: int, last: int) -> None:
        self.asked.append((job.transfer, first, last))
        self.gate.acquire()
        if len(self.asked) > self.fail_at >= 0:
            raise OSError("the bus is gone")
        super()._send(lane, job, first, last)

    def open(self) -> None:
        self.gate.release(10_000)


def until(condition: Callable[[], bool]) -> None:
    """Another thread gets there; the suite's own timeout ends a test where it never does."""
    while not condition():
        time.sleep(0.0005)


class Sender:
    """Transfers of random rows into slots that no other one of them has."""

    def __init__(self, source: Tensor, target: Tensor, seed: int = 0) -> None:
        self.source, self.target = source, target
        self.random = np.random.default_rng(seed)
        self.free: list[int] = self.random.permutation(target.shape[0]).tolist()

    def make(self, count: int, *, urgent: bool = False, score: float = 0.0, layer: int = 0) -> Transfer:
        index = self.random.integers(0, self.source.shape[0], count)
        slots = np.array([self.free.pop() for _ in range(count)], dtype=np.int32)
        return Transfer(self.source, index, self.target, slots, urgent, score, layer)

    def there(self, transfer: Transfer) -> bool:
        return torch.equal(self.target[transfer.slots.tolist()].cpu(), self.source[transfer.index.tolist()])

    def untouched(self, slots: list[int]) -> bool:
        return bool((self.target[slots] == SENTINEL).all())
