"""How busy other programs keep the CPU during a measurement.

A program that computes all the time does not widen the spread, yet distorts ratios: torch splits work evenly and waits
for the slowest core, often five times as long as on a quiet machine, while other figures lose much less.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

BUSY = 0.2  # cores; above that, a section says so
# Those of the fields that the platform has; `steal` is time taken by other virtual machines.
_FIELDS = ("user", "nice", "system", "irq", "softirq", "steal", "interrupt", "dpc")


def machine_seconds() -> float:
    """CPU seconds that all programs have used since the machine started."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in _FIELDS)


def own_seconds() -> float:
    """CPU seconds that this process has used."""
    times = psutil.Process().cpu_times()
    return times.user + times.system


class Others:
    """The cores that other programs used since this object was created, on average."""

    def __init__(
        self,
        machine: Callable[[], float] = machine_seconds,
        own: Callable[[], float] = own_seconds,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._machine, self._own, self._clock = machine, own, clock
        self._used, self._start = machine() - own(), clock()

    def cores(self) -> float:
        """CPU seconds per second; never negative, as the system counts in steps."""
        passed = self._clock() - self._start
        return max(0.0, self._machine() - self._own() - self._used) / passed if passed > 0 else 0.0
