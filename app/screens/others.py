"""Answers to one question side by side, of which the person picks one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import Screen
from textual.widgets import Static

from ..chat.others import COUNT
from ..chat.view import Picking
from ..history.records import first_line, shortened
from ..text.plain_text import one_line, printable
from ..widgets.chat.column import AnswerColumn, ColumnBody, ColumnHeading
from ..widgets.chat.turns import COPY, THINKING, Turn
from ..widgets.common.clipboard import copy
from ..widgets.common.hints import Hints
from ..widgets.common.stable_text import Ground

if TYPE_CHECKING:
    from ..widgets.markdown.answer_block import AnswerBlock
    from ..widgets.markdown.code import CodeBlock

_KEYS: list[BindingType] = [
    Binding("enter", "pick", "Go on with the marked answer", show=False),
    *(Binding(f"{at + 1}", f"pick({at})", f"Go on with answer {at + 1}", show=False) for at in range(COUNT)),
    Binding("right,tab,l", "mark(1)", "Mark the next answer", show=False),
    Binding("left,shift+tab,h", "mark(-1)", "Mark the answer before", show=False),
    Binding("escape", "escape", "Stop the answers; then back to the answer before", show=False),
    Binding("t", "think", "Show what the model thought before the marked answer, or fold it", show=False),
    Binding("c", "copy", "Copy the marked answer", show=False),
    Binding("up,k", "scroll(-1)", "Scroll the marked answer up", show=False),
    Binding("down,j", "scroll(1)", "Scroll the marked answer down", show=False),
    Binding("pageup", "page(-1)", show=False),
    Binding("pagedown,space", "page(1)", show=False),
    Binding("home", "end(-1)", show=False),
    Binding("end", "end(1)", show=False),
]


class _Row(Ground, Horizontal):
    """Headings, or answers."""


class OthersScreen(Screen[None]):
    """Lies above the chat. From 100 columns on the answers stand side by side, else the marked one is shown."""

    TITLE = "Answers side by side"
    BINDINGS: ClassVar[list[BindingType]] = _KEYS

    def __init__(self, title: str, count: int, chat: Screen[None], picking: Picking) -> None:
        """`chat`: in whose loop `picking` is told what to do."""
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self._title, self._chat, self._picking = title, chat, picking
        self.columns = [AnswerColumn(at) for at in range(count)]
        self._marked = 0
        self._keys = Hints()

    def compose(self) -> ComposeResult:
        yield Static(" · ".join(filter(None, (self.app.sub_title, self._title))), id="title", markup=False)
        with _Row(id="headings"):
            yield from (column.heading for column in self.columns)
        with _Row(id="answers"):
            yield from (column.body for column in self.columns)
        yield self._keys

    def on_mount(self) -> None:
        self._mark(0)
        self._keys.show(["Enter or 1, 2, 3 goes on with one", "← → mark", "Esc stops, then goes back"])

    def _mark(self, at: int) -> None:
        self._marked = at
        for number, column in enumerate(self.columns):
            column.heading.chosen = number == at
            column.body.set_class(number == at, "-chosen")

    @property
    def _column(self) -> AnswerColumn:
        return self.columns[self._marked]

    # What the person asks for

    def action_pick(self, at: int | None = None) -> None:
        """Go on with the marked answer, or number `at`."""
        self._chat.call_later(self._picking.pick, self._marked if at is None else at)

    def action_escape(self) -> None:
        """Stop the answers; if they have ended, go back to the chat."""
        self._chat.call_later(self._picking.escape)

    def action_mark(self, step: int) -> None:
        """Mark the next answer, or the one before."""
        self._mark((self._marked + step) % len(self.columns))

    def action_think(self) -> None:
        """Open what the model thought before the marked answer, or fold it."""
        if self._column.turn is not None:
            self._turn_thinking(self._column.turn)

    def action_copy(self) -> None:
        """Copy the marked answer."""
        if self._column.turn is not None:
            self._copy(self._column.turn.text, "the answer")

    def action_scroll(self, lines: int) -> None:
        """Scroll the marked answer by lines."""
        self._column.body.scroll_relative(y=lines, animate=False)

    def action_page(self, pages: int) -> None:
        """Scroll it by pages."""
        self.action_scroll(pages * max(1, self._column.body.size.height - 2))

    def action_end(self, direction: int) -> None:
        """Go to its beginning (-1) or its end (1)."""
        if direction < 0:
            self._column.body.scroll_home(animate=False)
        else:
            self._column.body.anchor()

    @on(ColumnHeading.Clicked)
    def _clicked(self, event: ColumnHeading.Clicked) -> None:
        self._mark(event.at)

    @on(ColumnBody.Picked)
    def _picked(self, event: ColumnBody.Picked) -> None:
        self.action_pick(event.at)

    @on(Turn.Act)
    def _act(self, event: Turn.Act) -> None:
        if event.action == COPY:
            self._copy(event.turn.text, "the answer")
        elif event.action == THINKING:
            self._turn_thinking(event.turn)

    def _turn_thinking(self, turn: Turn) -> None:
        found = next((column.turn for column in self.columns if column.turn is turn), None)
        if found is not None:
            found.thought.opened = not found.thought.opened

    # By name: their modules are imported only after the first frame.

    def on_code_block_copied(self, event: CodeBlock.Copied) -> None:
        self._copy(event.code, "the code")

    def on_answer_block_link_clicked(self, event: AnswerBlock.LinkClicked) -> None:
        href = printable(event.href)
        self._copy(href, href)

    def _copy(self, text: str, what: str) -> None:
        copy(self.app, text)
        self.notify(f"Copied {what}", timeout=2, markup=False)


class OthersPage:
    """Opens the page over `chat`, and closes it; see `chat.view.Beside`."""

    def __init__(self, chat: Screen[None]) -> None:
        self._chat = chat
        self._page: OthersScreen | None = None

    def open(self, question: str, remark: str, count: int, picking: Picking) -> Sequence[AnswerColumn]:
        """Show the page, with the question, a remark on it and `count` columns."""
        title = " · ".join(filter(None, (one_line(shortened(first_line(question))), remark)))
        self._page = OthersScreen(title, count, self._chat, picking)
        self._chat.app.push_screen(self._page)
        return self._page.columns

    def close(self) -> None:
        """Take it away, with all that lies over it."""
        if self._page is not None:
            self._page.pop_until_active()
            self._page.dismiss()
            self._page = None

    def remark(self, text: str) -> None:
        """Say something to the person there."""
        if self._page is not None:
            self._page.notify(text, timeout=3, markup=False)
