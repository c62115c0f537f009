"""The live panel, its two-line form, and the bottom row: all that the chat shows of the engine."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.color import Color
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import Screen
from textual.style import Style
from textual.widgets import Digits

from ....engine.events import CardRows, Loaded, Rows, Stats
from ...actions import Scope
from ...background import later
from ...text import units
from ...text.plain_text import printable
from ...text.units import share
from ..chat.composer import Composer
from ..common.keys import bindings, key_of
from ..common.stable_text import Ground
from ..common.themes import MUTED
from . import figures as draw
from .drawing import Drawing
from .figures import NO_GPU, PanelFigures, by_layer, gauge, heading, is_virtual, muted, row, vram_bytes, vram_words
from .heat import stack
from .meanings import MEANINGS
from .status_line import StatusLine

#
# The panel's memory sections: where the rows of active neurons came from, the link, and what is stored where.


_TONES = ("$success", "$primary", "$warning", "$accent")
_NARROWEST_PAIR = 32
_GAP = 2
LESS_EXACT = "answers vary"  # the meaning of left-out rows
A_POOL = "F4 or /mix pool makes a pool"


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a bar: its look, its size, and its words in the legend."""

    glyph: str
    style: str
    amount: float | None
    name: str
    value: str


def origins(figures: PanelFigures, width: int) -> Content:
    """Where the rows of decode's active neurons came from, and how well they were predicted; blank without a pool."""
    rows = figures.rows
    if rows is None:
        return Content("")
    if rows.static:
        return _split(figures, rows, width)
    shares = (rows.ready, rows.coming, rows.copied, rows.on_cpu)
    remark = "not measured yet" if rows.ready is None else f"hit rate {units.share(rows.hits)}"
    named = zip("█▓▒░", _TONES, shares, ("ready", "coming", "copied", "on CPU"), strict=True)
    parts = [_Part(glyph, tone, share, name, units.share(share)) for glyph, tone, share, name in named]
    predicted = rows.ready is None or rows.recall is not None
    if not predicted and not rows.coming:
        del parts[1]  # nothing is fetched ahead, so nothing comes
    if rows.in_place:
        parts.append(_Part("▞", _TONES[0], rows.in_place, "whole layers", units.share(rows.in_place)))
    if rows.left_out:
        parts.append(_Part("·", MUTED, rows.left_out, "left out", units.share(rows.left_out)))
        parts.append(_Part("!", "$warning", 0.0, LESS_EXACT, ""))
    lines = [
        heading("Rows", width, remark),
        _bar(parts, width),
        *_legend(parts, width),
        gauge(figures, "expert hit rate ", rows.expert_hits, width),
    ]
    if not predicted:
        lines.append(row(figures, "predictor", "not used", width))
    else:
        lines += [
            gauge(figures, "predictor recall", rows.recall, width),
            gauge(figures, "its precision   ", rows.precision, width),
        ]
        if not figures.dense:
            lines += by_layer(figures, "recall by layer", rows.recalls, width, top=1.0)
    for label, of in (("experts substituted", rows.substituted), ("experts halved", rows.dropped)):
        if of and not figures.dense:
            lines.append(row(figures, label, share(of), width))
    return Content("\n").join(lines)


def _split(figures: PanelFigures, rows: Rows, width: int) -> Content:
    """Where active neurons were computed if no layer shares a pool, and how to get one."""
    on_cpu = sum(layer.on_cpu is not None and layer.on_cpu > 0 for layer in rows.layers)
    known = rows.in_place is not None
    remark = f"{len(rows.layers) - on_cpu} of {len(rows.layers)} layers on GPU" if known else "not measured yet"
    parts = [
        _Part(glyph, tone, share, name, units.share(share))
        for glyph, tone, share, name in (
            ("█", _TONES[0], rows.in_place, "on GPU"),
            ("░", _TONES[3], rows.on_cpu, "on CPU"),
        )
    ]
    lines = [heading("Split", width, remark), _bar(parts, width), *_legend(parts, width)]
    if figures.loaded is not None and figures.loaded.pools is not None:
        lines.append(muted(A_POOL))
    return Content("\n").join(lines)


def link(figures: PanelFigures, width: int) -> Content:
    """The link in decode: bytes moved, speed, and time waited; blank without a pool."""
    rows = figures.rows
    if rows is None:
        return Content("")
    if rows.static:
        return Content("\n").join([heading("Link", width), muted("a split moves no rows")])
    rate, peak = rows.link_bytes_s, rows.link_peak
    lines = [
        heading("Link", width, virtual=is_virtual(figures)),
        row(figures, "moved per token", units.size(rows.moved_per_token), width),
        *_links(figures, rows.cards, width),
        row(figures, "wait per token", units.milliseconds(rows.waited_per_token), width),
        row(figures, "rate", f"{units.size_of(rate, peak)}/s", width),
    ]
    if not figures.dense:
        lines += [
            gauge(figures, "of its peak", None if rate is None or peak <= 0 else rate / peak, width),
            gauge(figures, "time in use", rows.link_busy, width),
            gauge(figures, "hidden     ", rows.link_hidden, width),
        ]
    return Content("\n").join(lines)


