"""The terminal around the screen: taken at once, to show something and hold typed keys, and restored at the end.

Textual takes half a second and more to import. Until then this module holds the terminal: it paints a first picture,
suppresses the echo of typed keys, and ends the program cleanly on a signal.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, NoReturn

EXIT_SIGNAL = 128
"""The exit code after a signal is this plus its number, as shells have it: 130 interrupt, 143 TERM, 129 hang-up."""

_LONGEST_END = 8.0  # seconds for the screen; nothing is lost if it takes longer
_LONGEST_SAVE = 180.0  # seconds: a lock is waited for, and a slow disk
_LONGEST_WRITE = 2.0  # seconds
_LOOK_SECONDS = 1.0
_HUNG_UP = EXIT_SIGNAL + 1
_IN, _OUT = 0, 2  # Textual reads keys from stdin and paints on stderr
_TAKE = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?1049l\x1b[?25h"
# Everything that Textual may have switched on: paste brackets, wrapping off, resize and mouse reports, focus, kitty's
# keys.
_RESTORE = (
    "\x1b[?2004l\x1b[?7h\x1b[?2048l\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?1016l\x1b[?1004l\x1b[<u\x1b[0m"
    + _LEAVE
)


class Terminal:
    """As a context it holds the terminal while the screen is still being created.

    Inside, TERM, HUP and INT end the program with 128 plus the signal's number: at once until `serve` is called, then
    through the screen. On Windows it only paints.
    """

    def __init__(self) -> None:
        self._attributes: list[Any] | None = None
        self._ours = False
        self._leave: Callable[[int], None] | None = None
        self._close: Callable[[], object] | None = None
        self._over = threading.Event()
        self._ending: threading.Thread | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Terminal:
        for number in _signals():
            self._before[number] = signal.signal(number, self._end)
        self._attributes = _hold()
        self._ours = True
        _write(_TAKE + _first_picture())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._wait_for_end()
        if self._ours:
            _write(_LEAVE)
        self._reset()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_over(self) -> None:
        """The screen takes the terminal now, in its original state; typed keys wait there to be read."""
        self._ours = False
        self._reset()

    def serve(self, leave: Callable[[int], None], close: Callable[[], object]) -> None:
        """From now on signals end the screen.

        `leave` gets the exit code and ends the screen. `close` saves unsaved data; it is called instead if the terminal
        is gone, or if the screen does not end.
        """
        self._leave, self._close = leave, close
        threading.Thread(target=self._watch, name="floe-terminal", daemon=True).start()

    def screen_ended(self) -> None:
        """The screen has ended by itself. What is left to do may take its time; Ctrl+C interrupts it."""
        self._over.set()
        self._wait_for_end()
        if signal.SIGINT in self._before:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def expect_end(self, code: int) -> None:
        """The screen is about to end; if it has not after some seconds, end it."""

        def end() -> None:
            if not self._over.wait(_LONGEST_END):
                self.end_now(code)

        threading.Thread(target=end, name="floe-ending", daemon=True).start()

    def end_soon(self, code: int) -> None:
        """`end_now` on a thread of its own, for signal handlers: what they interrupt may hold a lock it needs."""
        if self._ending is None:
            self._ending = threading.Thread(target=self.end_now, args=(code,), name="floe-ending", daemon=True)
            self._ending.start()

    def _wait_for_end(self) -> None:
        if self._ending is not None:
            self._ending.join()

    def end_now(self, code: int) -> NoReturn:
        """Save unsaved data, restore the terminal, and end this process, whatever the screen is doing."""

        def restore() -> None:
            _write(_LEAVE if self._ours else _RESTORE)

        # Restored last: a terminal that no longer reads blocks that.
        for work, longest in ((self._close, _LONGEST_SAVE), (restore, _LONGEST_WRITE)):
            if work is not None:
                ending = threading.Thread(target=work, name="floe-closing", daemon=True)
                ending.start()
                ending.join(longest)
        self._reset()
        os._exit(code)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        code = EXIT_SIGNAL + number
        # Before there is a screen nothing is unsaved. Not by an exception: one raised while Python frees an object, as
        # imports do all the time, is only reported.
        if self._leave is None:
            self.end_now(code)
        if code == _HUNG_UP or self._over.is_set():
            self.end_soon(code)
            return
        self.expect_end(code)
        self._leave(code)

    def _watch(self) -> None:
        """A terminal that does not control this process can disappear without a signal."""
        while not self._over.wait(_LOOK_SECONDS):
            if not _is_there():
                self.end_soon(_HUNG_UP)
                return

    def _reset(self) -> None:
        if sys.platform != "win32" and self._attributes is not None:
            import termios

            with suppress(termios.error):
                termios.tcsetattr(_IN, termios.TCSANOW, self._attributes)


def _hold() -> list[Any] | None:
    """Hold keys for the screen unchanged: Enter stays Enter, nothing is echoed. Ctrl+C is still a signal.

    Returns the terminal's state, to restore at the end.
    """
    if sys.platform == "win32":
        return None
    import termios

    try:
        before = termios.tcgetattr(_IN)
        held = termios.tcgetattr(_IN)
        held[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON)
        held[3] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        held[6][termios.VMIN] = 1
        termios.tcsetattr(_IN, termios.TCSANOW, held)
    except termios.error:
        return None
    return before


def _is_there() -> bool:
    if sys.platform == "win32":
        return True
    import termios

    try:
        termios.tcgetattr(_IN)
    except termios.error:
        return False
    return True


def _signals() -> list[signal.Signals]:
    names = ("SIGTERM", "SIGHUP", "SIGINT")
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _first_picture() -> str:
    """What the empty chat will show, at the same places."""
    try:
        columns, rows = os.get_terminal_size(_OUT)
    except OSError:
        return ""
    if columns < 24 or rows < 6:
        return ""
    inner = columns - 4
    lines = {
        rows - 5: "   \x1b[1mfloe-chat\x1b[0m",
        rows - 3: f" ╭{'─' * inner}╮",
        rows - 2: f" │{' ' * inner}│",
        rows - 1: f" ╰{'─' * inner}╯",
        rows: "  ● starting",
    }
    return "\x1b[2J" + "".join(f"\x1b[{row};1H{line}" for row, line in lines.items())


def _write(text: str) -> None:
    with suppress(OSError):
        os.write(_OUT, text.encode())
