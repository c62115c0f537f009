"""What a model thought before an answer: one line, which opens."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import Static

from ...history import AnswerStats
from ...history.exporting import thought_for
from ...text.plain_text import printable
from ..common.stable_text import Ground
from .turns import THINKING, Turn


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
