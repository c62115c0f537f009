"""The link to a GPU: its order and its waits beside a stand-in for torch.cuda; its bytes where there is a GPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest
import torch
from floe_chat import kernels
from floe_chat.engine.links import CudaLink
from floe_chat.engine.transfer import LANES, Link
from torch import Tensor

from .moving import NBYTES, ROWS, SENTINEL, SLOTS, Sender, compute_with, until


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
            return tensor.shape[-2] == ROWS

        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
        monkeypatch.setattr(torch.cuda, "stream", on)
        monkeypatch.setattr(torch.cuda, "current_stream", current)
        monkeypatch.setattr(Tensor, "record_stream", keep)
        monkeypatch.setattr(Tensor, "is_pinned", pinned)

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


@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
def test_the_cuda_link_moves_rows_through_its_lanes(
    zero_copy: bool, source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    link: Link = CudaLink(torch.device("cpu"), NBYTES, chunk=7, zero_copy=zero_copy)
    sender = Sender(source, target)
    transfers = [sender.make(count, urgent=bool(count % 2)) for count in (1, 50, 7, 60)]
    for transfer in transfers:
        link.submit(transfer)
    with cuda.running():
        for transfer in transfers:
            link.wait(transfer)
            assert sender.there(transfer)
    assert sender.untouched(sender.free)
    assert len(cuda.streams) == 2 and [s.behind for s in cuda.streams] == [[cuda.compute]] * 2
    assert [(tensor is target, stream) for tensor, stream in cuda.kept] == [(True, s) for s in cuda.streams]
    assert {event.stream for event in cuda.recorded} == set(cuda.streams) and not cuda.current
    assert len(set(map(id, cuda.recorded))) == LANES and len(cuda.recorded) == 1 + 8 + 1 + 9
    other = Sender(source, torch.full((SLOTS, NBYTES), SENTINEL, dtype=torch.uint8))
    again = other.make(3)
    link.submit(again)  # into another pool
    with cuda.running():
        link.wait(again)
        link.close()
    assert other.there(again) and len(cuda.kept) == 4 and cuda.kept[-1][0] is other.target
    assert link.bytes_moved == 121 * NBYTES


def test_the_compute_stream_waits_and_the_host_does_not(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10), Sender(source, target)
    urgent, prefetch = sender.make(25, urgent=True), sender.make(10)
    link.submit(urgent)
    link.submit(prefetch)
    waited = link.wait(urgent)
    assert cuda.compute.behind == cuda.recorded[:3] and not any(event.query() for event in cuda.recorded)
    assert urgent.done and link.finished() == [urgent]
    assert not prefetch.done and link.queued_bytes() == 35 * NBYTES  # nothing has landed
    with cuda.running():
        link.drain()
    assert prefetch.done and link.finished() == [prefetch] and link.bytes_moved == 35 * NBYTES
    assert waited >= 0.25 and link.wait(prefetch) == 0.0  # the stream's quarter of a second is told once
    link.close()


def test_the_compute_stream_cannot_pass_a_chunk_that_is_still_being_packed(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = kernels.choose("cpu")
    returned: list[bool] = []

    def packing(rows: Any, expert: int, neurons: Tensor, out: Tensor) -> None:
        chosen.gather_rows(rows, expert, neurons, out)
        if neurons.numel() == 5:  # the last chunk of two
            waiter.start()
            waiter.join(0.05)
            returned.append(not waiter.is_alive())

    compute_with(replace(chosen, gather_rows=packing), monkeypatch)
    cuda = FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, chunk=10), Sender(source, target)
    transfer = sender.make(15)
    waiter = threading.Thread(target=link.wait, args=(transfer,))
    link.submit(transfer)
    until(lambda: bool(returned))
    waiter.join()
    assert returned == [False] and cuda.compute.behind == cuda.recorded and len(cuda.recorded) == 2
    with cuda.running():
        link.close()


def test_reading_in_place_needs_pinned_rows_and_kernels(
    source: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeCuda(monkeypatch)
    link, sender = CudaLink(torch.device("cpu"), NBYTES, zero_copy=True), Sender(source[:-1], target)
    with pytest.raises(ValueError, match="pin it"):
        link.submit(sender.make(1))
    link.close()
    compute_with(replace(kernels.choose("cpu"), name="reference", reason="an old card"), monkeypatch)
    with pytest.raises(ValueError, match="an old card"):
        CudaLink(torch.device("cpu"), NBYTES, zero_copy=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("zero_copy", [False, True], ids=["staged", "in-place"])
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_a_gpu_reads_what_was_waited_for(streams: int, zero_copy: bool) -> None:
    source = torch.randint(0, 256, (4000, 4608), dtype=torch.uint8).pin_memory()
    target = torch.full((3000, 4608), SENTINEL, dtype=torch.uint8, device="cuda")
    link = CudaLink(torch.device("cuda"), 4608, chunk=64, streams=streams, zero_copy=zero_copy)
    sender = Sender(source, target, streams)
    for _ in range(200):
        prefetch, urgent = sender.make(700), sender.make(500, urgent=True)
        link.submit(prefetch)
        link.submit(urgent)
        for transfer in (urgent, prefetch):
            link.wait(transfer)
            got = target[torch.from_numpy(transfer.slots).to("cuda", torch.int64)]  # on the compute stream, at once
            assert torch.equal(got.cpu(), source[torch.from_numpy(transfer.index)])
            sender.free = transfer.slots.tolist() + sender.free
    link.drain()
    assert len(link.finished()) == 400 and link.bytes_moved == 200 * 1200 * 4608 and link.busy_s > 0
    link.close()