def memory(figures: PanelFigures, width: int) -> Content:
    """Memory in use; with a pool of rows, what the device's memory is used for, up to its budget."""
    stats, loaded, rows = figures.stats, figures.loaded, figures.rows
    held = None if stats is None else vram_bytes(stats)
    lines = [
        heading("Memory", width, NO_GPU if stats and held is None else ""),
        row(figures, "RAM, this process", units.size(stats and stats.ram_bytes), width),
        *([row(figures, "KV cache", units.size(stats and stats.kv_bytes), width)] if rows is None else []),
        gauge(figures, "context", _context(figures), width),
        *([] if stats is None or held is None else [row(figures, "VRAM", vram_words(stats), width)]),
    ]
    if rows is None or stats is None:
        if stats and stats.vram_budget and held is not None:
            lines.append(gauge(figures, "of its budget", held / stats.vram_budget, width))
        lines.append(row(figures, "resident weights", units.size(loaded and loaded.memory_bytes), width))
        return Content("\n").join(lines)
    dense = _Part("█", _TONES[0], rows.dense, "dense", units.size(rows.dense))
    up = _Part("▓", _TONES[1], rows.up, "up", units.size(rows.up))
    whole = _Part("▞", _TONES[0], rows.whole, "whole layers", units.size(rows.whole))
    kept = _Part("▚", _TONES[3], stats.kv_bytes or 0, "KV cache", units.size(stats.kv_bytes))
    used = _Part("▒", _TONES[2], rows.pool_used, "pool", "")
    free = _Part("░", MUTED, rows.pool - rows.pool_used, "", "")
    named = rows.dense + rows.up + rows.whole + (stats.kv_bytes or 0) + rows.pool
    left = max(0, (stats.vram_budget or named) - named)
    rest = _Part("·", MUTED, left, "rest of the budget", units.size(left))
    pool = Content.assemble((used.glyph, used.style), (free.glyph, free.style), (" pool, used", MUTED))
    value = units.size_of(rows.pool_used, rows.pool)
    gap = max(1, width - pool.cell_length - len(value))
    lines += [_bar([dense, up, whole, kept, used, free, rest], width), *_legend([dense, up], width)]
    lines += [_entry(part, width) for part in (whole, kept) if part is kept or rows.whole]
    if not rows.static:
        lines.append(Content.assemble(pool, " " * gap, value))
    lines += [_card(figures, number, card, width) for number, card in enumerate(rows.cards, 1)]
    if left:
        lines.append(_entry(rest, width))
    return Content("\n").join(lines)


def _links(figures: PanelFigures, cards: Sequence[CardRows], width: int) -> list[Content]:
    """What the link of each of several cards moved."""
    if figures.dense:
        return []
    return [row(figures, f"by card {n}", units.size(card.moved_per_token), width) for n, card in enumerate(cards, 1)]


def _card(figures: PanelFigures, number: int, card: CardRows, width: int) -> Content:
    """What one of several cards holds, without keys and values."""
    held = units.size(card.dense + card.up + card.whole + card.pool)
    return row(figures, f"card {number}, weights", held, width)


def _context(figures: PanelFigures) -> float | None:
    """The share of the window that the chat on the screen takes, as the bottom row shows it too."""
    if figures.stats is None or not figures.stats.context_window:
        return None
    return (figures.context_used or 0) / figures.stats.context_window


def _bar(parts: Sequence[_Part], width: int) -> Content:
    cells = stack([part.amount or 0.0 for part in parts], width)
    if not any(cells):
        return muted("┄" * width)
    return Content.assemble(*((part.glyph * count, part.style) for part, count in zip(parts, cells, strict=True)))


def _legend(parts: Sequence[_Part], width: int) -> list[Content]:
    """Two parts to a line where there is room."""
    if width < _NARROWEST_PAIR:
        return [_entry(part, width) for part in parts]
    half = (width - _GAP) // 2
    lines: list[Content] = []
    for index in range(0, len(parts), 2):
        pair = [_entry(part, half) for part in parts[index : index + 2]]
        lines.append(Content(" " * _GAP).join(pair))
    return lines


def _entry(part: _Part, width: int) -> Content:
    gap = max(1, width - 2 - len(part.name) - len(part.value)) if part.value else 0
    return Content.assemble((f"{part.glyph} ", part.style), (part.name, MUTED), " " * gap, part.value)


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
    BINDINGS: ClassVar[list[BindingType]] = bindings(Scope.PANEL)

    def __init__(self) -> None:
        super().__init__(classes=_LEVELS[0])
        self._figures = PanelFigures()

    def compose(self) -> ComposeResult:
        yield Drawing(draw.speed_heading, "speed-heading")
        with Horizontal(id="speed-big"):
            yield Digits(units.NOT_MEASURED)
            yield Drawing(draw.speed_beside, "speed-beside")
        yield Drawing(draw.speed_course, "speed-course", MEANINGS["speed"])
        yield Drawing(origins, "origins", MEANINGS["origins"])
        yield Drawing(link, "link", MEANINGS["link"])
        yield Drawing(draw.neurons, "neurons", MEANINGS["neurons"])
        yield ExpertMap()
        yield Drawing(memory, "memory", MEANINGS["memory"])
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


