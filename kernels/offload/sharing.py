"""Who gets a step's absent rows: the CPU, which computes them in RAM, or the link to the device.

`cpu/offload/place.cpp` is compiled. P calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Lanes(NamedTuple):
    """Seconds until a lane has its first row, and for each: CPU and link. `cpu_row` is infinite where the CPU may not
    take a share.

    Both lanes read the same RAM. memory_cpu, memory_copy: seconds that it takes for a row on each; 0 if its rate is not
    known or no limit.
    """

    cpu_start: float
    cpu_row: float
    copy_start: float
    copy_row: float
    memory_cpu: float = 0.0
    memory_copy: float = 0.0


def cpu_rows(lanes: Lanes, total: int) -> int:
    """How many of so many rows the CPU computes."""
    if lanes.cpu_row == np.inf or not total:
        return 0
    splits = [0, total]
    if total > 1:
        for crossing in _crossings(lanes, total):
            below = int(min(max(crossing, 1.0), total - 1))
            splits += below, min(below + 1, total - 1)
    return min(splits, key=lambda rows: (split_end(lanes, rows, total), rows))


def split_end(lanes: Lanes, rows: int, total: int) -> float:
    """When all of so many rows are done if the CPU computes `rows` of them."""
    cpu = lanes.cpu_start + lanes.cpu_row * rows if rows else 0.0
    copy = lanes.copy_start + lanes.copy_row * (total - rows) if rows < total else 0.0
    return max(cpu, copy, lanes.memory_copy * total - (lanes.memory_copy - lanes.memory_cpu) * rows)


def _crossings(lanes: Lanes, total: int) -> Iterator[float]:
    """How many rows the CPU computes where its line crosses the link's, and where it crosses memory's."""
    ahead = lanes.copy_start - lanes.cpu_start + lanes.copy_row * total
    yield ahead / (lanes.copy_row + lanes.cpu_row)
    if not (lanes.memory_cpu or lanes.memory_copy):
        return
    saved = lanes.memory_copy - lanes.memory_cpu  # by a row on the CPU
    if lanes.cpu_row + saved > 0:
        yield (lanes.memory_copy * total - lanes.cpu_start) / (lanes.cpu_row + saved)
    if saved <= 0:  # memory ends no sooner then: the link's line crosses its line at a best split too
        yield (lanes.copy_start + (lanes.copy_row - lanes.memory_copy) * total) / (lanes.copy_row - saved)
