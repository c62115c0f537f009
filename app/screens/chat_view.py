"""The chat screen's layout: transcript, composer, live panel and status line, and what they show of the model."""

from __future__ import annotations

from typing import ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.widgets import Markdown

from ...engine.events import Loaded, Stats
from ..widgets.composer import Composer
from ..widgets.figures import Figures
from ..widgets.panel import PanelStrip, PerformancePanel
from ..widgets.plain import printable
from ..widgets.status_line import StatusLine
from ..widgets.transcript import Transcript

# Figures arrive about five times a second; nobody reads them that fast, and painting takes time from the engine.
_PANEL_PERIOD = 0.35


class ChatView(Screen[None]):
    """A column for the panel from 100 columns on, else two lines; a big figure and the expert map from 36 rows on."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("f2", "toggle_panel", "Panel", show=False)]

    def __init__(self) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self.VERTICAL_BREAKPOINTS = [(0, "-short"), (36, "-tall")]
        self._figures = Figures()
        self._unpainted = False
        self._transcript = Transcript()
        self._composer = Composer()
        self._panel = PerformancePanel()
        self._strip = PanelStrip()
        self._status = StatusLine()

    def compose(self) -> ComposeResult:
        yield self._strip
        with Horizontal():
            with Vertical(id="chat"):
                yield self._transcript
                yield self._composer
            yield self._panel
        yield self._status

    def on_mount(self) -> None:
        self._composer.focus()
        self.set_interval(_PANEL_PERIOD, self._paint_figures)

    def action_toggle_panel(self) -> None:
        self.toggle_class("-no-panel")

    def action_scroll_transcript(self, pages: int) -> None:
        self._transcript.scroll_pages(pages)

    @on(Markdown.LinkClicked)
    def _copy_link(self, event: Markdown.LinkClicked) -> None:
        href = printable(event.href)
        self.app.copy_to_clipboard(href)
        self._status.remark(f"Copied {href}")

    def _show_loaded(self, loaded: Loaded) -> None:
        self._figures.loaded = loaded
        self._status.model, self._status.preset = loaded.model, loaded.preset
        self._status.context_window = loaded.context_window
        self._panel.show_backend(self._figures)
        self._strip.show(self._figures)

    def _show_figures(self, stats: Stats, *, running: bool) -> None:
        self._figures.take(stats, running=running)
        self._status.context_window = stats.context_window
        self._unpainted = True

    def _paint_figures(self) -> None:
        if self._unpainted:
            self._unpainted = False
            self._panel.show(self._figures)
            self._strip.show(self._figures)

    def _say(self, words: str, tone: str) -> None:
        self._status.state, self._status.tone = words, tone
