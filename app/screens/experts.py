"""Where decode's expert calls went, layer by layer, and how well each layer was foreseen."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widget import Widget

from ..widgets.figures import Figures
from ..widgets.hints import ScrollingPage, hint
from ..widgets.themes import MUTED
from ..widgets.units import share

_PERIOD = 0.5
_SHADES = " ░▒▓█"
_WIDEST_CELL = 6
_COLUMNS = ("active", "recall", "precision")
_COLUMN = 11


class HeatMap(Widget):
    """A line for each layer: its experts, the more calls the fuller; then its active neurons and its foresight."""

    def __init__(self, figures: Figures) -> None:
        super().__init__()
        self._figures = figures

    def on_mount(self) -> None:
        self.set_interval(_PERIOD, lambda: self.refresh(layout=True))

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._draw(width).get_height({}, width)

    def render(self) -> Content:
        return self._draw(self.content_size.width)

    def _draw(self, width: int) -> Content:
        stats = self._figures.stats
        use = stats.expert_use if stats else ()
        if stats is None or not use or not use[0]:
            return Content.styled("Not measured yet: experts are counted while an answer is written.", MUTED)
        foreseen = stats.rows is not None
        columns = _COLUMNS if foreseen else _COLUMNS[:1]
        room = max(1, width - 5 - _COLUMN * len(columns))
        cell = max(1, min(_WIDEST_CELL, room // len(use[0])))
        most = max(max(layer) for layer in use) or 1.0
        head = "".join(f"{name:>{_COLUMN}}" for name in columns)
        experts = f"{len(use[0])} experts, fullest {share(most)}"[: cell * len(use[0])]
        lines = [Content.styled(f"{'':5}{experts:<{cell * len(use[0])}}{head}", MUTED)]
        for number, layer in enumerate(use):
            cells = [(_shade(value / most) * cell, f"$primary {30 + round(70 * value / most)}%") for value in layer]
            figures = [_at(stats.layer_activity, number)]
            if stats.rows is not None:
                figures += [_at(stats.rows.recalls, number), _at(stats.rows.precisions, number)]
            words = "".join(f"{share(value):>{_COLUMN}}" for value in figures)
            lines.append(Content.assemble((f"{number:>3}  ", MUTED), *cells, words))
        if not foreseen:
            words = "\nAll rows lie where they are computed: nothing has to be foreseen."
            lines.append(Content.styled(words, MUTED))
        return Content("\n").join(lines)


class ExpertsScreen(ModalScreen[None]):
    """Lies over the chat, which goes on under it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f9", "dismiss", "Close", show=False),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown,space", "scroll(10)", show=False),
    ]

    def __init__(self, figures: Figures) -> None:
        super().__init__()
        self._figures = figures

    def compose(self) -> ComposeResult:
        with ScrollingPage(classes="page") as page:
            page.can_focus = False
            page.border_title = "Experts by layer"
            page.border_subtitle = hint("Esc closes")
            yield HeatMap(self._figures)

    def action_scroll(self, lines: int) -> None:
        """Move the page by some lines."""
        self.query_one(".page").scroll_relative(y=lines, animate=False)


def _shade(value: float) -> str:
    """A fuller character for a larger part of the most; none for none."""
    return _SHADES[0] if value <= 0 else _SHADES[min(len(_SHADES) - 1, 1 + int(value * (len(_SHADES) - 1)))]


def _at(values: tuple[float | None, ...], index: int) -> float | None:
    return values[index] if index < len(values) else None
