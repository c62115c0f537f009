"""The bottom row: model, preset, context used, what happens now."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from .figures import between
from .themes import MUTED
from .units import share

_SEPARATOR = (" · ", MUTED)
_REMARK_SECONDS = 5.0


class StatusLine(Widget):
    """One row that shortens itself to the terminal: the key hints go first, then the percentage, then the name.

    `state` is a few words and `tone` a style for the dot before them; `background` says what goes on beside the chat.
    For some seconds a remark covers the rest.
    """

    HINTS = ("Esc stop  F1 help  Ctrl+P commands  Ctrl+Q quit", "F1 help  Ctrl+Q quit", "F1 help")

    model: reactive[str] = reactive("")
    preset: reactive[str] = reactive("")
    context_used: reactive[int | None] = reactive(None)
    context_window: reactive[int | None] = reactive(None)
    state: reactive[str] = reactive("")
    background: reactive[str] = reactive("")
    tone: reactive[str] = reactive(MUTED)
    _remark: reactive[str] = reactive("")

    def remark(self, text: str) -> None:
        """Say something to the person for a few seconds."""
        self._remark = text
        self.set_timer(_REMARK_SECONDS, lambda: self._end_remark(text))

    def render(self) -> Content:
        width = self.size.width
        state = Content.assemble(("● ", self.tone), self.state)
        if self._remark:
            remark = Content.styled(self._remark, "$text-warning")
            both = Content.assemble(state, _SEPARATOR, remark)
            return (both if both.cell_length <= width else remark).truncate(width, ellipsis=True)
        line = self._line(self.model, state, percentage=True)
        if line.cell_length > width:
            line = self._line(self.model, state, percentage=False)
        if (excess := line.cell_length - width) > 0:
            model = Content(self.model).truncate(max(1, len(self.model) - excess), ellipsis=True).plain
            line = self._line(model, state, percentage=False)
        for hints in self.HINTS:
            gap = width - line.cell_length - len(hints)
            if gap >= 3:
                return Content.assemble(line, " " * gap, (hints, MUTED))
        return line.truncate(width, ellipsis=True)

    def watch_state(self) -> None:
        """What was said about the last state may be wrong now."""
        self._remark = ""

    def _end_remark(self, text: str) -> None:
        if self._remark == text:
            self._remark = ""

    def _line(self, model: str, state: Content, *, percentage: bool) -> Content:
        parts: list[Content] = [Content.styled(model, "bold")] if model else []
        if self.preset:
            parts.append(Content(self.preset))
        if self.context_window:
            used = self.context_used or 0
            context = f"context {used}/{self.context_window}"
            if percentage:
                context += f" ({share(used / self.context_window)})"
            parts.append(Content(context))
        if self.background and percentage:  # what can be left out first where there is no room
            parts.append(Content.styled(self.background, MUTED))
        return Content.assemble(*between([*parts, state]))
