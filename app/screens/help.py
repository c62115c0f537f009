"""The help page: every key, every command, and the panel's words, with a search."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from ..widgets.hints import Page, hints, key_name
from ..widgets.meanings import TERMS
from ..widgets.plain import one_line

Section = tuple[str, Iterable[tuple[str, str]]]


class SearchHelp(Input):
    """Takes letters; the keys that move scroll the page below it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "screen.scroll(-1)", show=False),
        Binding("down", "screen.scroll(1)", show=False),
        Binding("pageup", "screen.page(-1)", show=False),
        Binding("pagedown", "screen.page(1)", show=False),
        Binding("home", "screen.end(-1)", show=False),
        Binding("end", "screen.end(1)", show=False),
    ]


class Entry(Horizontal):
    """A name and its meaning."""

    def __init__(self, name: str, text: str) -> None:
        meaning = Static(text, classes="meaning", markup=False)
        super().__init__(Static(name, classes="name", markup=False), meaning, classes="row")
        self.words = f"{name} {text}".lower()


class HelpScreen(ModalScreen[None]):
    """A page over the chat. Typing filters it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "Close", show=False),
        Binding("f1", "dismiss", "Close", show=False, id="help"),
    ]

    def __init__(self, sections: Iterable[Section]) -> None:
        """`sections`: a heading each, and under it names with their meanings."""
        super().__init__()
        sections = (*sections, ("The panel's words", TERMS))
        self._sections = [
            (Static(heading, classes="heading"), [Entry(*entry) for entry in entries]) for heading, entries in sections
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
        """Show the entries that have every word."""
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


def _holds(entry: Entry, words: Sequence[str]) -> bool:
    return all(word in entry.words for word in words)


def keys_of(bindings: Iterable[BindingType], given: Mapping[str, str]) -> list[tuple[str, str]]:
    """What the keys of `bindings` do, with the keys that the person has `given` to actions instead."""
    entries: list[tuple[str, str]] = []
    for binding in bindings:
        if isinstance(binding, Binding) and binding.description:
            keys = given.get(binding.id or "", binding.key)
            entries.append((" · ".join(key_name(key) for key in keys.split(",")), binding.description))
    return entries
