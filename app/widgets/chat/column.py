"""A column of a page with answers side by side: its heading, and the answer as the chat renders it."""

from __future__ import annotations

from dataclasses import replace

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Static

from ....engine.events import Failed
from ....models.errors import FloeError
from ...history import Message as Record
from ..common.stable_text import Ground
from ..common.themes import MUTED
from .answer import AnswerTurn
from .blocks import ErrorBlock, Note
from .turns import COPY, THINKING

_ROOMY = 30  # cells from which the heading names tokens
_ENDS = {"complete": ("ended", "$success"), "stopped": ("stopped", "$warning"), "failed": ("failed", "$error")}


class OtherAnswer(AnswerTurn):
    """An answer of which the chat may show another version."""

    ACTIONS = (COPY, THINKING)


class ColumnHeading(Static):
    """The number of an answer, what happens to it, and how many tokens it has."""

    class Clicked(Message):
        """Show answer number `at`, from 0."""

        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

    def __init__(self, at: int) -> None:
        super().__init__()
        self._at = at
        self._state, self._tone, self._tokens = "waiting", MUTED, 0
        self._chosen = False

    @property
    def chosen(self) -> bool:
        """Whether keys act on this answer."""
        return self._chosen

    @chosen.setter
    def chosen(self, chosen: bool) -> None:
        self._chosen = chosen
        self.set_class(chosen, "-chosen")
        self.show()

    def show(self, state: str = "", tone: str = "", tokens: int = 0) -> None:
        """Show another state in the style `tone`, or more tokens."""
        self._state, self._tone = (state, tone) if state else (self._state, self._tone)
        self._tokens = max(tokens, self._tokens)
        unit = "" if self.size.width < _ROOMY else " token" if self._tokens == 1 else " tokens"
        count = f" · {self._tokens:,}{unit}" if self._tokens else ""
        number = (f"{'▸' if self._chosen else ' '}{self._at + 1} ", "bold")
        self.update(Content.assemble(number, ("● ", self._tone), self._state, (count, MUTED)), layout=False)

    def restart(self) -> None:
        """Another answer comes here."""
        self._tokens = 0
        self.show("waiting", MUTED)

    def on_resize(self, _event: events.Resize) -> None:
        self.show()

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Clicked(self._at))


class _Blocks(Ground, Vertical):
    """As high as the column at least: what is followed to its end would else begin in the middle."""


class ColumnBody(Ground, VerticalScroll):
    """The answer, which is followed to its end until one scrolls. A click on it picks it."""

    class Picked(Message):
        """Go on with answer number `at`, from 0."""

        def __init__(self, at: int) -> None:
            super().__init__()
            self.at = at

    def __init__(self, at: int) -> None:
        super().__init__(can_focus=False)
        self._at = at
        self._inside = _Blocks()
        self._wanted: tuple[Widget, ...] = ()
        self._shown: tuple[Widget, ...] | None = None  # None before this is mounted

    def compose(self) -> ComposeResult:
        yield self._inside

    def show(self, *blocks: Widget) -> None:
        """Show these alone; those that are shown already stay as they are, before the others."""
        self._wanted = blocks
        if self._shown is not None:
            self.call_later(self._fill)

    async def on_mount(self) -> None:
        self.anchor()
        self._shown = ()
        await self._fill()

    async def _fill(self) -> None:
        shown, self._shown = self._shown or (), self._wanted
        await self._inside.remove_children([block for block in shown if block not in self._shown])
        await self._inside.mount_all([block for block in self._shown if block not in shown])

    def on_click(self, event: events.Click) -> None:
        if not self.screen.get_selected_text():  # else it ends a selection
            event.stop()
            self.post_message(self.Picked(self._at))


class AnswerColumn:
    """Both together; see `chat.view.Column`."""

    def __init__(self, at: int) -> None:
        self.heading, self.body = ColumnHeading(at), ColumnBody(at)
        self.turn: OtherAnswer | None = None

    def begin(self, answer: Record) -> None:
        """This answer is shown here, with what came of it so far."""
        self.turn = OtherAnswer(_alone(answer), live=True)
        self.heading.restart()
        if answer.text or answer.thought:
            self.heading.show("writing", "$primary")
        self.body.show(self.turn)

    def show_progress(self, words: str) -> None:
        """Show what happens before its first token."""
        self.heading.show("reading", "$accent")
        if self.turn is not None:
            self.turn.show_progress(words)

    def feed(self, text: str) -> None:
        """Show more of the answer."""
        self.heading.show("writing", "$primary")
        if self.turn is not None:
            self.turn.feed(text)

    def think(self, text: str, tokens: int) -> None:
        """Show more of what the model thinks before it answers."""
        self.heading.show("thinking", "$primary")
        if self.turn is not None:
            self.turn.think(text, tokens)

    def count(self, tokens: int) -> None:
        """So many tokens were written."""
        self.heading.show(tokens=tokens)

    def finish(self, answer: Record) -> None:
        """No more text comes."""
        self.heading.show(*_ENDS[answer.state], tokens=answer.stats.tokens if answer.stats else 0)
        if answer.text.strip() or answer.thought.strip():
            if self.turn is not None:
                self.turn.finish(_alone(answer))
        else:
            self.body.show(Note("There is no text" if answer.state == "complete" else "It had no text yet"))

    async def explain(self, problem: FloeError | Failed) -> None:
        """Show what went wrong, why, and what to do."""
        self.heading.show(*_ENDS["failed"])
        error = ErrorBlock(problem.title, problem.cause, problem.hint)
        self.body.show(*([self.turn] if self.turn is not None and self.turn.text else []), error)

    def give_up(self) -> None:
        """No answer comes here."""
        self.heading.show(*_ENDS["stopped"])
        self.body.show(Note("It had not begun"))


def _alone(answer: Record) -> Record:
    """Without its number among its siblings, which has no meaning before all of them have ended."""
    return replace(answer, sibling=1, siblings=1)
