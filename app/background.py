"""Work that must not block a screen, or is to be done later."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from textual.message_pump import MessagePump

Result = TypeVar("Result")


def in_background(target: MessagePump, work: Callable[[], Result], then: Callable[[Result], object]) -> None:
    """Do `work` on its own thread, then `then` on the thread of `target`, if that still exists.

    A daemon: Textual's own thread workers cannot be left behind, and a disk that does not answer would keep the
    program from ending.
    """

    def run() -> None:
        result = work()
        target.call_later(then, result)

    threading.Thread(target=run, name="floe-background", daemon=True).start()


def later(target: MessagePump, seconds: float, work: Callable[[], object]) -> asyncio.TimerHandle:
    """Do `work` among the messages of `target` in so many seconds, unless it is cancelled or the program ends first.

    Textual's own timer leaves out what it is late for: one that is due before its task first runs never fires.
    """

    def due() -> object:
        return work() if target.app.is_running else None

    return asyncio.get_running_loop().call_later(seconds, target.call_next, due)
