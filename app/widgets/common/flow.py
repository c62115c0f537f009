"""A layout that puts widgets side by side, and wraps to the next row."""

from __future__ import annotations

from textual.geometry import Offset, Region, Size
from textual.layout import Layout, WidgetPlacement
from textual.widget import Widget


class Flow(Layout):
    """For widgets of one row, as wide as their content; only the left margin counts."""

    name = "flow"

    def arrange(self, parent: Widget, children: list[Widget], size: Size, greedy: bool = True) -> list[WidgetPlacement]:
        parent.pre_layout(self)
        placements: list[WidgetPlacement] = []
        x = y = 0
        for child in children:
            margin = child.styles.margin
            width = child.get_content_width(size, parent.app.viewport_size) + child.gutter.width
            if x and x + margin.left + width > size.width:
                x, y = 0, y + 1
            x += margin.left
            placements.append(WidgetPlacement(Region(x, y, width, 1), Offset(), margin, child))
            x += width
        return placements
