"""Signals that end a command without a screen."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from .terminal import EXIT_SIGNAL

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


@contextmanager
def ending_in_order() -> Generator[None]:
    """Inside, TERM and HUP raise SystemExit with 128 plus their number, so that unsaved data is saved.

    A second signal ends the program at once. An ignored signal, as under nohup, stays ignored.
    """
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # Python lets only the main thread set signal handlers

    def reset() -> None:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)

    def end(number: int, _frame: FrameType | None) -> None:
        reset()
        raise SystemExit(EXIT_SIGNAL + number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        reset()
