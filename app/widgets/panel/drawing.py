"""One piece of the panel: drawn from the figures, and explained."""

from __future__ import annotations

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from ..common.themes import MUTED
from .figures import Draw, PanelFigures


class Drawing(Widget):
    """One piece of the panel; it explains its words, below itself with the focus, in a tooltip under the mouse."""

    def __init__(self, draw: Draw, name: str, meaning: str = "") -> None:
        super().__init__(id=name)
        self._draw = draw
        self._meaning = meaning
        self._figures = PanelFigures()
        self._drawn, self._width = Content(), 0
        self._explained = False
        self.tooltip = meaning or None

    @property
    def has_meaning(self) -> bool:
        """Whether there is something to explain, now."""
        return bool(self._meaning) and self.display

    def explain(self, *, on: bool) -> None:
        """Show the explanation, or hide it."""
        if self._explained != on:
            self._explained, self._width = on, 0
            self.set_class(on, "-explained")
            self.refresh(layout=True)

    def show(self, figures: PanelFigures, *, layout: bool = False) -> None:
        """Draw newer figures; `layout` where long lines may fold otherwise than before."""
        self._figures = figures
        before, self._width = self._drawn, self.content_size.width
        if not self._width and not layout:
            self.refresh()  # it is hidden, and drawn when it is shown again
            return
        self._drawn = self._content(self._width)
        if layout or not self._drawn.is_same(before):
            self.refresh(layout=layout or self._drawn.plain.count("\n") != before.plain.count("\n"))

    def height(self, figures: PanelFigures, width: int) -> int:
        """How many rows `figures` take, without an explanation; 0 if there is nothing to draw."""
        drawn = self._draw(figures, width)
        return drawn.get_height({}, width) if drawn else 0

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        # Drawn for the width to come: the present one is that of the last layout.
        return self._content(width).get_height({}, width)

    def render(self) -> Content:
        if self._width != self.content_size.width:
            self._width = self.content_size.width
            self._drawn = self._content(self._width)
        return self._drawn

    def notify_style_update(self) -> None:
        self._width = 0  # colours are drawn
        super().notify_style_update()

    def _content(self, width: int) -> Content:
        drawn = self._draw(self._figures, width)
        if not self._explained:
            return drawn
        return Content("\n").join([drawn, Content.styled(self._meaning, f"italic {MUTED}")])
