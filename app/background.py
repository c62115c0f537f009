"""Work that must not block a screen."""

from __future__ import annotations

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
