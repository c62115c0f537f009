"""Work that a screen must not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from textual.message_pump import MessagePump

Result = TypeVar("Result")


def in_background(target: MessagePump, work: Callable[[], Result], then: Callable[[Result], object]) -> None:
    """Do `work` on a thread of its own, and `then` what follows on the thread of `target`, if that still lives.

    A daemon: Textual's own thread workers cannot be left behind, and a disk that does not answer would keep the
    program from ending.
    """

    def run() -> None:
        result = work()
        target.call_later(then, result)

    threading.Thread(target=run, name="floe-background", daemon=True).start()
