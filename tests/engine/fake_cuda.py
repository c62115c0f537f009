"""A stand-in for torch.cuda: streams, events and pinned memory, with everything in RAM."""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch import Tensor


class FakeEvent:
    """An event that comes to pass when a test says so."""

    def __init__(self, **options: bool) -> None:
        self.options, self.passed = options, threading.Event()
        self.stream: Any = None
        if options.get("enable_timing"):
            self.passed.set()

    def record(self, stream: Any) -> None:
        assert self.stream is None or self.passed.is_set(), "a lane was used before its rows had landed"
        self.stream = stream
        if not self.options.get("enable_timing"):
            self.passed.clear()
            stream.cuda.recorded.append(self)

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        self.passed.wait()

    def elapsed_time(self, later: FakeEvent) -> float:
        assert self.options == later.options == {"enable_timing": True} and self.stream is later.stream
        return 250.0


class FakeStream:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.behind: list[Any] = []

    def wait_event(self, event: FakeEvent) -> None:
        self.behind.append(event)

    def wait_stream(self, stream: FakeStream) -> None:
        self.behind.append(stream)


class FakeCuda:
    """As much of torch.cuda as the link calls. Copies are at once, events come to pass inside `running`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.recorded: list[FakeEvent] = []
        self.streams: list[FakeStream] = []
        self.current: list[FakeStream] = []
        self.compute = FakeStream(self)
        self.kept: list[tuple[Tensor, FakeStream]] = []
        self.registered: dict[int, int] = {}
        self.refused, self.refused_after = "", 0  # what the driver says to a range, and which one

        def stream(_device: object, priority: int) -> FakeStream:
            assert priority == -1
            self.streams.append(FakeStream(self))
            return self.streams[-1]

        @contextlib.contextmanager
        def on(stream: FakeStream) -> Generator[None]:
            self.current.append(stream)
            yield
            self.current.pop()

        def current(_device: object) -> FakeStream:
            return self.compute

        def keep(tensor: Tensor, stream: FakeStream) -> None:
            self.kept.append((tensor, stream))

        def pinned(tensor: Tensor) -> bool:
            at = tensor.untyped_storage().data_ptr()  # as torch does: not the tensor's own
            return any(start <= at < start + size for start, size in self.registered.items())

        def synchronize(_device: object) -> None:
            for event in self.recorded:
                event.synchronize()

        def cudart() -> FakeCuda:
            return self

        def device(_device: object) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

        monkeypatch.setattr(torch.cuda, "cudart", cudart)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", current)
        monkeypatch.setattr(Tensor, "record_stream", keep)
        monkeypatch.setattr(Tensor, "is_pinned", pinned)

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:  # noqa: N802
        assert flags == 1 and not start % mmap.PAGESIZE and not size % mmap.PAGESIZE
        assert not any(at < start + size and start < at + other for at, other in self.registered.items())
        if self.refused and len(self.registered) == self.refused_after:
            return 1
        self.registered[start] = size
        return 0

    def cudaHostUnregister(self, start: int) -> int:  # noqa: N802
        assert all(event.query() for event in self.recorded), "a kernel still reads rows that are unpinned"
        del self.registered[start]
        return 0

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        assert error == 1
        return self.refused

    @contextlib.contextmanager
    def running(self) -> Generator[None]:
        ended = threading.Event()

        def run() -> None:
            passed = 0
            while not ended.is_set() or passed < len(self.recorded):
                if passed < len(self.recorded):
                    self.recorded[passed].passed.set()
                    passed += 1
                time.sleep(0.0002)

        device = threading.Thread(target=run)
        device.start()
        try:
            yield
        finally:
            ended.set()
            device.join()
