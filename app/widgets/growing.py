"""Blocks of Markdown that grow where they are, as an answer does.

Textual lays the whole screen out again for each piece of a paragraph, and makes four widgets of each item of a list,
all of them again for each piece of the last. That is more work than the piece is worth, and the engine needs the time.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.content import Content
from textual.geometry import Size
from textual.selection import Selection
from textual.widget import Widget
from textual.widgets._markdown import (  # most of them are not exported
    Markdown,
    MarkdownBlock,
    MarkdownBulletList,
    MarkdownFence,
    MarkdownList,
    MarkdownListItem,
    MarkdownOrderedList,
    MarkdownParagraph,
)

from .folded import FOLD
from .steady import rounded, show

ROOM = 3  # lines at a time for the block that is being written: fewer layouts, and it still moves up in small steps
_BULLET = "$text-primary"


if TYPE_CHECKING:
    _Block, _List = MarkdownBlock, MarkdownList
else:
    _Block = _List = object  # Textual gives a widget the styles of its first base that is one


class Growing(_Block):
    """A block of words. `room`: its lines come in so many at a time."""

    room = 1

    def set_content(self, content: Content) -> None:
        self._content = content
        show(self, content, self.room)

    def says_same(self, other: MarkdownBlock) -> bool:
        """Whether `other`, a block of the same kind, has the same words."""
        return self._content.is_same(other._content)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if type(block) is type(self):
            self.set_content(block._content)
            self._copy_context(block)
        else:
            await super()._update_from_block(block)

    def give(self, room: int) -> None:
        """Have so much room from now on."""
        if self.room != room:
            self.room = room
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return rounded(super().get_content_height(container, viewport, width), self.room)


HEADINGS = {
    name: type(f"Heading{level}", (Growing, Markdown.BLOCKS[name]), {})
    for level in range(1, 7)
    if (name := f"h{level}")
}


class Paragraph(Growing, MarkdownParagraph):
    """One that takes more words."""

    @property
    def words(self) -> Content:
        """What it says."""
        return self._content


@dataclass(frozen=True, slots=True)
class _Point:
    """A paragraph of an item: what stands before its first line, and before the others as blanks."""

    before: str
    words: Content

    def height(self, width: int) -> int:
        return max(1, self.words.get_height({}, self._room(width)))

    def lines(self, width: int, fold: str) -> Generator[Content]:
        lines = self.words.wrap(self._room(width)) or [Content()]
        before = Content.styled(self.before, _BULLET)
        for place, line in enumerate(lines, 1):
            yield Content.assemble(before, line, fold if place < len(lines) else "")
            before = Content(" " * len(self.before))

    def _room(self, width: int) -> int:
        return max(1, width - len(self.before))


class _GrowingList(Growing, _List):
    """What both kinds of list have in common: one widget draws all items, unless there is more in them than text."""

    _points: Sequence[_Point] | None = None

    def compose(self) -> ComposeResult:
        self._points = self.points()
        if self._points is None:
            yield from super().compose()
        self._blocks.clear()

    def points(self) -> Sequence[_Point] | None:
        """The paragraphs of its items and of the lists in them; None if there is something else."""
        if not self._blocks:
            return self._points
        items = [block for block in self._blocks if isinstance(block, MarkdownListItem)]
        found = [_points_of(item, symbol) for item, symbol in zip(items, self._symbols(items), strict=True)]
        simple = [points for points in found if points is not None]
        return list(chain.from_iterable(simple)) if len(simple) == len(found) else None

    def _symbols(self, items: Sequence[MarkdownListItem]) -> list[str]:
        return [item.bullet for item in items]

    def says_same(self, other: MarkdownBlock) -> bool:
        points, others = self.points(), other.points() if isinstance(other, _GrowingList) else None
        return points is not None and others is not None and _are_same(points, others)

    async def _update_from_block(self, block: MarkdownBlock) -> None:
        points = block.points() if isinstance(block, type(self)) else None
        if points is None or self._points is None:
            await super()._update_from_block(block)
            return
        self._points = points
        self._copy_context(block)
        width, height = self.content_size
        self.refresh(layout=rounded(_height(points, width), self.room) != height)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        if self._points is None:
            return super().get_content_height(container, viewport, width)
        return rounded(_height(self._points, width), self.room)

    def render(self) -> Content:
        return Content("\n").join(self._lines())

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        text = selection.extract("\n".join(line.plain for line in self._lines(FOLD)))
        first, *rest = text.split(FOLD + "\n")
        return "".join((first, *(f" {line.lstrip()}" for line in rest))), "\n"

    def _lines(self, fold: str = "") -> Iterable[Content]:
        width = self.content_size.width
        return chain.from_iterable(point.lines(width, fold) for point in self._points or ())


class BulletList(_GrowingList, MarkdownBulletList):
    """With bullets."""


class OrderedList(_GrowingList, MarkdownOrderedList):
    """With numbers, their dots below each other."""

    def _symbols(self, items: Sequence[MarkdownListItem]) -> list[str]:
        first = int(items[0].bullet) if items and items[0].bullet.isdecimal() else 1
        numbers = [f"{number}. " for number in range(first, first + len(items))]
        return [number.rjust(max(map(len, numbers)) + 1) for number in numbers]


def _points_of(item: MarkdownListItem, symbol: str) -> list[_Point] | None:
    points = list[_Point]()
    for block in item._blocks:  # pyright: ignore[reportPrivateUsage]
        before = " " * len(symbol) if points else symbol
        if isinstance(block, Paragraph):
            points.append(_Point(before, block.words))
        elif isinstance(block, _GrowingList) and points and (inner := block.points()) is not None:
            points += [_Point(before + point.before, point.words) for point in inner]
        else:
            return None
    return points or [_Point(symbol, Content())]


def _height(points: Iterable[_Point], width: int) -> int:
    return sum(point.height(width) for point in points)


def same(shown: Sequence[Widget], wanted: Sequence[Widget]) -> bool:
    """Whether the blocks that are mounted are what those to come would be."""
    return len(shown) == len(wanted) and all(map(_is_same, shown, wanted))


def _is_same(old: Widget, new: Widget) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, Growing) and isinstance(new, Growing):
        return old.says_same(new)
    if isinstance(old, MarkdownFence) and isinstance(new, MarkdownFence):
        return (old.code, old.lexer) == (new.code, new.lexer)
    if isinstance(old, MarkdownBlock) and isinstance(new, MarkdownBlock):
        said = old._content.is_same(new._content)  # pyright: ignore[reportPrivateUsage]
        return said and same(old.children, new._blocks)  # pyright: ignore[reportPrivateUsage]
    return False


def _are_same(one: Sequence[_Point], other: Sequence[_Point]) -> bool:
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a.before == b.before and a.words.is_same(b.words) for a, b in pairs)
