"""Earlier chats: a list, newest first, or search results."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from ...models.catalog import short_name
from ...models.errors import FloeError
from ..background import in_background, later
from ..history import History, Hit, Summary
from ..history.records import LATEST
from ..text.plain_text import printable
from ..widgets.common.hanging_list import Hanging
from ..widgets.common.hints import Page, hints
from ..widgets.common.themes import MUTED

_PAGE = 100
_WIDE = 76  # terminal columns from which the frame shows all hints
_PAUSE = 0.15  # seconds without a key before a search
_DAY = 86_400

Line = Summary | Hit


@dataclass(frozen=True, slots=True)
class PickedChat:
    """The chat to open (None: stay), the message found in it, and the chats that were deleted."""

    conversation: int | None
    message: int | None
    deleted: frozenset[int]


class SearchField(Input):
    """Holds the search; movement and action keys go to the list."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.move(-1)", "the chat above", show=False),
        Binding("down", "screen.move(1)", "the chat below", show=False),
        Binding("pageup", "screen.move(-8)", "", show=False),
        Binding("pagedown", "screen.move(8)", "", show=False),
        Binding("ctrl+d", "screen.delete", "delete the chat", show=False),
        Binding("ctrl+z", "screen.undo", "restore it", show=False),
    ]


class HistoryScreen(ModalScreen[PickedChat]):
    """Enter opens a chat, Ctrl+D deletes it, Ctrl+Z restores it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "Close", show=False)]

    def __init__(self, history: History, words: str = "", shown: int | None = None) -> None:
        super().__init__()
        self._history = history
        self._shown = shown
        self._lines: list[Line] = []
        self._deleted: list[tuple[int, int]] = []  # marks and conversations, the last one last
        self._asked = 0
        self._words = self._found = ""  # the last search, and what the list shows
        self._entered = False
        self._field = SearchField(printable(words), placeholder="Search titles and messages", id="search")
        self._list = OptionList(id="chats", markup=False)
        self._hint = Static("", markup=False, classes="hint")

    def compose(self) -> ComposeResult:
        with Page(classes="page") as page:
            page.border_title = "Chats"
            yield self._field
            yield self._list
            yield self._hint

    def on_resize(self, event: events.Resize) -> None:
        """If the frame has no room for all hints, leave out the obvious ones."""
        first = ["Enter opens"] if event.size.width >= _WIDE else []
        said = hints(*first, "Ctrl+D deletes", "Ctrl+Z restores", "Esc closes")
        self.query_one(Page).border_subtitle = said

    def on_mount(self) -> None:
        self._list.can_focus = False
        self._field.focus()
        self.refresh_list()

    def refresh_list(self) -> None:
        """Read the history again."""
        self._asked += 1
        asked = self._asked
        words = self._words = self._field.value

        def read() -> tuple[int, list[Line] | str]:
            try:
                return asked, list(self._history.search(words) if words.strip() else self._history.conversations(_PAGE))
            except FloeError as error:
                return asked, f"{error.title}: {error.cause} {error.hint}"

        in_background(self, read, self._show)

    def _show(self, found: tuple[int, list[Line] | str]) -> None:
        asked, lines = found
        if asked != self._asked:
            return  # a newer search is under way
        place, self._lines = self._list.highlighted, []
        self._list.clear_options()
        self._add([] if isinstance(lines, str) else lines)
        typed = self._field.value.strip()
        nothing = f"No chat contains all of: {typed}" if typed else "No chat is saved yet"
        self._hint.update(lines if isinstance(lines, str) else "" if lines else nothing)
        self._hint.display = isinstance(lines, str) or not lines
        if self._lines:
            self._list.highlighted = min(place or 0, len(self._lines) - 1)
        self._found = self._words
        if self._entered and self._found == self._field.value:
            self._choose()

    def _add(self, lines: list[Line]) -> None:
        self._lines += lines
        self._list.add_options(Option(_line(line, here=_id(line) == self._shown)) for line in lines)

    @on(Input.Changed)
    def _search(self) -> None:
        self._list.highlighted, self._entered = None, False
        asked = self._asked
        later(self, _PAUSE, lambda: self.refresh_list() if self._asked == asked else None)

    @on(OptionList.OptionHighlighted)
    def _read_on(self, event: OptionList.OptionHighlighted) -> None:
        last = self._lines[-1] if self._lines else None
        if event.option_index == len(self._lines) - 1 and isinstance(last, Summary) and len(self._lines) >= _PAGE:
            self._add(list(self._history.conversations(_PAGE, last)))

    def action_move(self, step: int) -> None:
        """Highlight another line."""
        if self._lines:
            self._list.highlighted = min(max(0, (self._list.highlighted or 0) + step), len(self._lines) - 1)

    @on(Input.Submitted)
    @on(OptionList.OptionSelected)
    def _open(self, event: Input.Submitted | OptionList.OptionSelected) -> None:
        event.stop()
        if isinstance(event, OptionList.OptionSelected):
            self._list.highlighted = event.option_index
        elif self._found != self._field.value:
            self._entered = True  # Enter right after typing refers to results not yet found
            return
        self._choose()

    def _choose(self) -> None:
        self._entered = False
        if (line := self._highlighted()) is not None:
            message = line.message if isinstance(line, Hit) else None
            self.dismiss(PickedChat(_id(line), message, self._gone()))

    async def action_delete(self) -> None:
        """Delete the highlighted chat."""
        if (line := self._highlighted()) is not None:
            self._deleted.append((self._history.delete(_id(line)), _id(line)))
            await self._after_writing()

    async def action_undo(self) -> None:
        """Restore the chat that was deleted last."""
        if self._deleted:
            self._history.undo(self._deleted.pop()[0])
            await self._after_writing()

    def action_close(self) -> None:
        """Back to the chat."""
        self.dismiss(PickedChat(None, None, self._gone()))

    async def _after_writing(self) -> None:
        await self._history.settled()
        self.refresh_list()

    def _gone(self) -> frozenset[int]:
        return frozenset(conversation for _mark, conversation in self._deleted)

    def _highlighted(self) -> Line | None:
        at = self._list.highlighted
        return self._lines[at] if at is not None and at < len(self._lines) else None


def _id(line: Line) -> int:
    return line.id if isinstance(line, Summary) else line.conversation


def _line(line: Line, *, here: bool) -> Hanging:
    """A chat's name, and under it its details or the match."""
    name = Content.styled(printable(line.name), "bold")
    mark = Content.styled("● " if here else "  ", "$primary")
    facts = [f"#{line.number}", when(line.updated / 1000, time.time())]
    if isinstance(line, Summary):
        facts += [f"{line.messages} message{'' if line.messages == 1 else 's'}", printable(short_name(line.model))]
    under = Content.styled(" · ".join(fact for fact in facts if fact), MUTED)
    if isinstance(line, Hit):
        found = Content(printable(line.snippet))
        for start, end in line.marks:
            found = found.stylize("bold $accent", start, end)
        if line.message is None:
            return Hanging(mark, found.stylize_before("bold"), under)  # the title itself
        under = Content.assemble(under, (" · ", MUTED), found.stylize_before(MUTED))
        if not line.shown:
            under = Content.assemble(under, (" · on another branch", f"italic {MUTED}"))
    return Hanging(mark, name, under)


def when(then: float, now: float) -> str:
    """A moment, in seconds since 1970, as people say it: "14:03", "yesterday 14:03", "12 Nov 2026"."""
    at, today = time.localtime(min(max(then, 0), LATEST / 1000)), time.localtime(now)
    clock = time.strftime("%H:%M", at)
    if at[:3] == today[:3]:
        return clock
    if at[:3] == time.localtime(now - _DAY)[:3]:
        return f"yesterday {clock}"
    return time.strftime("%d %b %Y", at).lstrip("0")
