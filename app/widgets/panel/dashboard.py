"""The live panel, its two-line form, and the bottom row: all that the chat shows of the engine."""

from __future__ import annotations

from asyncio import TimerHandle
from collections.abc import Mapping
from typing import Any

from textual.screen import Screen

from ....engine.events import Loaded, Stats
from ...background import later
from ...text.plain_text import printable
from ..common.keys import key_of
from .figures import PanelFigures
from .panel import PanelStrip, PerformancePanel
from .status_line import StatusLine

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
