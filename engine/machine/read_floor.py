"""The speed of memory, measured in the same rounds as the figures compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ...kernels.cpu import native
from . import random_weights

READ = "read (floor)"
COPIED = 1 << 30  # bytes that a GPU copies at once, enough that launching does not matter
LEAST = 1 << 27


def reader(device: str) -> Callable[[], tuple[float, int]] | None:
    """A call that reads memory as fast as plain loads can -> seconds and bytes; None if impossible.

    On a GPU it is a copy within the device, both of whose sides count. On a CPU it takes torch's threads.
    """
    if device != "cpu":
        return _copier(device)
    try:
        native.isa()
    except native.NativeUnavailableError:
        return None
    data = random_weights.filled(max(LEAST, 4 * random_weights.last_level_cache()))

    def read() -> tuple[float, int]:
        start = time.perf_counter()
        native.read(data)
        return time.perf_counter() - start, data.nbytes

    return read


def _copier(device: str) -> Callable[[], tuple[float, int]]:
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target, card = torch.empty_like(source), torch.get_device_module(device)

    def copy() -> tuple[float, int]:
        card.synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        card.synchronize(device)
        return time.perf_counter() - start, 2 * source.nbytes

    return copy
