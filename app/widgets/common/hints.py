"""Clickable key hints: a click does what the key does."""

from __future__ import annotations

import re
from collections.abc import Sequence

from textual import events
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Static

BETWEEN = " · "
_KEY = re.compile(r"((?:(?:Ctrl|Alt|Shift)\+)*(?:F\d+|Enter|Esc|Space|Tab|Home|End|PageUp|PageDown|[A-Z]))(?= )")


def link(action: str) -> Style:
    """The style of words that do `action` on a click."""
    return Style.from_meta({"@click": action})


def hint(words: str) -> Content:
    """A hint such as "Esc back" or "N or Esc cancels", for a `Pressing` widget: a click presses the key that it begins
    with, if any.
    """
    found = _KEY.match(words)
    if found is None:
        return Content(words)
    key = found[1].lower().replace("esc", "escape")
    return Content.styled(words, link(f"press('{key}')"))


def hints(*said: str, between: str = BETWEEN) -> Content:
    """Several of them in one line, for the border of a `Page`."""
    return Content(between).join([hint(words) for words in said])


class Pressing(Widget):
    """Presses the keys of hints."""

    def action_press(self, key: str) -> None:
        """As if `key` was pressed."""
        # In the program's own loop: Textual lets no message bubble above its sender.
        self.app.call_later(self.app.simulate_key, key)


class Page(Pressing, Vertical):
    """Has hints in its border."""


class ScrollingPage(VerticalScroll, Pressing):
    """Likewise; the order of the bases matters: Textual takes styles, and so the scrolling, only from the first."""


class Hints(Pressing, Static):
    """The bottom row of a page; takes several rows if needed, broken only between hints."""

    DEFAULT_CSS = """
    Hints {
        link-style: none;
        link-color: $foreground 70%;
        link-background: transparent;
        link-style-hover: underline;
        link-color-hover: $primary;
        link-background-hover: transparent;
    }
    """

    def __init__(self) -> None:
        super().__init__("", markup=False, id="keys")
        self._hints: tuple[str, ...] = ()

    def show(self, said: Sequence[str]) -> None:
        """Show these hints, leaving out empty ones."""
        kept = tuple(words for words in said if words)
        if kept != self._hints:
            self._hints = kept
            self._lay_out()

    def on_resize(self, _event: events.Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        self.update(Content("\n").join([hints(*row) for row in rows(self._hints, self.content_size.width)]))


def rows(said: Sequence[str], width: int) -> list[list[str]]:
    """Hints in rows of at most `width` characters."""
    made: list[list[str]] = []
    for words in said:
        if made and len(BETWEEN.join([*made[-1], words])) <= width:
            made[-1].append(words)
        else:
            made.append([words])
    return made
