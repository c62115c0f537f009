"""Keeps an unfinished code block away from the Markdown renderer, which would redo it with every token."""

from __future__ import annotations

import re

_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PREFIX = r"[ \t]*(?:(?:[-*+>]|\d{1,9}[.)])[ \t]*)*"
_OPENING = re.compile(rf"^{_PREFIX}(?P<ticks>`{{3,}}(?=[^`]*$)|~{{3,}})")
_MAY_OPEN = re.compile(rf"^(?P<prefix>{_PREFIX})(?:`{{1,2}}|~{{1,2}}|`{{3,}}[^`]*|~{{3,}}.*)$")


class FenceSplitter:
    """Splits streamed Markdown into text that may be rendered now and the code fence that is still open.

    The pieces that `feed` and `finish` return add up to the text that was fed.
    """

    def __init__(self) -> None:
        self._line = ""
        self._passed = 0
        self._fence: str | None = None
        self._held = ""

    @property
    def held(self) -> str:
        """Text that waits for its fence to close (or for the line to turn out not to be a fence)."""
        return self._held + self._line[self._passed :]

    def feed(self, text: str) -> str:
        """Take more text; returns what may be rendered."""
        ready: list[str] = []
        for piece in _LINE.findall(text):
            self._line += piece
            ready.append(self._end_line() if piece.endswith("\n") else self._peek())
        return "".join(ready)

    def finish(self) -> str:
        """No more text comes: returns the rest."""
        rest = self.held
        self._line, self._passed, self._fence, self._held = "", 0, None, ""
        return rest

    def _end_line(self) -> str:
        line, rest = self._line.rstrip("\n"), self._line[self._passed :]
        self._line, self._passed = "", 0
        if self._fence is not None:
            self._held += rest
            if not re.match(rf"^[ \t>]*{re.escape(self._fence[0])}{{{len(self._fence)},}}[ \t]*$", line):
                return ""
            self._fence, ready, self._held = None, self._held, ""
            return ready
        if opening := _OPENING.match(line):
            self._fence, self._held = opening["ticks"], rest
            return ""
        return rest

    def _peek(self) -> str:
        if self._fence is not None:
            return ""
        opening = _MAY_OPEN.match(self._line)
        end = len(opening["prefix"]) if opening else len(self._line)
        ready = self._line[self._passed : end]
        self._passed = max(self._passed, end)
        return ready
