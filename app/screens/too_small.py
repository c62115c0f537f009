"""The notice for a terminal with too little room. The text and the answer live on under it."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.widgets import Static

SMALLEST = Size(60, 20)


class TooSmallScreen(Screen[None]):
    """Says how large the terminal must be."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self._notice = Static(_words(size))

    def compose(self) -> ComposeResult:
        yield self._notice

    def show_size(self, size: Size) -> None:
        """Name the terminal's new size."""
        self._notice.update(_words(size))


def _words(size: Size) -> Content:
    return Content(
        f"floe-chat needs at least {SMALLEST.width}x{SMALLEST.height}, "
        f"this terminal is {size.width}x{size.height}: enlarge it.\n"
        "\n"
        "Your text and the answer are kept. Ctrl+Q quits."
    )
