"""The live panel: a column on a wide terminal, two lines on a narrow one. It draws and computes nothing."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Digits

from . import figures as draw
from . import memory, units
from .composer import Composer
from .drawing import Drawing
from .expert_map import ExpertMap
from .figures import Figures
from .meanings import MEANINGS


class PerformancePanel(VerticalScroll):
    """Speed, rows and link, neurons, experts, memory and backend in a column.

    Tab leads to it: then Up and Down go from section to section, and each explains its words.
    """

    FOCUS_ON_CLICK: ClassVar[bool] = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "explain(-1)", "what the section above means", show=False),
        Binding("down,j", "explain(1)", "what the section below means", show=False),
        Binding("enter", "screen.order('experts')", "experts, layer by layer", show=False),
        Binding("space", "screen.pause_panel", "hold the figures, or let them go on", show=False),
        Binding("escape", "screen.focus_text", "back to your text", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield Drawing(draw.speed_heading, "speed-heading")
        with Horizontal(id="speed-big"):
            yield Digits(units.NOT_MEASURED)
            yield Drawing(draw.speed_beside, "speed-beside")
        yield Drawing(draw.speed_lines, "speed-lines")
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
        """Who read here goes on writing: without the focus, keys would go nowhere."""
        if self.has_focus:
            self.screen.query_one(Composer).focus()

    def show(self, figures: Figures) -> None:
        """Draw newer figures."""
        tps = figures.stats.decode_tps if figures.stats else None
        self.set_class(figures.stats is not None, "-counted")
        self.set_class(figures.rows is not None, "-offloads")
        self.query_one(Digits).update("-" if tps is None else units.rate(tps))
        for drawing in self.query(Drawing):
            drawing.show(figures)

    def show_backend(self, figures: Figures) -> None:
        """Draw what is known of the loaded model, which may take more lines than before."""
        self.query_one("#backend", Drawing).show(figures, layout=True)
        self.query_one("#memory", Drawing).show(figures)


class PanelStrip(Drawing):
    """The panel's most wanted figures in two lines."""

    def __init__(self) -> None:
        super().__init__(draw.strip, "panel-strip")
