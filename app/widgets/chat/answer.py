"""One answer of the model while it is written and afterwards."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from ...history import AnswerStats
from ...history import Message as Record
from ...history.exporting import closing, thought_for
from ...text.plain_text import printable
from ..common.stable_text import Ground
from ..markdown.fences import FenceSplitter
from ..markdown.folded import Folded
from .turns import AGAIN, CODE, COPY, DELETE, EDIT, FORK, MORE, THINKING, Turn


class _Line(Static):
    """The line; a click opens and folds the rest."""

    def on_click(self, event: events.Click) -> None:
        event.stop()
        turn = self.query_ancestor(Turn)
        turn.post_message(Turn.Act(turn, THINKING))


class Thought(Ground, Vertical):
    """Text is collected, and painted by `paint`; while it is folded only its tokens are counted."""

    def __init__(self, text: str, stats: AnswerStats | None, *, live: bool, opened: bool) -> None:
        super().__init__()
        self._pieces = [text] if text else []
        self._stats, self._live, self._opened = stats, live, opened
        self._tokens = 0
        self._painted = ("", 0)  # the line, and characters of the text below it
        self._line, self._words = _Line(classes="thought-line"), Static(classes="thought-text")
        self._words.display = False

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._pieces)

    @property
    def opened(self) -> bool:
        """Whether the text is shown, and not only the line."""
        return self._opened

    @opened.setter
    def opened(self, opened: bool) -> None:
        self._opened = opened
        self.paint()

    def compose(self) -> ComposeResult:
        yield from (self._line, self._words)

    def on_mount(self) -> None:
        self.paint()

    def feed(self, text: str, tokens: int) -> None:
        """Take more text; nothing is painted yet."""
        self._pieces.append(text)
        self._tokens += tokens

    def finish(self, stats: AnswerStats | None) -> None:
        """No more text comes."""
        self._live, self._stats = False, stats
        self.paint()

    def paint(self) -> None:
        """Show what was collected."""
        said = self.text.strip()
        if self.display != bool(said):
            self.display = bool(said)
        if not said:
            return
        going_on = f"Thinking, {self._tokens:,} token{'' if self._tokens == 1 else 's'}" if self._tokens else "Thinking"
        words = going_on if self._live else thought_for(self._stats)
        line = f"{words} {'▾' if self._opened else '▸'}"
        before, self._painted = self._painted, (line, len(said) if self._opened else 0)
        if before[0] != line:
            self._line.update(Content(line), layout=not self._line.size.width)
        if before[1] != self._painted[1]:
            self._words.display = self._opened
            self._words.update(Content(printable(said).expandtabs(4)))


_PERIOD = 0.125
_LARGEST_DUTY = 0.05


class AnswerTurn(Turn):
    """Renders Markdown as it grows; a code block shows as plain text until its fence closes.

    Each piece of a long list or table redraws all of it. The engine needs the interpreter too, so pieces are collected
    long enough to keep this work below a twentieth of a core.
    """

    ACTIONS = (COPY, CODE, THINKING, EDIT, AGAIN, MORE, FORK, DELETE)

    def __init__(self, record: Record, *, live: bool = False, opened: bool = False) -> None:
        """`live`: more text will be fed, until `finish`. `opened`: all of its thinking is shown."""
        from ..answer_markdown import AnswerMarkdown

        super().__init__(record)
        self._live = live
        self._pieces: list[str] = []
        self._ready = ""
        self._fences = FenceSplitter()
        self._news = asyncio.Event()
        self._complete = asyncio.Event()
        self.thought = Thought(record.thought, record.stats, live=live, opened=opened)
        self._markdown = AnswerMarkdown("" if live else record.text, waits=live)
        self._open_fence = Folded(classes="open-fence")
        self._footer = Static("" if live else printable(closing(record)), markup=False, classes="footer")
        if live:
            self.feed(record.text)
        else:
            self._pieces.append(record.text)
            self._complete.set()

    @property
    def text(self) -> str:
        """All of the answer so far."""
        return "".join(self._pieces)

    @property
    def actions(self) -> tuple[str, ...]:
        lacking = {CODE} if not self.codes() else set[str]()
        lacking |= {THINKING} if not self.thought.text else set()
        return tuple(action for action in self.ACTIONS if action not in lacking)

    def codes(self) -> tuple[str, ...]:
        """Its code blocks, in order."""
        from ..markdown.markdown import codes

        return codes(self.text)

    def compose(self) -> ComposeResult:
        if self._live or self.thought.text:
            yield self.thought
        yield self._markdown
        if self._live:
            self._open_fence.display = self._footer.display = False
            yield self._open_fence
        yield from (self._footer, self._tail)

    def on_mount(self) -> None:
        super().on_mount()
        if self._live:
            self.run_worker(self._write())

    def show_progress(self, words: str) -> None:
        """Show what happens before the first token."""
        self._markdown.wait(words)

    def feed(self, text: str) -> None:
        """Show more of the answer."""
        if not text:
            return
        self._pieces.append(text)
        self._ready += self._fences.feed(text)
        self._news.set()

    def think(self, text: str, tokens: int) -> None:
        """Show more of what the model thinks."""
        self.thought.feed(text, tokens)
        self._news.set()

    def finish(self, record: Record) -> None:
        """No more text comes; the saved message replaces the streamed one."""
        self.record = record
        self._complete.set()
        self._news.set()

    async def _write(self) -> None:
        while await self._news.wait() and not self._complete.is_set():
            self._news.clear()
            began, began_cpu = time.monotonic(), time.thread_time()
            ready, self._ready = self._ready, ""
            code = self._fences.held.partition("\n")[2]
            self._show_thought()
            await self._markdown.grow(ready, going_on=not code)
            self._show_open_fence(code)
            await self._pause(_PERIOD)
            # Layout and painting happened in that pause and count as well.
            needed = (time.thread_time() - began_cpu) / _LARGEST_DUTY
            await self._pause(needed - (time.monotonic() - began))
        with self.app.batch_update():
            await self._markdown.complete(self.text)
            self._show_open_fence("")
            self.thought.finish(None if self.record is None else self.record.stats)
            self._show_thought()
            if self.record is not None:
                self._footer.update(printable(closing(self.record)))
            self._footer.display = True

    def _show_thought(self) -> None:
        self.thought.paint()
        waits = bool(self.thought.text.strip()) and not self.text
        if self._markdown.display == waits:  # its line stands for the words that wait for an answer
            self._markdown.display = not waits

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._complete.wait(), max(0.0, seconds))

    def _show_open_fence(self, code: str) -> None:
        code = code.rstrip("\n")
        if code or self._open_fence.display:
            self._open_fence.display = bool(code)
            self._open_fence.show(Content(code))
