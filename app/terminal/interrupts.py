"""What Ctrl+C does while a command runs."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import FrameType

EXIT_INTERRUPTED = 130


def heed_interrupts() -> None:
    """From now on an interrupt raises KeyboardInterrupt, which the caller handles."""
    if signal.getsignal(signal.SIGINT) is end_quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end_quietly(_number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):  # stderr is closed
        os.write(2, b"\nfloe-chat: interrupted\n")
    os._exit(EXIT_INTERRUPTED)
