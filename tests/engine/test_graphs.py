"""Captures in a model of torch: what its allocator does with the memory of graphs, and which card a stream is on."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from floe_chat.engine.decoder import graphs

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class Torch:
    """As torch 2.11: a pool whose last graph dies is dead, and a capture that the driver refuses to end stays open.

    Attributes:
        users: graphs of each pool. capturing: pools that are allocated from. replayed: cards, in order.
        refuses: to end the next capture. used: streams that work ran on, and whether it was captured.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake, numbers = self, itertools.count(1)
        self.users: dict[tuple[int, int], int] = {}
        self.capturing: set[tuple[int, int]] = set()
        self.replayed: list[torch.device] = []
        self.used: list[tuple[Any, bool]] = []
        self.refuses = False
        self.current = FIRST
        self.captured: list[Any] | None = None

        class Bare:
            def synchronize(self) -> None:
                """Nothing is under way."""

            def replay(self) -> None:
                assert isinstance(self, Graph)
                fake.replayed.extend(device for device in self.work if device == self.device)

        class Stream(Bare):
            def __init__(self, device: torch.device) -> None:
                self.device, self.number = device, next(numbers)

            def wait_stream(self, other: Stream) -> None:
                assert other.device == self.device

        class Graph(Bare):
            work: list[torch.device]
            device: torch.device
            held: tuple[int, int] | None = None

            def pool(self) -> tuple[int, int]:
                assert self.held is not None
                return self.held

            def __del__(self) -> None:
                if self.held is not None:
                    fake.users[self.held] -= 1

        self.stream = Stream
        self.streams = {device: Stream(device) for device in (FIRST, SECOND)}

        @contextlib.contextmanager
        def on(device: torch.device) -> Generator[None]:
            before, self.current = self.current, device
            try:
                yield
            finally:
                self.current = before

        @contextlib.contextmanager
        def stream(one: Stream) -> Generator[None]:
            before = self.current, self.streams[one.device]
            self.current, self.streams[one.device] = one.device, one
            try:
                yield
            finally:
                self.current, self.streams[one.device] = before

        @contextlib.contextmanager
        def graph(one: Graph, pool: tuple[int, int], *, stream: Stream, capture_error_mode: str) -> Generator[None]:
            assert capture_error_mode == "thread_local"
            if self.users.get(pool) == 0:
                raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
            if self.capturing:
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self.capturing.add(pool)
            self.users[pool] = self.users.get(pool, 0) + 1
            one.held, one.device, self.captured = pool, stream.device, []
            before = self.streams[stream.device]
            self.streams[stream.device] = stream
            try:
                yield
            finally:
                one.work, self.captured = self.captured, None
                if self.refuses:  # torch leaves its stream as the current one
                    self.refuses = False
                    raise RuntimeError("operation failed due to a previous error during capture")
                self.capturing.remove(pool)
                self.streams[stream.device] = before

        def handle() -> tuple[int, int]:
            return 0, next(numbers)

        def end(_device: int, pool: tuple[int, int]) -> None:
            if pool not in self.capturing:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.capturing.remove(pool)

        def current_stream(device: torch.device) -> Stream:
            return self.streams[device]

        zeros = torch.zeros

        def zeros_here(*sizes: int, device: torch.device) -> torch.Tensor:
            return zeros(*sizes)

        for name, instead in (("CUDAGraph", Graph), ("Stream", Stream), ("device", on), ("stream", stream)):
            monkeypatch.setattr(torch.cuda, name, instead)
        for name, instead in (("graph", graph), ("graph_pool_handle", handle), ("current_stream", current_stream)):
            monkeypatch.setattr(torch.cuda, name, instead)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(torch, "zeros", zeros_here)

    def work(self) -> tuple[()]:
        """One kernel on the current stream."""
        self.used.append((self.streams[self.current], self.captured is not None))
        if self.captured is not None:
            self.captured.append(self.current)
        return ()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Torch]:
    kept = graphs._anchor, graphs._streams  # pyright: ignore[reportPrivateUsage]
    for each in kept:
        each.cache_clear()
    yield Torch(monkeypatch)
    for each in kept:
        each.cache_clear()


def test_graphs_share_a_pool_that_outlives_all_of_them(card: Torch) -> None:
    for _model in range(3):
        one = [graphs.capture(card.work, FIRST) for _ in range(2)]
        one[0].replay()
        one[0].wait()
        assert sum(card.users.values()) == 3  # with the anchor
        del one
    assert len(card.users) == 1 and list(card.users.values()) == [1]


def test_warming_up_and_capturing_have_a_stream_each(card: Torch) -> None:
    for _ in range(5):
        graphs.capture(card.work, FIRST)
    warm, captured = ({stream for stream, inside in card.used if inside == one} for one in (False, True))
    assert len(warm) == len(captured) == 1 and warm.isdisjoint(captured)


def test_a_second_card_captures_its_own_work(card: Torch) -> None:
    made = [graphs.capture(card.work, device) for device in (FIRST, SECOND)]
    for one in reversed(made):
        one.replay()
    assert card.replayed == [SECOND, FIRST] and card.current == FIRST
    assert len(card.users) == 2  # a pool is memory of one card


@pytest.mark.parametrize("where", ["in the work", "at its end"])
def test_after_a_capture_that_failed_others_succeed(where: str, card: Torch) -> None:
    before, warmed = graphs.capture(card.work, FIRST), list[int]()
    stream = card.streams[FIRST]

    def failing() -> tuple[()]:
        if card.captured is not None and where == "in the work":
            raise torch.OutOfMemoryError("CUDA out of memory")
        card.refuses = card.captured is not None
        warmed.append(1)
        return card.work()

    with pytest.raises(RuntimeError):
        graphs.capture(failing, FIRST)
    assert warmed and not card.capturing and card.streams[FIRST] is stream
    for one in (before, graphs.capture(card.work, FIRST)):
        one.replay()
    assert card.replayed == [FIRST, FIRST]
