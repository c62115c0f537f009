"""One answer of the model while it is written and afterwards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widgets import Markdown, Static

from ...engine.events import Stats
from .fences import FenceSplitter
from .plain import printable
from .units import rate_of, seconds

_PERIOD = 0.125
_LARGEST_DUTY = 0.2


_REASONS = {
    "stop": "end of turn",
    "length": "length limit",
    "context": "context full",
    "cancelled": "stopped by you",
}


class AnswerParser(MarkdownIt):
    """GitHub's Markdown with tags as text to be read (the renderer would drop them) and nothing unprintable.

    The parser decodes what stands in a link for display, so that %1b would become an escape character.
    """

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False})

    def parse(self, src: str, env: MutableMapping[str, Any] | None = None) -> list[Token]:
        tokens = super().parse(src, env)
        _make_printable(tokens)
        return tokens


class AnswerTurn(Vertical):
    """Renders Markdown as it grows; a code block shows as plain text until its fence closes.

    Each piece of a long list or table makes Textual build the whole of it again. The engine needs the interpreter
    too, so that pieces are collected for as long as it takes to keep this thread below a fifth of a core.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[str] = []
        self._ready = ""
        self._fences = FenceSplitter()
        self._news = asyncio.Event()
        self._complete = asyncio.Event()
        self._markdown = Markdown("", parser_factory=AnswerParser, open_links=False)
        self._open_fence = Static(markup=False, classes="open-fence")
        self._footer = Static("…", markup=False, classes="footer")

    @property
    def text(self) -> str:
        """All of the answer so far."""
        return "".join(self._pieces)

    def compose(self) -> ComposeResult:
        self._open_fence.display = False
        yield from (self._markdown, self._open_fence, self._footer)

    def on_mount(self) -> None:
        self.run_worker(self._write())

    def show_progress(self, words: str) -> None:
        """What happens before the first token."""
        self._footer.update(words)

    def feed(self, text: str) -> None:
        """Show more of the answer."""
        if text and not self._pieces:
            self._footer.display = False
        self._pieces.append(text)
        self._ready += self._fences.feed(text)
        self._news.set()

    def finish(self, footer: str) -> None:
        """No more text comes; `footer` sums the answer up."""
        self._footer.update(footer)
        self._footer.display = True
        self._complete.set()
        self._news.set()

    async def _write(self) -> None:
        while await self._news.wait() and not self._complete.is_set():
            self._news.clear()
            began, began_cpu = time.monotonic(), time.thread_time()
            ready, self._ready = self._ready, ""
            if ready:
                await self._markdown.append(ready)
            self._show_open_fence(self._fences.held)
            await self._pause(_PERIOD)
            # Layout and painting happened in that pause and count as well.
            needed = (time.thread_time() - began_cpu) / _LARGEST_DUTY
            await self._pause(needed - (time.monotonic() - began))
        # Rendered piece by piece, a list or a table can come out otherwise than as a whole.
        await self._markdown.update(self.text)
        self._show_open_fence("")

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), max(0.0, seconds))

    def _show_open_fence(self, held: str) -> None:
        code = held.partition("\n")[2].rstrip("\n")
        if code or self._open_fence.display:
            self._open_fence.display = bool(code)
            self._open_fence.update(code.expandtabs(4))


def summary(reason: str, stats: Stats) -> str:
    """The line under a finished answer; what was not measured is left out."""
    parts = [f"{stats.new_tokens} token{'' if stats.new_tokens == 1 else 's'}"]
    if stats.decode_tps_mean is not None:
        parts.append(rate_of(stats.decode_tps_mean))
    if stats.first_token_s is not None:
        parts.append(f"first token {seconds(stats.first_token_s)}")
    if stats.rows is not None and stats.rows.virtual:
        parts.append("virtual time")
    parts.append(_REASONS.get(reason, reason))
    return " · ".join(parts)


def _make_printable(tokens: Sequence[Token]) -> None:
    for token in tokens:
        token.content = printable(token.content)
        _make_printable(token.children or ())
