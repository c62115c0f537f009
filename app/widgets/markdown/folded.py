"""Code without cut lines: a line wider than the screen folds, with a sign at its end."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain

from rich.cells import chop_cells
from textual.content import Content
from textual.geometry import Size
from textual.selection import SELECT_ALL, Selection
from textual.widget import Widget

from ..common.themes import MUTED

FOLD = "\0"  # at the end of a folded line; removed from a model's text
_SIGN = Content.styled("↵", MUTED)
_TAB = 4


class Folded(Widget):
    """Code with its colours; it is copied unfolded."""

    DEFAULT_CSS = """
    Folded {
        height: auto;
    }
    """

    def __init__(self, code: Content | None = None, *, classes: str | None = None) -> None:
        super().__init__(classes=classes)
        self._code = code or Content()
        self._drawn: tuple[int, list[Content]] | None = None  # for which width, and the lines

    def show(self, code: Content) -> None:
        """Show other code; the screen is laid out again only if it takes more or fewer lines."""
        self._code, self._drawn = code, None
        width, height = self.content_size
        self.refresh(layout=not width or len(self._lines(width)) != height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._lines(width))

    def render(self) -> Content:
        return Content("\n").join([_with_sign(line) for line in self._lines(self.content_size.width)])

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        if selection == SELECT_ALL:
            return self._code.plain, "\n"
        found = selection.extract("\n".join(line.plain for line in self._lines(self.content_size.width)))
        return found.replace(FOLD + "\n", "").replace(FOLD, ""), "\n"

    def _lines(self, width: int) -> list[Content]:
        """With `FOLD` in the place of each sign."""
        if self._drawn is None or self._drawn[0] != width:
            lines = self._code.split("\n", allow_blank=True)
            self._drawn = width, list(chain.from_iterable(_folded(line.expand_tabs(_TAB), width) for line in lines))
        return self._drawn[1]


def _folded(line: Content, width: int) -> Iterable[Content]:
    if line.cell_length <= width:
        return [line]
    pieces = chop_cells(line.plain, max(2, width - 1))  # two: no character is wider
    *folded, last = line.divide(list(accumulate(map(len, pieces)))[:-1])
    return [*(piece + FOLD for piece in folded), last]


def _with_sign(line: Content) -> Content:
    return line[:-1] + _SIGN if line.plain.endswith(FOLD) else line
