"""The bottom row: model, preset, context used, what happens now."""

from __future__ import annotations

import time
from asyncio import TimerHandle
from collections.abc import Mapping

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from ...actions import NAMED
from ...background import later
from ...text.units import share
from ..common.hints import link
from ..common.keys import called, key_name
from ..common.themes import MUTED
from .figures import between

_SEPARATOR = (" · ", MUTED)
_REMARK_SECONDS = 5.0
_TOGETHER_SECONDS = 1.0  # a remark just before the state changes is about the new state
_APART = 3  # cells between the remark and the hints
_HINTS = (("help", "palette", "quit"), ("help", "quit"), ("help",))
_BUSY = (("stop", *_HINTS[0]), ("stop", "help"), ("stop",))


class StatusLine(Widget):
    """One row that shortens itself to the terminal: all key hints but one go first, then the
    percentage, then (to keep the way to stop an answer) the context, then the name.

    A click on a hint does it, one on the model or the preset opens their page. `keys` are those that the person gave to
    actions. `remote` is the host that everything is sent to, "" for none; it is never left out. `state` is a few words
    and `tone` a style for the dot before them; `background` names background work. For some seconds a remark covers the
    rest; one that is longer than the row appears above it.
    """

    model: reactive[str] = reactive("")
    remote: reactive[str] = reactive("")
    preset: reactive[str] = reactive("")
    context_used: reactive[int | None] = reactive(None)
    context_window: reactive[int | None] = reactive(None)
    state: reactive[str] = reactive("")
    background: reactive[str] = reactive("")
    tone: reactive[str] = reactive(MUTED)
    keys: reactive[Mapping[str, str]] = reactive[Mapping[str, str]](dict[str, str])
    _remark: reactive[str] = reactive("")

    _said = 0.0
    _end: TimerHandle | None = None

    def remark(self, text: str) -> None:
        """Say something to the person for a few seconds."""
        if Content(text).cell_length > self.size.width:
            self.notify(text, severity="warning", timeout=2 * _REMARK_SECONDS, markup=False)
            return
        self._remark, self._said = text, time.monotonic()
        if self._end is not None:
            self._end.cancel()
        self._end = later(self, _REMARK_SECONDS, self._end_remark)

    def render(self) -> Content:
        width = self.size.width
        state = Content.assemble(("● ", self.tone), self.state)
        if self._remark:
            remark = Content.styled(self._remark, "$text-warning")
            both = Content.assemble(state, _SEPARATOR, remark)
            return (both if both.cell_length <= width else remark).truncate(width, ellipsis=True)
        busy = self.state.startswith(("reading", "writing"))
        least = 0 if self.background and not busy else _APART + self._hint("stop" if busy else "help").cell_length
        for details in (2, 1, 0) if busy else (2, 1):
            line = self._line(self.model, state, details)
            if line.cell_length + least <= width:
                break
        else:
            line = self._line(self.model, state, 1)
        if (excess := line.cell_length - width) > 0:
            model = Content(self.model).truncate(max(1, len(self.model) - excess), ellipsis=True).plain
            line = self._line(model, state, 1)
        for names in _BUSY if busy else _HINTS:
            shown = Content("  ").join([self._hint(name) for name in names])
            gap = width - line.cell_length - shown.cell_length
            if gap >= _APART:
                return Content.assemble(line, " " * gap, shown)
        return line.truncate(width, ellipsis=True)

    def watch_state(self) -> None:
        """A remark about the last state may be wrong now."""
        if time.monotonic() - self._said > _TOGETHER_SECONDS:
            self._remark = ""

    def _hint(self, name: str) -> Content:
        action = NAMED[name]
        words = f"{key_name(self.keys.get(name, action.keys))} {action.hint}"
        return Content.styled(words, link(called(action))).stylize_before(MUTED)

    def _end_remark(self) -> None:
        self._remark = ""

    def _line(self, model: str, state: Content, details: int) -> Content:
        """0: nothing of the context, 1: how much is used, 2: its percentage and background work too."""
        parts: list[Content] = []
        if model:
            parts.append(Content.styled(model, link("screen.do('models')")).stylize("bold"))
        if self.remote:
            parts.append(Content.styled(f"remote {self.remote}", "$text-warning"))
        if self.preset:
            parts.append(Content.styled(self.preset, link("screen.do('quality')")))
        if self.remote and self.context_window and self.context_used is None:
            parts += [Content(f"window {self.context_window}")] if details else []
        elif self.context_window and details:
            used = self.context_used or 0
            context = f"context {used}/{self.context_window}"
            if details > 1:
                context += f" ({share(used / self.context_window)})"
            parts.append(Content(context))
        if self.background and details > 1:
            parts.append(Content.styled(self.background, MUTED))
        return Content.assemble(*between([*parts, state]))
