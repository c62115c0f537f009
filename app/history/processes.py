"""Identifies the process that writes an answer, so that a later start can tell whether it still runs."""

from __future__ import annotations

import os
import platform

from .records import now

_DAY = 24 * 3600 * 1000
_CLOCK_SLACK = 5.0  # seconds by which two readings of a process's start time may differ


def this_process() -> str:
    """The name of this process: machine, process number, and when it began, since numbers are used again."""
    import psutil

    return f"{platform.node()}:{os.getpid()}:{psutil.Process().create_time():.0f}"


def is_running(writer: str, begun: int) -> bool:
    """Whether the process that `this_process` named `writer` may still write an answer begun at `begun`."""
    import psutil

    machine, number, started = ["", "", "", *writer.rsplit(":", 2)][-3:]
    if machine != platform.node():
        # A process on another machine that shares this home cannot be checked.
        return now() - begun < _DAY
    try:
        return abs(psutil.Process(int(number)).create_time() - float(started)) < _CLOCK_SLACK
    except (ValueError, OverflowError, psutil.Error):
        return False
