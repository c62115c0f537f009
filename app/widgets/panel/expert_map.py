"""How decode's expert calls spread over layers and experts, as a map of small coloured cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.color import Color
from textual.content import Content
from textual.style import Style

from ...text.units import share
from .drawing import Drawing
from .figures import PanelFigures, heading
from .meanings import MEANINGS

_MOST_ROWS = 8
_MOST_CELL_WIDTH = 4
_SHADES = 16  # finer steps are invisible, and painting each change takes time from the engine


class ExpertMap(Drawing):
    """Layers from left to right, experts downwards, two to a line; the brighter, the more calls."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"expert-map--least", "expert-map--most"}

    def __init__(self) -> None:
        super().__init__(self._map, "experts", MEANINGS["experts"])

    def _map(self, figures: PanelFigures, width: int) -> Content:
        use = figures.stats.expert_use if figures.stats else ()
        if not use or not use[0]:
            return heading("Experts", width, "calls not measured yet")
        most = max(max(layer) for layer in use)
        if len(use) > width or len(use[0]) > 2 * _MOST_ROWS:
            return heading("Experts", width, f"busiest {share(most)} of its layer")
        cells = self._cells(use, most, width)
        return Content("\n").join([heading("Experts", width, f"busiest {share(most)}"), *cells])

    def _cells(self, use: Sequence[Sequence[float]], most: float, width: int) -> list[Content]:
        least_style = self.get_component_styles("expert-map--least")
        most_style = self.get_component_styles("expert-map--most")
        least, brightest = least_style.color, most_style.color
        wide = max(1, min(_MOST_CELL_WIDTH, width // len(use)))

        def color(value: float) -> Color:
            return least.blend(brightest, round(value / most * _SHADES) / _SHADES if most > 0 else 0.0)

        lines: list[Content] = []
        for upper in range(0, len(use[0]), 2):
            cells: list[tuple[str, Style]] = []
            for layer in use:
                lower = color(layer[upper + 1]) if upper + 1 < len(layer) else None
                cells.append(("▀" * wide, Style(foreground=color(layer[upper]), background=lower)))
            lines.append(Content.assemble(*cells))
        return lines
