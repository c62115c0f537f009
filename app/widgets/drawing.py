"""One piece of the panel: drawn from the figures, and explained."""

from __future__ import annotations

from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from .figures import Draw, Figures
from .themes import MUTED


class Drawing(Widget):
    """One piece of the panel; it says what its words mean, under itself with the focus, beside it under the mouse."""

    def __init__(self, draw: Draw, name: str, meaning: str = "") -> None:
        super().__init__(id=name)
        self._draw = draw
        self._meaning = meaning
        self._figures = Figures()
        self._drawn = Content()
        self._explained = False
        self.tooltip = meaning or None

    @property
    def has_meaning(self) -> bool:
        """Whether there is something to explain, now."""
        return bool(self._meaning) and self.display

    def explain(self, *, on: bool) -> None:
        """Say what the words mean, or no longer."""
        if self._explained != on:
            self._explained = on
            self.set_class(on, "-explained")
            self.refresh(layout=True)

    def show(self, figures: Figures, *, layout: bool = False) -> None:
        """Draw newer figures; `layout` where long lines may fold otherwise than before."""
        self._figures = figures
        drawn, before = self._content(self.content_size.width), self._drawn
        if layout or not drawn.is_same(before):
            self._drawn = drawn
            self.refresh(layout=layout or drawn.plain.count("\n") != before.plain.count("\n"))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        # Drawn for the width to come: the present one is that of the last layout.
        return self._content(width).get_height({}, width)

    def render(self) -> Content:
        return self._content(self.content_size.width)

    def _content(self, width: int) -> Content:
        drawn = self._draw(self._figures, width)
        if not self._explained:
            return drawn
        return Content("\n").join([drawn, Content.styled(self._meaning, f"italic {MUTED}")])
