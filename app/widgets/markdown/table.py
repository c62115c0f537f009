"""A table of an answer, drawn by one widget, in which nothing is cut off."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.selection import SELECT_ALL, Selection

from ..inline import words
from .growing import Growing
from .markdown import Block

_LINES = "$foreground 20%"
_HEADER = "bold $primary"
_HANGING = "  "
_BETWEEN = 3  # cells from column to column: a line with a blank on each side
_READABLE, _LONG = 10, 20  # cells: a column has room for words of the first length, if possible of the second


@dataclass(frozen=True, slots=True)
class _Cell:
    words: Content
    align: str


class Table(Growing):
    """Columns share the width by need, and cells wrap. If columns would be too narrow to read, each row becomes a list
    of its cells, with headers before them.
    """

    DEFAULT_CSS = """
    Table {
        margin-bottom: 1;
    }
    """

    def read(self, block: Block) -> None:
        rows = [row for part in block.inner for row in part.inner]
        self._cells = [[_Cell(words(cell.inline), _align(cell)) for cell in row.inner] for row in rows]
        self._drawn: tuple[int, Sequence[Content]] | None = None  # for which width, and the lines

    def height_at(self, width: int) -> int:
        return len(self._lines(width))

    def render(self) -> Content:
        return Content("\n").join(self._lines(self.content_size.width))

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        """All of it with tabs between cells; of a part, the visible text."""
        if selection == SELECT_ALL:
            return "\n".join("\t".join(cell.words.plain for cell in row) for row in self._cells), "\n"
        return super().get_selection(selection)

    def _lines(self, width: int) -> Sequence[Content]:
        if self._drawn is None or self._drawn[0] != width:
            widths = _widths(self._cells, width)
            self._drawn = width, list(_grid(self._cells, widths) if widths else _list(self._cells, width))
        return self._drawn[1]


def _align(cell: Block) -> str:
    return str(cell.token.attrGet("style") or "").removeprefix("text-align:")


def _widths(rows: Sequence[Sequence[_Cell]], width: int) -> list[int] | None:
    """The width of each column's text; None if there is not enough for all.

    First all get room for words of readable length, then for longer ones, then for whole cells: the narrowest is
    widened first, so that one long cell does not take the others' space.
    """
    columns = [[cell.words for cell in column] for column in zip(*rows, strict=True)]
    words = [
        max((Content(word).cell_length for c in column for word in c.plain.split()), default=1) for column in columns
    ]
    whole = [max(1, *(cell.cell_length for cell in column)) for column in columns]
    widths = [min(_READABLE, longest) for longest in words]
    left = width - sum(widths) - _BETWEEN * len(columns) - 1
    if left < 0:
        return None
    for wanted in ([min(_LONG, longest) for longest in words], whole):
        while left and (short := [at for at, needed in enumerate(wanted) if widths[at] < needed]):
            widths[min(short, key=widths.__getitem__)] += 1
            left -= 1
    return widths


def _grid(rows: Sequence[Sequence[_Cell]], widths: Sequence[int]) -> Generator[Content]:
    edge, wall = Content.styled("│", _LINES), Content.styled(" │ ", _LINES)
    rule = Content.styled("├" + "┼".join("─" * (width + 2) for width in widths) + "┤", _LINES)
    yield Content.styled("┌" + rule.plain[1:-1].replace("┼", "┬") + "┐", _LINES)
    for number, row in enumerate(rows):
        if number:
            yield rule
        folded = [cell.words.wrap(width) for cell, width in zip(row, widths, strict=True)]
        for line in range(max(map(len, folded))):
            parts = [
                _placed(lines[line] if line < len(lines) else Content(), width, cell.align)
                for lines, width, cell in zip(folded, widths, row, strict=True)
            ]
            words = wall.join(parts)
            yield Content.assemble(edge, " ", words if number else words.stylize_before(_HEADER), " ", edge)
    yield Content.styled("└" + rule.plain[1:-1].replace("┼", "┴") + "┘", _LINES)


def _placed(line: Content, width: int, align: str) -> Content:
    line = line.rstrip()
    blank = width - line.cell_length
    before = {"right": blank, "center": blank // 2}.get(align, 0)
    return line.pad(before, blank - before)


def _list(rows: Sequence[Sequence[_Cell]], width: int) -> Generator[Content]:
    headers, *others = rows
    for number, row in enumerate(others or [[_Cell(Content(), "") for _ in headers]]):
        if number:
            yield Content.styled("─" * width, _LINES)
        for header, cell in zip(headers, row, strict=True):
            name = [header.words.stylize_before(_HEADER), ": "] if header.words else []
            lines = Content.assemble(*name, cell.words).wrap(max(1, width - len(_HANGING))) or [Content()]
            yield lines[0]
            yield from (Content.assemble(_HANGING, line) for line in lines[1:])
