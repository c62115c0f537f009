"""Words that change on a screen that stays as it is: what Textual does more than it has to, the engine waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.content import Content
from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object  # Textual gives a widget the styles of its first base that is one


def show(where: Static, content: Content) -> None:
    """Show other words; the screen is laid out again only if they take more or fewer lines than are there for them.

    What is not mounted yet is laid out with all that is new.
    """
    width, height = where.content_size
    wanted = content.get_height(where.styles.get_rules(), width) if width else 0
    where.update(content, layout=where.is_attached and wanted != height)


def size_of_content() -> Reactive[Size]:
    """For `virtual_size` of a widget that changes often.

    Textual's own lays the whole screen out a second time when the content's size has changed, in case scrollbars come
    or go. Those ask for a layout themselves, and each takes some 10 ms.
    """
    return Reactive(Size(0, 0))


class Ground(_Widget):
    """A container of which only the background is seen, and perhaps a border beside it: all its lines are the same.

    Textual asks each container below a change for all its lines, however little has changed.
    """

    virtual_size = size_of_content()

    def render_lines(self, crop: Region) -> list[Strip]:
        line = super().render_lines(Region(crop.x, crop.y, crop.width, min(1, crop.height)))
        return line * crop.height
