"""The help page, with search: the keys of the open page; for the chat also commands and the panel's words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen, Screen
from textual.selection import Selection
from textual.widgets import Input, Static

from ..actions import COMMANDS, Scope
from ..text.plain_text import one_line
from ..widgets.common.hanging_list import Hanging
from ..widgets.common.hints import Page, hints
from ..widgets.common.keys import closing, keys_in, keys_of
from ..widgets.panel.meanings import TERMS
from .chat.chat import ChatScreen

_NAME_WIDTH = 23
HelpSection = tuple[str, Iterable[tuple[str, str]]]
_COPYING = ("Ctrl+C", "Copy the selected text; without one, stop the answer; twice, quit")


class SearchHelp(Input):
    """Takes letters; movement keys scroll the page below it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.scroll(-1)", show=False),
        Binding("down", "screen.scroll(1)", show=False),
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        Binding("home", "screen.end(-1)", show=False),
        Binding("end", "screen.end(1)", show=False),
    ]


class HelpEntry(Static):
    """A name and its meaning. One widget: three for each of a hundred entries would open half a second later."""

    def __init__(self, name: str, text: str) -> None:
        self._entry = Hanging(Content.styled(f"{name:<{_NAME_WIDTH}}", "$primary"), Content(text))
        super().__init__(self._entry)
        self.words = f"{name} {text}".lower()

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return selection.extract(self._entry.folded(self.size.width).plain), "\n"


class HelpScreen(ModalScreen[None]):
    """A page over the chat. Typing filters it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", show=False),
        closing("help"),
    ]

    def __init__(self, sections: Iterable[HelpSection]) -> None:
        """`sections`: by heading, names with their meanings."""
        super().__init__()
        self._sections = [
            (Static(heading, classes="heading"), [HelpEntry(*entry) for entry in entries])
            for heading, entries in sections
        ]
        self._field = SearchHelp(placeholder="Type to search keys, commands and words", compact=True, id="search")
        self._nothing = Static("", markup=False, classes="nothing")
        self._list = VerticalScroll(id="help", can_focus=False)

    def compose(self) -> ComposeResult:
        with Page(classes="page") as page:
            page.border_title = "Help"
            page.border_subtitle = hints("PageUp, PageDown, Home, End scroll", "Esc closes")
            yield self._field
            with self._list:
                yield self._nothing
                for heading, entries in self._sections:
                    yield heading
                    yield from entries

    def on_mount(self) -> None:
        self._nothing.display = False
        self._field.focus()

    @on(Input.Changed)
    def _filter(self) -> None:
        """Show the entries that contain every word."""
        words = self._field.value.lower().split()
        found = False
        for heading, entries in self._sections:
            shown = [entry for entry in entries if _holds(entry, words)]
            for entry in entries:
                entry.display = entry in shown
            heading.display = bool(shown)
            found = found or bool(shown)
        self._nothing.update(f"Nothing found for “{one_line(self._field.value.strip())}”")
        self._nothing.display = not found
        self._list.scroll_home(animate=False)

    def action_close(self) -> None:
        """Clear the search; if it is clear, close the page."""
        if self._field.value:
            self._field.value = ""
        else:
            self.dismiss()

    def action_scroll(self, lines: int) -> None:
        """Scroll by lines."""
        self._list.scroll_relative(y=lines, animate=False)

    def action_page(self, pages: int) -> None:
        """Scroll by pages."""
        self._list.scroll_relative(y=pages * max(1, self._list.size.height - 1), animate=False)

    def action_end(self, direction: int) -> None:
        """Go to the first line (-1) or the last (1)."""
        if direction < 0:
            self._list.scroll_home(animate=False)
        else:
            self._list.scroll_end(animate=False)


def _holds(entry: HelpEntry, words: Sequence[str]) -> bool:
    return all(word in entry.words for word in words)


def help_of(page: Screen[Any], given: Mapping[str, str]) -> Iterable[HelpSection]:
    """The help sections of `page`, with the keys that the user has `given` to actions."""
    if not isinstance(page, ChatScreen):
        yield page.TITLE or "This page", keys_of(page.BINDINGS, given)
        yield "Everywhere", [*keys_in(Scope.ANYWHERE, given), _COPYING]
        return
    keys = [*keys_in(Scope.CHAT, given), *keys_in(Scope.ANYWHERE, given), _COPYING]
    # In the screen's order, top to bottom: function keys, the messages, the text field, the panel.
    yield "Function keys", sorted((entry for entry in keys if _is_function_key(entry[0])), key=_number)
    yield "Chat", [entry for entry in keys if not _is_function_key(entry[0])]
    yield "Messages (while one is selected)", keys_in(Scope.MESSAGES, given)
    yield "Text field", keys_in(Scope.FIELD, given)
    yield "Panel (while it has the focus)", keys_in(Scope.PANEL, given)
    yield "Commands", [(action.usage, action.does) for action in COMMANDS]
    yield "The panel's words", TERMS


def _is_function_key(name: str) -> bool:
    return name.startswith("F") and name.split()[0][1:].isdecimal()


def _number(entry: tuple[str, str]) -> int:
    return int(entry[0].split()[0][1:])
