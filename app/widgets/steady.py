"""Words that change on a screen that stays as it is."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static


def show(where: Static, content: Content) -> None:
    """Show other words; the screen is laid out again only if they take more or fewer lines than those before.

    What is not mounted yet is laid out with all that is new.
    """
    width, height = where.content_size
    steady = not where.is_attached or (width > 0 and content.get_height(where.styles.get_rules(), width) == height)
    where.update(content, layout=not steady)
