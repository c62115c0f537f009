"""Base widgets that keep layouts and repaints small, since the engine and the keys wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region, Size
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object  # Textual gives a widget the styles of its first base that is one


def size_of_content() -> Reactive[Size]:
    """For `virtual_size` of a widget that changes often.

    Textual's own lays the whole screen out a second time when the content's size has changed, in case scrollbars come
    or go. Those ask for a layout themselves, and each takes some 10 ms.
    """
    return Reactive(Size(0, 0))


class Ground(_Widget):
    """A container that shows only its background, and perhaps a border beside it: all its lines are the same.

    Textual asks each container below a change for all its lines, however little has changed.
    """

    virtual_size = size_of_content()

    def render_lines(self, crop: Region) -> list[Strip]:
        line = super().render_lines(Region(crop.x, crop.y, crop.width, min(1, crop.height)))
        return line * crop.height
