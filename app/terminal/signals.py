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
    """Inside, TERM and HUP raise SystemExit with 128 plus their number, so that what is unsaved is saved.

    A second one ends the program at once. Who ignores one, as under nohup, goes on to do so.
    """
    ours = [number for number in _ENDING if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # Python lets no other thread say what signals do

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
