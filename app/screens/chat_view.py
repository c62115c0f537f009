"""The chat screen's layout: transcript, composer, live panel and status line, and what they show of the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import Screen
from textual.timer import Timer

from ...engine.events import Loaded, Stats
from ..widgets.blocks import Welcome
from ..widgets.chips import Chips, Count
from ..widgets.clipboard import copy
from ..widgets.composer import Composer
from ..widgets.figures import Figures
from ..widgets.keys import key_of
from ..widgets.panel import PanelStrip, PerformancePanel
from ..widgets.plain import one_line, printable
from ..widgets.status_line import StatusLine
from ..widgets.transcript import Read, Transcript
from ..widgets.writing import Writing

if TYPE_CHECKING:
    from textual.widgets import Markdown

    from ..widgets.code import CodeBlock

# Figures arrive about five times a second: faster than a person reads, and painting takes time from the engine. An
# answer's first and last ones are painted at once.
_PANEL_PERIOD = 1.0

PANELS = ("full", "compact", "hidden")


class ChatView(Screen[None]):
    """A column for the panel from 100 columns on, else two lines."""

    def __init__(self, read: Read, tokens_of: Count) -> None:
        super().__init__()
        self.HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
        self._figures = Figures()
        self._unpainted = False
        self._next_paint: Timer | None = None
        self._context_used: int | None = None
        self._panel_layout = PANELS[0]
        self._transcript = Transcript(read)
        self._writing = Writing(tokens_of, self._question_room)
        self._composer = self._writing.composer
        self._panel = PerformancePanel()
        self._strip = PanelStrip()
        self._status = StatusLine()

    @property
    def figures(self) -> Figures:
        """The latest figures of the engine."""
        return self._figures

    @property
    def composer(self) -> Composer:
        """The text field."""
        return self._composer

    @property
    def status(self) -> StatusLine:
        """The bottom row."""
        return self._status

    def compose(self) -> ComposeResult:
        yield self._strip
        with Horizontal():
            with Vertical(id="chat"):
                yield self._transcript
                yield self._writing
            yield self._panel
        yield self._status

    def on_mount(self) -> None:
        self._composer.focus()

    def take_keys(self, keys: Mapping[str, str]) -> None:
        """These are the keys of the actions from now on."""
        self._status.keys = keys
        self._composer.newline_keys = frozenset(keys["newline"].split(",")) | {"shift+enter"}
        for welcome in self.query(Welcome):
            welcome.refresh(layout=True)

    def show_panel(self, layout: str) -> None:
        """Show the panel as one of `PANELS`; there is no column on a narrow terminal."""
        self._panel_layout = layout
        for name in PANELS:
            self.set_class(name == layout, f"-panel-{name}")

    def toggle_panel(self) -> None:
        """Column, two lines, hidden; on a narrow terminal two lines or hidden."""
        layouts = PANELS if self.has_class("-wide") else PANELS[1:]
        now = layouts.index(self._panel_layout) if self._panel_layout in layouts else 0
        self.show_panel(layouts[(now + 1) % len(layouts)])

    def pause_panel(self) -> None:
        """Pause the figures, or resume them."""
        if self._figures.paused:
            self._figures.resume()
            self._status.remark("The panel's figures are live again")
        else:
            self._figures.paused = True
            self._status.remark(f"The panel's figures are paused; {key_of(self, 'pause_panel')} resumes them")
        self._unpainted = True
        self._paint_figures()

    def scroll_transcript(self, pages: int) -> None:
        """Scroll the chat by pages."""
        self._transcript.scroll_pages(pages)

    async def scroll_to_end(self) -> None:
        """Go to the end of the chat, and follow it."""
        await self._transcript.show_end()

    def select_messages(self) -> None:
        """Give the keys to the messages."""
        self._transcript.focus()

    @on(Transcript.Left)
    def focus_text(self) -> None:
        """Give the keys back to the text field."""
        self._composer.focus()

    # By name: what they come from is imported behind the first frame.

    def on_code_block_copied(self, event: CodeBlock.Copied) -> None:
        self._copy(event.code, "the code")

    def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        href = printable(event.href)
        self._copy(href, href)

    @on(Composer.Refused)
    @on(Chips.Refused)
    def _remark(self, event: Composer.Refused | Chips.Refused) -> None:
        self._status.remark(one_line(event.reason))

    def _copy(self, text: str, what: str) -> None:
        copy(self.app, text)
        self._status.remark(f"Copied {what}")

    def _show_loaded(self, loaded: Loaded) -> None:
        self._figures.loaded = loaded
        self._status.model, self._status.preset = loaded.model, loaded.preset
        self._status.context_window = loaded.context_window
        self._writing.chips.measure_again()
        self._panel.show_backend(self._figures)
        self._strip.show(self._figures)

    def _show_figures(self, stats: Stats, *, running: bool) -> None:
        before = self._figures.running
        self._figures.take(stats, running=running)
        self._status.context_window = stats.context_window
        self._unpainted = True
        if not running or self._figures.running != before:
            self._paint_figures()
        elif self._next_paint is None:
            self._next_paint = self.set_timer(_PANEL_PERIOD, self._paint_figures)

    def _show_context(self, used: int | None) -> None:
        """At once; what comes with figures is shown with them."""
        self._context_used = self._status.context_used = self._figures.context_used = used
        self._panel.show_context(self._figures)

    def _paint_figures(self) -> None:
        if self._next_paint is not None:
            self._next_paint.stop()
            self._next_paint = None
        if self._unpainted:
            self._unpainted = False
            self._figures.context_used = self._context_used
            self._panel.show(self._figures)
            self._strip.show(self._figures)
            self._status.context_used = self._context_used
            for watcher in self._figures.watchers:
                watcher()

    def _question_room(self) -> int | None:
        """How many tokens a question may have; None while no model is loaded."""
        return self._status.context_window

    def _say(self, words: str, tone: str) -> None:
        self._status.state, self._status.tone = words, tone

    def say_beside(self, words: str) -> None:
        """Show background work in the bottom row; "" for none."""
        self._status.background = printable(words)
