"""Expert use in decode, layer by layer, and how well each layer was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widget import Widget

from ...engine.events import LayerRows, Rows
from ..text.units import NOT_MEASURED, share
from ..widgets.common.hints import ScrollingPage, hint
from ..widgets.common.keys import closing
from ..widgets.common.themes import MUTED
from ..widgets.panel.figures import PanelFigures
from ..widgets.panel.heat import condense

_SHADES = " ░▒▓█"
_WIDEST_CELL = 6
_COLUMNS = ("active", "recall", "precision", "recall", "precision")  # of neurons the first three, of experts the others
_SHORT = ("active", "recall", "prec.", "recall", "prec.")
_WIDE = 76  # cells from which columns have their full names
_PREDICTED = (
    "Recall: the share of active neurons, or of called experts, that were predicted one layer ahead. "
    "Precision: the share of predictions that were right. —: nothing was predicted yet."
)
_IN_PLACE = "The whole model fits the device, so nothing is prefetched."
_SPLIT = (
    "No layer shares a pool: each is whole on the GPU or computed by the CPU, and no row is predicted, copied or "
    "evicted. F4 or /mix pool makes a pool."
)
_ROWS = ("in pool", "hits", "late", "copied", "on CPU", "guessed")
_OF_ROWS = (
    "In pool: the share of the layer's rows that are in the pool now. Hits, late, copied, on CPU: where the rows of "
    "active neurons were; late ones were fetched ahead and still on their way. Guessed: the recall of neurons."
)
_EVICTED = (
    "{} rows left the pool for others in this answer: those worth least, by how highly the router rates their expert, "
    "how often it uses them, and how soon their layer's turn comes. No setting changes that rule."
)


class HeatMap(Widget):
    """A line for each layer: its experts, shaded by calls (neighbours are averaged if there are more than columns);
    then its active neurons, and how well neurons and experts were predicted.
    """

    def __init__(self, figures: PanelFigures) -> None:
        super().__init__()
        self._figures = figures

    def on_mount(self) -> None:
        self._figures.watchers.append(self._show)

    def on_unmount(self) -> None:
        self._figures.watchers.remove(self._show)

    def _show(self) -> None:
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._draw(width).get_height({}, width)

    def render(self) -> Content:
        return self._draw(self.content_size.width)

    def _draw(self, width: int) -> Content:
        stats = self._figures.stats
        use = stats.expert_use if stats else ()
        if stats is None or not use or not use[0]:
            return Content.styled("Not measured yet. Experts are counted while an answer is written.", MUTED)
        rows = None if stats.rows is None or stats.rows.static else stats.rows
        places = [_where(layer) for layer in stats.rows.layers] if stats.rows is not None and rows is None else []
        names = (_COLUMNS if width >= _WIDE else _SHORT)[: 1 if rows is None else None]
        names = (*names, "where") if places else names
        column = 2 + max(len(name) for name in names)
        room = max(1, width - 5 - column * len(names))
        cell = max(1, min(_WIDEST_CELL, room // len(use[0])))
        wide = min(room, cell * len(use[0]))
        most = max(max(layer) for layer in use) or 1.0
        experts = f"{len(use[0])} experts, busiest {share(most)}"[:wide]
        titles = f"{'':5}{experts:<{wide}}"
        lines: list[Content] = []
        if rows is not None:
            lines.append(Content.styled(f"{titles}{'neurons':>{3 * column}}{'experts':>{2 * column}}", MUTED))
            titles = " " * (5 + wide)
        lines.append(Content.styled(titles + "".join(f"{name:>{column}}" for name in names), MUTED))
        for number, layer in enumerate(use):
            cells = [
                (_shade(value / most) * cell, f"$primary {30 + round(70 * value / most)}%")
                for value in condense(layer, room)
            ]
            figures = [_at(stats.layer_activity, number)]
            if rows is not None:
                by_layer = (rows.recalls, rows.precisions, rows.expert_recalls, rows.expert_precisions)
                figures += [_at(values, number) for values in by_layer]
            where = f"{places[number]:>{column}}" if places else ""
            lines.append(Content.assemble((f"{number + 1:>3}  ", MUTED), *cells, _columns(figures, column), where))
        if rows is not None:
            over_all = (stats.active_neurons, rows.recall, rows.precision, rows.expert_recall, rows.expert_precision)
            lines.append(Content.assemble((f"{'all':>3}  ", MUTED), " " * wide, _columns(over_all, column)))
        lines.append(Content.styled("\n" + (_SPLIT if places else _IN_PLACE if rows is None else _PREDICTED), MUTED))
        if rows is not None and rows.layers:
            lines += _of_pool(rows, width)
        return Content("\n").join(lines)


def _where(layer: LayerRows) -> str:
    """Where a layer that shares no pool is computed; NOT_MEASURED if it was not used yet."""
    return NOT_MEASURED if layer.ready is None else "GPU" if layer.ready else "CPU"


def _of_pool(rows: Rows, width: int) -> list[Content]:
    """A line for each layer: what the pool has of it, and where its rows were."""
    column = min(2 + max(map(len, _ROWS)), max(0, width - 5) // len(_ROWS))
    lines = [Content.styled(f"\n{'':5}" + "".join(f"{name:>{column}}" for name in _ROWS), MUTED)]
    for number, layer in enumerate(rows.layers):
        if layer.resident is None:
            words = {"GPU": "whole on the GPU", "CPU": "by the CPU"}.get(_where(layer), "not used yet")
            lines.append(Content.assemble((f"{number + 1:>3}  ", MUTED), Content.styled(f"   {words}", MUTED)))
            continue
        figures = (layer.resident, layer.ready, layer.coming, layer.copied, layer.on_cpu, _at(rows.recalls, number))
        lines.append(Content.assemble((f"{number + 1:>3}  ", MUTED), _columns(figures, column)))
    return [*lines, Content.styled(f"\n{_OF_ROWS}\n{_EVICTED.format(f'{rows.evicted:,}')}", MUTED)]


class ExpertsScreen(ModalScreen[None]):
    """A page above the chat, which continues behind it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", show=False),
        closing("experts"),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown,space", "scroll(10)", show=False),
    ]

    def __init__(self, figures: PanelFigures) -> None:
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
    """A denser character for a larger share of the maximum; a blank for zero."""
    return _SHADES[0] if value <= 0 else _SHADES[min(len(_SHADES) - 1, 1 + int(value * (len(_SHADES) - 1)))]


def _columns(values: Sequence[float | None], width: int) -> str:
    return "".join(f"{share(value):>{width}}" for value in values)


def _at(values: tuple[float | None, ...], index: int) -> float | None:
    return values[index] if index < len(values) else None
