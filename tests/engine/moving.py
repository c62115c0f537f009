"""What the tests of links share: rows with their number in each, a link that a test lets go chunk by chunk."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from floe_chat.engine.offload.links.link import Link
from floe_chat.engine.offload.links.transfer import Transfer
from floe_chat.kernels import operations as kernels
from floe_chat.kernels.cpu.binding import records
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


class Gate:
    """Lets chunks begin."""

    def __init__(self, fail_at: int) -> None:
        self.chunks = np.full((10_000, 3), -1, np.int64)
        self.record = records.link_gate(
            begins=0, fails_at=fail_at, waiting=0, capacity=len(self.chunks), count=0, chunks=self.chunks
        )

    def release(self, count: int = 1) -> None:
        self.record.begins += count


class GatedLink(Link):
    """A link that begins one chunk for each `gate.release()`, and notes what it began."""

    def __init__(self, nbytes: int, chunk: int, fail_at: int = -1) -> None:
        self.gate, self._sent = Gate(fail_at), dict[int, Transfer]()
        super().__init__("throttled", "throttled", nbytes, rate=FAST, chunk=chunk, gate=self.gate.record)

    @property
    def asked(self) -> list[tuple[Transfer, int, int]]:
        begun = self.gate.chunks[: self.gate.record.count].tolist()
        return [(self._sent[number], first, last) for number, first, last in begun]

    def submit(self, transfer: Transfer) -> None:
        super().submit(transfer)
        self._sent[self._numbers[transfer]] = transfer

    def open(self) -> None:
        self.gate.release(10_000)

    def urged(self, _transfer: Transfer) -> bool:
        """Whether somebody has begun to wait."""
        return self.gate.record.waiting > 0


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
