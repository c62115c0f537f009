"""A progress bar."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from ..common.themes import MUTED

_SHARE = 6  # cells of the percentage
_MOVING = 6  # cells of the moving part while the total is unknown


class Bar(Widget):
    """`share` of the line is filled, 0..1; None: the total is unknown.

    `beat` moves the moving part; `held` draws it in grey.
    """

    DEFAULT_CSS = "Bar { height: 1; }"

    share: reactive[float | None] = reactive[float | None](0.0)
    beat: reactive[int] = reactive(0)
    held: reactive[bool] = reactive(False)

    def render(self) -> Content:
        room = max(1, self.content_size.width - _SHARE)
        tone = MUTED if self.held else "$primary"
        if self.share is None:
            at = self.beat % room
            line = "".join("━" if (cell - at) % room < _MOVING else "─" for cell in range(room))
            return Content.assemble((line, tone))
        filled = min(room, int(self.share * room + 1e-9))
        return Content.assemble(
            ("━" * filled, tone), ("─" * (room - filled), "$primary 35%"), (f"{self.share:>{_SHARE}.0%}", "")
        )
