"""The live panel: a column on a wide terminal, two lines on a narrow one. It draws and computes nothing."""

from __future__ import annotations

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Digits

from ...actions import Place
from ...text import units
from ..chat.composer import Composer
from ..common.keys import bindings
from ..common.stable_text import Ground
from . import figures as draw
from . import memory
from .drawing import Drawing
from .expert_map import ExpertMap
from .figures import PanelFigures
from .meanings import MEANINGS

_LEVELS = ("-full", "-mapless", "-close", "-dense")
"""What is left out if rows are lacking: nothing; the map of experts; also blank lines; also figures by layer."""
_SECTIONS = ("speed-course", "origins", "link", "neurons", "experts", "memory", "backend")
_NOT_REMOTE = ("neurons", "experts", "memory")
"""What a server does not say."""
_SPEED_ROWS = 4  # the heading and the big figure
_PADDING = 1


class PerformancePanel(Ground, VerticalScroll):
    """Speed, rows and link, neurons, experts, memory and backend in a column.

    Tab moves the focus to it; then Up and Down move between sections, and each explains its words.
    """

    FOCUS_ON_CLICK: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = bindings(Place.PANEL)

    def __init__(self) -> None:
        super().__init__(classes=_LEVELS[0])
        self._figures = PanelFigures()

    def compose(self) -> ComposeResult:
        yield Drawing(draw.speed_heading, "speed-heading")
        with Horizontal(id="speed-big"):
            yield Digits(units.NOT_MEASURED)
            yield Drawing(draw.speed_beside, "speed-beside")
        yield Drawing(draw.speed_course, "speed-course", MEANINGS["speed"])
        yield Drawing(memory.origins, "origins", MEANINGS["origins"])
        yield Drawing(memory.link, "link", MEANINGS["link"])
        yield Drawing(draw.neurons, "neurons", MEANINGS["neurons"])
        yield ExpertMap()
        yield Drawing(memory.memory, "memory", MEANINGS["memory"])
        yield Drawing(draw.backend, "backend", MEANINGS["backend"])

    def on_focus(self) -> None:
        self.action_explain(0)

    def on_blur(self) -> None:
        for drawing in self.query(Drawing):
            drawing.explain(on=False)

    def action_explain(self, step: int) -> None:
        """Explain the section `step` further; 0: the one that was explained last, or the first."""
        known = [drawing for drawing in self.query(Drawing) if drawing.has_meaning]
        now = next((at for at, drawing in enumerate(known) if drawing.has_class("-explained")), -1 if step > 0 else 0)
        chosen = known[min(max(0, now + step), len(known) - 1)]
        for drawing in known:
            drawing.explain(on=drawing is chosen)
        self.call_after_refresh(self.scroll_to_widget, chosen, animate=False)

    def on_hide(self) -> None:
        """Give the focus to the text field: without it, keys would go nowhere."""
        if self.has_focus:
            self.screen.query_one(Composer).focus()

    def show(self, figures: PanelFigures) -> None:
        """Draw newer figures."""
        speed = draw.speed(figures)
        self._figures = figures
        self.set_class(figures.rows is not None, "-offloads")
        self.query_one(Digits).update("-" if speed is None else units.rate(speed).replace(",", ""))
        self._fit()
        for drawing in self.query(Drawing):
            drawing.show(figures)

    def on_resize(self, _event: events.Resize) -> None:
        self._fit()

    def _fit(self) -> None:
        """Leave out as much as needed to show all sections, the least important first."""
        width = self.scrollable_content_region.width - _PADDING
        if width <= 0:
            return
        self._figures.dense = False
        level = next((name for name in _LEVELS[:-1] if self._height(name, width) <= self.size.height), _LEVELS[-1])
        self._figures.dense = level == _LEVELS[-1]
        if not self.has_class(level):
            self.remove_class(*_LEVELS)
            self.add_class(level)
            for drawing in self.query(Drawing):
                drawing.show(self._figures, layout=True)

    def _height(self, level: str, width: int) -> int:
        """The rows of all sections at this level, without the explanation that one of them may show."""
        hidden = _NOT_REMOTE if self._figures.remote else ()
        sections = [one for one in self.query(Drawing) if one.id in _SECTIONS and one.id not in hidden]
        if level != _LEVELS[0]:
            sections = [drawing for drawing in sections if not isinstance(drawing, ExpertMap)]
        heights = [height for drawing in sections if (height := drawing.height(self._figures, width))]
        gaps = len(heights) - 1 if level in _LEVELS[:2] else 0
        return _SPEED_ROWS + sum(heights) + gaps

    def show_context(self, figures: PanelFigures) -> None:
        """Draw how much of the window the chat takes."""
        self.query_one("#memory", Drawing).show(figures)

    def show_backend(self, figures: PanelFigures) -> None:
        """Draw the loaded model, which may take more lines than before."""
        self._figures = figures
        self._fit()
        self.query_one("#backend", Drawing).show(figures, layout=True)
        self.query_one("#memory", Drawing).show(figures)
        self.query_one("#speed-beside", Drawing).show(figures)


class PanelStrip(Drawing):
    """The panel's most important figures in two lines."""

    def __init__(self) -> None:
        super().__init__(draw.strip, "panel-strip")