# Figures arrive about five times a second: faster than anyone reads, and painting takes time from the engine. An
# answer's first and last figures are painted at once.
_PANEL_PERIOD = 1.0

_LAYOUTS = ("full", "compact", "hidden")


class Dashboard:
    """Shows figures on `screen`: the panel is a column from 100 columns on, else two lines.

    Attributes:
        figures: the latest ones. context_used: the tokens of the window that are shown next time.
    """

    def __init__(self, screen: Screen[Any]) -> None:
        self._screen = screen
        self._unpainted = False
        self._next_paint: TimerHandle | None = None
        self._layout = _LAYOUTS[0]
        self.figures = PanelFigures()
        self.context_used: int | None = None
        self.panel = PerformancePanel()
        self.strip = PanelStrip()
        self.status = StatusLine()

    # The panel

    def show_panel(self, layout: str) -> None:
        """Show the panel as one of `full`, `compact`, `hidden`; there is no column on a narrow terminal."""
        self._layout = layout
        for name in _LAYOUTS:
            self._screen.set_class(name == layout, f"-panel-{name}")

    def toggle_panel(self) -> None:
        """Column, two lines, hidden; on a narrow terminal two lines or hidden."""
        layouts = _LAYOUTS if self._screen.has_class("-wide") else _LAYOUTS[1:]
        now = layouts.index(self._layout) if self._layout in layouts else 0
        self.show_panel(layouts[(now + 1) % len(layouts)])

    def pause(self) -> None:
        """Pause the figures, or resume them."""
        if self.figures.paused:
            self.figures.resume()
            self.remark("The panel's figures are live again")
        else:
            self.figures.paused = True
            self.remark(f"The panel's figures are paused; {self.key('pause_panel')} resumes them")
        self._unpainted = True
        self._paint()

    # The bottom row

    def take_keys(self, keys: Mapping[str, str]) -> None:
        """Use these keys for the actions from now on."""
        self.status.keys = keys

    def key(self, action: str) -> str:
        """The key of an action as people write it."""
        return key_of(self._screen, action)

    def say(self, words: str, tone: str) -> None:
        """Show the state: a few words, with a dot in the style `tone`."""
        self.status.state, self.status.tone = words, tone

    def say_beside(self, words: str) -> None:
        """Show background work; "" for none."""
        self.status.background = printable(words)

    def remark(self, text: str) -> None:
        """Say something to the person for a few seconds."""
        self.status.remark(text)

    # Figures

    def show_remote(self, host: str) -> None:
        """Show that everything is sent to `host` from now on, or nothing (""), and no figures of another engine."""
        self._screen.app.sub_title = f"remote {host}" if host else ""  # on pages that hide the chat
        if host == self.figures.remote:
            return
        self.figures.turn_to(host)
        self.panel.set_class(bool(host), "-remote")
        self.status.remote, self.status.preset, self.status.context_window = host, "", None
        self._unpainted = True
        self._paint()

    def show_loaded(self, loaded: Loaded) -> None:
        """Show the model that answers."""
        self.figures.loaded = loaded
        self.status.model, self.status.preset = loaded.model, loaded.preset
        self.status.context_window = loaded.context_window
        self.panel.show_backend(self.figures)
        self.strip.show(self.figures)

    def show_preset(self, preset: str) -> None:
        """Show the quality in force."""
        self.status.preset = preset

    def show_stats(self, stats: Stats, *, running: bool) -> None:
        """Show newer figures; while an answer is `running`, not more often than they can be read."""
        before = self.figures.running
        self.figures.take(stats, running=running)
        self.status.context_window = stats.context_window
        self._unpainted = True
        if not running or self.figures.running != before:
            self._paint()
        elif self._next_paint is None:
            self._next_paint = later(self._screen, _PANEL_PERIOD, self._paint)

    def show_context(self, used: int | None) -> None:
        """Show at once how many tokens of the window are used; other figures come with `show_stats`."""
        self.context_used = self.status.context_used = self.figures.context_used = used
        self.panel.show_context(self.figures)

    def stop(self) -> None:
        """No answer runs any more, and no last figures come."""
        self.figures.running = False

    def _paint(self) -> None:
        if self._next_paint is not None:
            self._next_paint.cancel()
            self._next_paint = None
        if self._unpainted:
            self._unpainted = False
            self.figures.context_used = self.context_used
            self.panel.show(self.figures)
            self.strip.show(self.figures)
            self.status.context_used = self.context_used
            for watcher in self.figures.watchers:
                watcher()
