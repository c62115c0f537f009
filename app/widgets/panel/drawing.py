"""One piece of the panel, drawn from the figures, with an explanation."""

from __future__ import annotations

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from ..common.themes import MUTED
from .figures import Draw, PanelFigures


class Drawing(Widget):
    """One piece of the panel; explains its words below itself while focused, and in a tooltip."""

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
        """Draw newer figures; `layout` if long lines may now fold differently."""
        self._figures = figures
        before, self._width = self._drawn, self.content_size.width
        if not self._width and not layout:
            self.refresh()  # it is hidden, and will be drawn when it is shown
            return
        self._drawn = self._content(self._width)
        if layout or not self._drawn.is_same(before):
            self.refresh(layout=layout or self._drawn.plain.count("\n") != before.plain.count("\n"))

    def height(self, figures: PanelFigures, width: int) -> int:
        """How many rows `figures` take, without an explanation; 0 if there is nothing to draw."""
        drawn = self._draw(figures, width)
        return drawn.get_height({}, width) if drawn else 0

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        # Drawn for the next layout's width: the present one is the last layout's.
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
