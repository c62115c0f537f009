"""Words that change on a screen that stays as it is."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


def show(where: Static, content: Content, room: int = 1) -> None:
    """Show other words; the screen is laid out again only if they take more or fewer lines than are there for them.

    `room`: lines come in so many at a time. What is not mounted yet is laid out with all that is new.
    """
    width, height = where.content_size
    wanted = rounded(content.get_height(where.styles.get_rules(), width), room) if width else 0
    where.update(content, layout=where.is_attached and wanted != height)


def rounded(lines: int, room: int) -> int:
    """`lines`, and as many blank ones as fill the last `room`."""
    return -(-lines // room) * room
