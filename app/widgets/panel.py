"""The live panel: a column on a wide terminal, two lines on a narrow one. It draws and computes nothing."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Digits

from . import figures as draw
from . import memory, units
from .expert_map import ExpertMap
from .figures import Draw, Figures


class Drawing(Widget):
    """One piece of the panel."""

    def __init__(self, draw: Draw, name: str) -> None:
        super().__init__(id=name)
        self._draw = draw
        self._figures = Figures()
        self._drawn = ""

    def show(self, figures: Figures, *, layout: bool = False) -> None:
        """Draw newer figures; `layout` where long lines may fold otherwise than before."""
        self._figures = figures
        drawn = self._draw(figures, self.content_size.width).plain
        if layout or drawn != self._drawn:
            layout = layout or drawn.count("\n") != self._drawn.count("\n")
            self._drawn = drawn
            self.refresh(layout=layout)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        # Drawn for the width to come: the present one is that of the last layout.
        return self._draw(self._figures, width).get_height({}, width)

    def render(self) -> Content:
        return self._draw(self._figures, self.content_size.width)


class PerformancePanel(VerticalScroll):
    """Speed, rows and link, neurons, experts, memory and backend in a column. Tab leads to it, arrows scroll it."""

    FOCUS_ON_CLICK: ClassVar[bool] = False

    def compose(self) -> ComposeResult:
        yield Drawing(draw.speed_heading, "speed-heading")
        with Horizontal(id="speed-big"):
            yield Digits(units.NOT_MEASURED)
            yield Drawing(draw.speed_beside, "speed-beside")
        yield Drawing(draw.speed_lines, "speed-lines")
        yield Drawing(draw.speed_course, "speed-course")
        yield Drawing(memory.origins, "origins")
        yield Drawing(memory.link, "link")
        yield Drawing(draw.neurons, "neurons")
        yield ExpertMap()
        yield Drawing(memory.memory, "memory")
        yield Drawing(draw.backend, "backend")

    def on_hide(self) -> None:
        """Who scrolled here goes on writing: without the focus, keys would go nowhere."""
        if self.has_focus:
            self.screen.focus_next()

    def show(self, figures: Figures) -> None:
        """Draw newer figures."""
        tps = figures.stats.decode_tps if figures.stats else None
        self.set_class(figures.rows is not None, "-offloads")
        self.query_one(Digits).update("-" if tps is None else units.rate(tps))
        for drawing in self.query(Drawing):
            drawing.show(figures)
        self.query_one(ExpertMap).show(figures)

    def show_backend(self, figures: Figures) -> None:
        """Draw what is known of the loaded model, which may take more lines than before."""
        self.query_one("#backend", Drawing).show(figures, layout=True)
        self.query_one("#memory", Drawing).show(figures)


class PanelStrip(Drawing):
    """The panel's most wanted figures in two lines."""

    def __init__(self) -> None:
        super().__init__(draw.strip, "panel-strip")
