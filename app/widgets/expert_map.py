"""How decode's expert calls spread over layers and experts, as a map of small coloured cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.color import Color
from textual.content import Content
from textual.style import Style
from textual.widget import Widget

from .figures import Figures, heading
from .units import share

_MOST_ROWS = 8
_MOST_CELL_WIDTH = 4


class ExpertMap(Widget):
    """Layers from left to right, experts downwards, two to a line; the stronger, the more calls."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"expert-map--least", "expert-map--most"}

    def __init__(self) -> None:
        super().__init__()
        self._figures = Figures()
        self._height = 0

    def show(self, figures: Figures) -> None:
        """Draw newer figures."""
        self._figures = figures
        use = figures.stats.expert_use if figures.stats else ()
        height = 1 + ((len(use[0]) + 1) // 2 if use and self._fits(use) else 0)
        if height != self._height:
            self._height = height
            self.styles.height = height
        self.refresh()

    def render(self) -> Content:
        width = self.content_size.width
        stats = self._figures.stats
        if stats is None or not stats.expert_use or not stats.expert_use[0]:
            return heading("Experts", width, "calls not measured yet")
        use = stats.expert_use
        most = max(max(layer) for layer in use)
        if not self._fits(use):
            return heading("Experts", width, f"busiest {share(most)} of its layer")
        return Content("\n").join([heading("Experts", width, f"busiest {share(most)}"), *self._cells(use, most)])

    def _fits(self, use: Sequence[Sequence[float]]) -> bool:
        return len(use) <= self.content_size.width and len(use[0]) <= 2 * _MOST_ROWS

    def _cells(self, use: Sequence[Sequence[float]], most: float) -> list[Content]:
        least_style = self.get_component_styles("expert-map--least")
        most_style = self.get_component_styles("expert-map--most")
        least, brightest = least_style.color, most_style.color
        wide = max(1, min(_MOST_CELL_WIDTH, self.content_size.width // len(use)))

        def color(value: float) -> Color:
            return least.blend(brightest, value / most if most > 0 else 0.0)

        lines: list[Content] = []
        for upper in range(0, len(use[0]), 2):
            cells: list[tuple[str, Style]] = []
            for layer in use:
                lower = color(layer[upper + 1]) if upper + 1 < len(layer) else None
                cells.append(("▀" * wide, Style(foreground=color(layer[upper]), background=lower)))
            lines.append(Content.assemble(*cells))
        return lines
