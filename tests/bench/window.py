"""The installed program in a real terminal: a pseudo terminal, and pyte in the place of the window around it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import pyte

FLOE_CHAT = str(Path(sys.executable).with_name("floe-chat"))
_MODE = re.compile(rb"\x1b\[\?([\d;]+)([hl])")
_PAINTED = re.compile(rb"\x1b\[[<=>?]?[\d;]*[$]?[a-zA-Z]")  # all that is no character
_PAGE = re.compile(rb"(\x1b\[\?1049[hl])")
_BEFORE_PAGE = re.compile(rb"(?=\x1b\[\?1049[hl])")
# What pyte does not know it would print: kitty's keyboard protocol, and questions about private modes.
_UNKNOWN = re.compile(rb"\x1b\[[<>=][\d;]*[a-z]|\x1b\[\?[\d;]*\$p")


class Window:
    """A terminal window with one program in it. As a context it is closed, and what still runs killed, at the end.

    What arrives is only noted as it comes, so that looking on costs the program nothing; it is drawn when somebody
    wants to see it.

    Attributes:
        modes: the private modes that the program has switched, by number: 1049 alternate screen, 25 cursor, 1000 mouse.
        first_paint: seconds from the start to the first character. last: when something arrived last (time.monotonic).
        arrived: bytes that the program has written.
    """

    def __init__(
        self,
        arguments: Sequence[str] = (),
        *,
        columns: int = 100,
        rows: int = 30,
        env: Mapping[str, str] | None = None,
        controlling: bool = True,
    ) -> None:
        """`controlling`: whether it is the program's controlling terminal, so that closing it hangs the program up."""
        self.modes: dict[int, bool] = {}
        self.first_paint: float | None = None
        self.last = 0.0
        self.arrived = 0
        self._arrived: list[bytes] = []
        self._wanted: bytes | None = None
        self._found = 0.0
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._rest = b""
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.attributes = termios.tcgetattr(self._slave)
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [FLOE_CHAT, *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            env={**_environment(), "TERM": "xterm-256color", "COLORTERM": "truecolor", **(env or {})},
            start_new_session=True,
            preexec_fn=_take_terminal if controlling else None,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.close()
        os.close(self._slave)

    # What is seen

    @property
    def lines(self) -> list[str]:
        """The rows, without blanks at their ends."""
        with self._lock:
            self._draw()
            return [line.rstrip() for line in self._screen.display]

    @property
    def text(self) -> str:
        """All rows."""
        return "\n".join(self.lines)

    def until(self, seen: str | Callable[[str], bool], seconds: float = 60) -> str:
        """Wait until the window shows `seen`, or `seen` says yes to its text, and return that.

        Each picture since the last look counts, also one that is gone again. Fails with what it shows if none does.
        """
        deadline = time.monotonic() + seconds
        while True:
            with self._changed:
                self._draw(1)
                text = "\n".join(line.rstrip() for line in self._screen.display)
            if seen in text if isinstance(seen, str) else seen(text):
                return text
            assert time.monotonic() < deadline, f"never came: {seen}\n{text}"
            with self._changed:
                if not self._arrived:
                    self._changed.wait(0.2)

    def seconds_until(self, wanted: str, keys: str, seconds: float = 60) -> float:
        """Press `keys`, and take the time until `wanted` arrives: characters that come for no other reason."""
        with self._changed:
            self._wanted, self._found = wanted.encode(), 0.0
        began = time.monotonic()
        self.type(keys)
        with self._changed:
            assert self._changed.wait_for(lambda: self._found > 0, seconds), f"{wanted} never came"
            self._wanted = None
            return self._found - began

    def seconds_until_painted(self, keys: str, quiet: float = 0.12) -> tuple[float, float]:
        """Press `keys`, wait for all that comes of it, and take the times until its first and its last byte."""
        began = time.monotonic()
        self.type(keys)
        first = 0.0
        while not first or time.monotonic() - self.last < quiet:
            assert time.monotonic() - began < 60, "nothing came of it"
            time.sleep(0.002)
            first = first or (self.last if self.last > began else 0.0)
        return first - began, self.last - began

    def type(self, text: str) -> None:
        """Press keys: "\\r" is Enter, "\\x1b" Esc, "\\x03" Ctrl+C, "\\x11" Ctrl+Q."""
        os.write(self._master, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        """Drag the window's corner."""
        with self._lock:
            self._draw()
            self._screen.resize(rows, columns)
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGWINCH)

    def close(self) -> None:
        """Close the window, as a person does whose network has gone: nothing reads it any more."""
        if self._master >= 0:
            master, self._master = self._master, -1
            os.close(master)

    def end(self, number: int | None = None, seconds: float = 30) -> int:
        """Send a signal, or none, and wait for the end; returns the exit code, negative if the signal killed it."""
        if number is not None:
            os.kill(self.process.pid, number)
        return self.process.wait(seconds)

    def is_as_before(self) -> bool:
        """Whether the terminal is left as a shell wants it: keys echoed, cursor shown, no reports, the shell's page."""
        wanted = {1049: False, 25: True, 1000: False, 1003: False, 1006: False, 1004: False, 2004: False}
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:  # the last bytes may still be on their way
            if all(self.modes.get(mode, False) == value for mode, value in wanted.items()):
                break
            time.sleep(0.02)
        modes = {mode: self.modes.get(mode, False) for mode in wanted}
        return modes == wanted and termios.tcgetattr(self._slave) == self.attributes

    def _read(self) -> None:
        while (master := self._master) >= 0:
            try:
                found = os.read(master, 65536)
            except OSError:
                return
            if not found:
                return
            with self._changed:
                self.last = time.monotonic()
                self.arrived += len(found)
                if self.first_paint is None and _PAINTED.sub(b"", found).strip():
                    self.first_paint = self.last - self.began
                if self._wanted is not None and self._wanted in found and not self._found:
                    self._found = self.last
                for numbers, letter in _MODE.findall(found):
                    for number in numbers.split(b";"):
                        self.modes[int(number)] = letter == b"h"
                self._arrived += _BEFORE_PAGE.split(found)
                self._changed.notify_all()

    def _draw(self, most: int | None = None) -> None:
        """Draw what has arrived, `most` pieces of it."""
        arrived = self._arrived[:most]
        del self._arrived[:most]
        self._take(b"".join(arrived))

    def _take(self, found: bytes) -> None:
        found = self._rest + found
        # A sequence that is cut in two waits for its second half.
        cut = found.rfind(b"\x1b", -12)
        self._rest = b"" if cut < 0 or re.search(rb"[a-zA-Z~]", found[cut + 1 :]) else found[cut:]
        found = found[: len(found) - len(self._rest)]
        for piece in _PAGE.split(found):
            if _PAGE.fullmatch(piece):
                self._screen.reset()  # pyte has one page only
            self._stream.feed(_UNKNOWN.sub(b"", piece))


def _environment() -> dict[str, str]:
    """Without a size that some program may have noted there: it would hold whatever the window is dragged to."""
    return {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
