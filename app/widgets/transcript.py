"""The scrolling column of turns."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.widget import Widget

from .blocks import Welcome


class Transcript(VerticalScroll, can_focus=False):
    """Follows its end for as long as the person has not scrolled away from it."""

    def on_mount(self) -> None:
        self.anchor()
        self.mount(Welcome())

    async def add(self, block: Widget) -> None:
        """Append a block; the welcome makes room for the first one."""
        await self.query(Welcome).remove()
        await self.mount(block)

    async def begin_anew(self) -> None:
        """Remove everything and welcome again."""
        await self.remove_children()
        await self.mount(Welcome())
        self.anchor()

    def scroll_pages(self, pages: int) -> None:
        """Scroll up (-1) or down (1) by a page."""
        if self.max_scroll_y > 0:
            self.scroll_relative(y=pages * max(1, self.size.height - 2), animate=False)
