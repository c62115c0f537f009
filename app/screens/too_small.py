"""The notice for a terminal that is too small. The chat continues below it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Static

from ..widgets.common.keys import key_of

SMALLEST = Size(60, 20)


class TooSmallScreen(Screen[None]):
    """Says how large the terminal must be."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._first = size
        self._notice = Static()

    def compose(self) -> ComposeResult:
        yield self._notice

    def on_mount(self) -> None:
        self.show_size(self._first)

    def show_size(self, size: Size) -> None:
        """Name the terminal's new size."""
        words = (
            f"floe-chat needs at least {SMALLEST.width}x{SMALLEST.height}, "
            f"this terminal has {size.width}x{size.height}: enlarge it.\n"
            "\n"
            f"Your text is saved, and the answer continues. {key_of(self, 'quit')} quits."
        )
        self._notice.update(Content("\n".join(filter(None, (words, self.app.sub_title)))))
