"""The common part of questions and answers: a message, the row under it, and selection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.style import Style
from textual.widgets import Static

from ...actions import NAMED
from ...history import Message as Record
from ...text.plain_text import one_line, printable
from ..common.keys import key_of
from ..common.stable_text import Ground, size_of_content
from ..common.themes import MUTED

COPY, CODE, EDIT, AGAIN, MORE, FORK, DELETE, OLDER, NEWER, THINKING = (
    *("copy_message", "copy_code", "edit_message", "answer_again", "continue_answer", "fork_chat", "delete_message"),
    *("older_version", "newer_version", "show_thinking"),
)
"""The actions on a message."""


class Tail(Static):
    """The row under a message: which version is shown and, on request, the actions on it.

    On a narrow screen it can take several rows.
    """

    virtual_size = size_of_content()

    def __init__(self) -> None:
        super().__init__(classes="tail")
        self._parts: list[Content] = []
        self._keys = False

    def show(self, record: Record | None, actions: tuple[str, ...], *, keys: bool) -> None:
        """Offer `actions` for `record`, with their `keys` if those act on it; the version is always shown if there are
        several.
        """
        self._parts, self._keys = [], keys
        if record is not None and record.siblings > 1:
            place = Content.styled(f" {record.sibling}/{record.siblings} ", MUTED)
            self._parts.append(Content.assemble(_link("‹", OLDER), place, _link("›", NEWER)))
        for action in actions if record is not None else ():
            key = Content.styled(f" {key_of(self, action)}" if keys else "", MUTED)
            self._parts.append(Content.assemble(_link(NAMED[action].hint, action), key))
        self._lay_out()

    def on_resize(self, _event: events.Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        width, height = self.content_size
        if width:  # otherwise it comes with the first layout
            rows = _rows(self._parts, width, 2 if self._keys else 1)
            self.update(Content("\n").join(rows), layout=max(1, len(rows)) != height)

    def action_act(self, action: str) -> None:
        """A link was clicked."""
        if isinstance(self.parent, Turn):
            self.parent.post_message(Turn.Act(self.parent, action))


class Turn(Ground, Vertical):
    """One message of the chat; `record` is None while a question is queued."""

    ACTIONS: ClassVar[tuple[str, ...]] = ()

    class Act(Message):
        """The user wants `action`, one of the names above, for `turn`."""

        def __init__(self, turn: Turn, action: str) -> None:
            super().__init__()
            self.turn = turn
            self.action = action

    def __init__(self, record: Record | None) -> None:
        super().__init__()
        self._record = record
        self._tail = Tail()
        self._selected = False

    @property
    def record(self) -> Record | None:
        """The message that is shown."""
        return self._record

    @record.setter
    def record(self, record: Record) -> None:
        self._record = record
        self.show_tail()

    @property
    def selected(self) -> bool:
        """Whether keys act on this message."""
        return self._selected

    @selected.setter
    def selected(self, selected: bool) -> None:
        self._selected = selected
        self.set_class(selected, "-selected")
        self.show_tail()

    @property
    def text(self) -> str:
        """What it says."""
        return self._record.text if self._record else ""

    @property
    def actions(self) -> tuple[str, ...]:
        """The actions on it."""
        return self.ACTIONS

    def on_mount(self) -> None:
        self.show_tail()

    def on_enter(self, event: events.Enter) -> None:
        self.show_tail()

    def on_leave(self, event: events.Leave) -> None:
        self.show_tail()

    def show_tail(self) -> None:
        """Draw the row under the message again."""
        wanted = self._selected or (self.is_attached and self.is_mouse_over)
        self._tail.show(self._record, self.actions if wanted else (), keys=self._selected)


class UserTurn(Turn):
    """A question, shown exactly as written, without markup or Markdown. `note` is its state, such as queued."""

    ACTIONS = (COPY, EDIT, AGAIN, FORK, DELETE)

    def __init__(self, text: str, note: str = "", record: Record | None = None, files: tuple[str, ...] = ()) -> None:
        super().__init__(record)
        self._text = text
        self._files = tuple(file.name for file in record.attachments) if record else files
        self._said = Static(classes="said")
        self.note = note

    @property
    def text(self) -> str:
        return self._text

    @property
    def note(self) -> str:
        """A remark under the text, such as that it is queued."""
        return self._note

    @note.setter
    def note(self, note: str) -> None:
        self._note = note
        parts = [Content(printable(self._text).expandtabs(4))] if self._text else []
        parts += [Content.styled(f"▤ {one_line(name)}", "$secondary") for name in self._files]
        parts += [Content.styled(note, f"italic {MUTED}")] if note else []
        self._said.update(Content("\n").join(parts), layout=self._said.is_attached)

    async def withdraw(self) -> None:
        """Remove the question."""
        await self.remove()

    def compose(self) -> ComposeResult:
        yield self._said
        yield self._tail


def _link(text: str, action: str) -> Content:
    return Content.styled(text, Style.from_meta({"@click": f"act('{action}')"}))


def _rows(parts: Sequence[Content], width: int, least: int) -> list[Content]:
    """All in one row if they fit, with gaps as wide as possible, else in more; at least `least` cells between them."""
    words = sum(part.cell_length for part in parts)
    gaps = max(1, len(parts) - 1)
    gap = Content(" " * min(3, max(least, (width - words) // gaps)))
    rows: list[Content] = []
    for part in parts:
        if rows and rows[-1].cell_length + len(gap) + part.cell_length <= width:
            rows[-1] = Content.assemble(rows[-1], gap, part)
        else:
            rows.append(part)
    return rows
