"""The bottom row of a page: what keys do now, broken between hints and never within one."""

from __future__ import annotations

from collections.abc import Sequence

from textual import events
from textual.widgets import Static

_BETWEEN = " · "


class Keys(Static):
    """Hints such as "Esc back"; takes as many rows as they need."""

    def __init__(self) -> None:
        super().__init__("", markup=False, id="keys")
        self._hints: tuple[str, ...] = ()

    def show(self, hints: Sequence[str]) -> None:
        """Show these, those that are empty left out."""
        kept = tuple(hint for hint in hints if hint)
        if kept != self._hints:
            self._hints = kept
            self._lay_out()

    def on_resize(self, _event: events.Resize) -> None:
        self._lay_out()

    def _lay_out(self) -> None:
        self.update("\n".join(rows(self._hints, self.content_size.width)))


def rows(hints: Sequence[str], width: int) -> list[str]:
    """Hints in rows of at most `width` characters."""
    made: list[str] = []
    for hint in hints:
        if made and len(made[-1]) + len(_BETWEEN) + len(hint) <= width:
            made[-1] += _BETWEEN + hint
        else:
            made.append(hint)
    return made
