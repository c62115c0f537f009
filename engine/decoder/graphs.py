"""Work on a device that is captured once and then started as a whole: a CUDA graph.

What is captured has to read all that changes from memory at fixed addresses, on the device or pinned. Memory that it
allocates itself stays reserved for it. On the CPU, where tests run, a replay does the same work again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ..outcomes import brief
from .blocks import Unsupported

Work = Callable[[], tuple[Tensor, ...]]


class Captured(Protocol):
    """Work that can be started again.

    Attributes:
        outputs: of the work, at addresses that each replay writes again.
    """

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Start it, behind what the device was asked for before; nobody waits."""
        ...

    def wait(self) -> None:
        """Wait for all work that the device was asked for."""
        ...


class Mark(Protocol):
    """A point in a device's work."""

    def record(self) -> None:
        """It is behind all work that the device was asked for so far."""
        ...

    def synchronize(self) -> None:
        """Wait until the device gets there."""
        ...


def possible(device: torch.device) -> bool:
    """Whether the device has graphs."""
    return device.type == "cuda"


def capture(work: Work, device: torch.device) -> Captured:
    """Capture `work`, which runs now too: what it writes must be worth nothing yet.

    Raises:
        RuntimeError, and what the compiler of kernels raises: the driver refuses, or memory runs out. The device can be
            used as before.
    """
    return _Graph(work, device) if device.type == "cuda" else _Again(work)


def mark(device: torch.device) -> Mark:
    """A point to be recorded between replays."""
    return _Event(device) if device.type == "cuda" else _Passed()


def pinned(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in RAM at an address that the device can copy from and to by itself.

    Raises:
        Unsupported: the system pins no more memory.
    """
    try:
        return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise Unsupported(f"memory for graphs cannot be pinned: {brief(error)}") from error


@cache
def _streams(device: torch.device) -> tuple[Any, Any]:
    """Of a card: one to warm up on, one to capture on. Torch keeps a workspace of cuBLAS's for each stream for good, in
    the graphs' memory if a capture is the first to need it: so they are few, and no warm-up is on the second one.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


@cache
def _anchor(device: torch.device) -> Any:
    """A graph that lives as long as the process: its memory serves all graphs of a card. They run one after the other;
    outputs stay reserved while somebody has them.

    Torch gives a pool up with its last graph, and fails to use it again while something of it is reserved. A
    `torch.cuda.MemPool` would keep it as well, but some releases end the process where that is freed before a graph.
    """
    one = torch.zeros(1, device=device)
    return _captured(lambda: (one.zero_(),), device, torch.cuda.graph_pool_handle())[0]


def _captured(work: Work, device: torch.device, pool: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A graph of `work` with its memory in a pool, and its outputs."""
    graph: Any = torch.cuda.CUDAGraph()
    # The outer context restores the stream where a capture that failed does not.
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):
        try:
            # Without a stream torch captures on the card of its first capture. Other threads may copy and allocate
            # meanwhile.
            with torch.cuda.graph(graph, pool, stream=_streams(device)[1], capture_error_mode="thread_local"):
                outputs = work()
        except BaseException:
            _stop_allocating(device, pool)
            raise
    return graph, outputs


def _stop_allocating(device: torch.device, pool: Any) -> None:
    """Where the driver refuses to end a capture, torch up to 2.11 goes on to allocate from its pool, and neither
    captures nor frees memory any more.
    """
    with contextlib.suppress(RuntimeError):  # it had ended that
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)  # pyright: ignore[reportPrivateUsage]


class _Graph:
    """A CUDA graph.

    Attributes:
        replay, wait: see `Captured`; torch's own functions, without Python around them.
    """

    def __init__(self, work: Work, device: torch.device) -> None:
        pool = _anchor(device).pool()
        with torch.cuda.device(device):
            stream: Any = torch.cuda.current_stream(device)
            _warm_up(work, stream, _streams(device)[0])
            self._graph, self.outputs = _captured(work, device, pool)
        graph_base: Any = super(torch.cuda.CUDAGraph, self._graph)
        stream_base: Any = super(torch.cuda.Stream, stream)
        self.replay: Callable[[], None] = graph_base.replay
        self.wait: Callable[[], None] = stream_base.synchronize


def _warm_up(work: Work, stream: Any, side: Any) -> None:
    """Run it before: kernels are compiled and libraries take their memory when they are first used."""
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        work()
    stream.wait_stream(side)


class _Event:
    """On the stream where graphs are replayed, whichever card is torch's current one."""

    def __init__(self, device: torch.device) -> None:
        self._event, self._stream = torch.cuda.Event(), torch.cuda.current_stream(device)

    def record(self) -> None:
        """See `Mark`."""
        self._event.record(self._stream)

    def synchronize(self) -> None:
        """See `Mark`."""
        self._event.synchronize()


class _Passed:
    """Where a replay has ended when it returns."""

    def record(self) -> None:
        """See `Mark`."""

    def synchronize(self) -> None:
        """See `Mark`."""


class _Again:
    """The same interface where nothing can be captured."""

    def __init__(self, work: Work) -> None:
        self._work, self.outputs = work, work()

    def replay(self) -> None:
        """See `Captured`."""
        for mine, new in zip(self.outputs, self._work(), strict=True):
            mine.copy_(new)

    def wait(self) -> None:
        """See `Captured`: the CPU has ended when it returns."""
