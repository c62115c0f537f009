"""Blocks of text that grow in place, as an answer does.

Laying out the screen for each piece of text would take too much time from the engine: there is no layout while the text
fits the lines of its block. One widget draws all items of a list.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from textual.content import Content
from textual.geometry import Size
from textual.selection import Selection

from ..inline import words
from .answer_block import AnswerBlock
from .folded import FOLD
from .markdown import Block

ROOM = 3  # lines added at a time to the block being written: fewer layouts, and it still scrolls in small steps
LISTS = frozenset({"bullet_list_open", "ordered_list_open"})
_SYMBOL = "$text-primary"
_BULLETS = ("• ", "▪ ", "‣ ", "⭑ ", "◦ ")  # by depth


class Growing(AnswerBlock):
    """A block that draws its own lines. `room`: lines are added in multiples of it."""

    room = 1

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.read(block)

    @abstractmethod
    def read(self, block: Block) -> None:
        """Make ready to draw `block`."""

    @abstractmethod
    def height_at(self, width: int) -> int:
        """The number of lines that it needs."""

    async def take(self, block: Block) -> None:
        self.block = block
        self.read(block)
        self.redraw()

    def redraw(self) -> None:
        """Draw it again; the screen is laid out again if it needs more or fewer lines than it has."""
        width, height = self.content_size
        self.refresh(layout=not width or self._rounded(width) != height)

    def give(self, room: int) -> None:
        """Set `room` from now on."""
        if self.room != room:
            self.room = room
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return self._rounded(width)

    def _rounded(self, width: int) -> int:
        """Its lines, filled up with blank ones to a multiple of `room`."""
        return -(-self.height_at(width) // self.room) * self.room


class Words(Growing):
    """A block with its own words."""

    def read(self, block: Block) -> None:
        self._words = words(block.inline)

    def say(self, content: Content) -> None:
        """Show these words instead of the block's."""
        self._words = content
        self.redraw()

    def height_at(self, width: int) -> int:
        return self._words.get_height(self.styles.get_rules(), width)

    def render(self) -> Content:
        return self._words


class Paragraph(Words):
    """Plain text."""

    DEFAULT_CSS = """
    AnswerMarkdown > Paragraph {
        margin-bottom: 1;
    }
    """
    SCOPED_CSS = False


_LEVEL = """
    Heading.h{0} {{
        color: $markdown-h{0}-color;
        background: $markdown-h{0}-background;
        text-style: $markdown-h{0}-text-style;
    }}
"""


class Heading(Words):
    """A heading of any level."""

    DEFAULT_CSS = """
    Heading {
        color: $text;
        margin: 1 0;

        &.h1, &.h2 {
            content-align: left middle;  /* so that a line under the words spans the width */
        }
        &.h3 {
            width: auto;
        }
    }
    """ + "".join(map(_LEVEL.format, range(1, 7)))

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self.add_class(block.token.tag)


@dataclass(frozen=True, slots=True)
class _Point:
    """A paragraph of an item, with a symbol before its first line and blanks before the others."""

    before: str
    words: Content

    def height(self, width: int) -> int:
        return max(1, self.words.get_height({}, self._room(width)))

    def lines(self, width: int, fold: str) -> Generator[Content]:
        lines = self.words.wrap(self._room(width)) or [Content()]
        before = Content.styled(self.before, _SYMBOL)
        for place, line in enumerate(lines, 1):
            yield Content.assemble(before, line, fold if place < len(lines) else "")
            before = Content(" " * len(self.before))

    def _room(self, width: int) -> int:
        return max(1, width - len(self.before))


class TextList(Growing):
    """A list of text only, with the lists in it."""

    DEFAULT_CSS = """
    TextList {
        margin-bottom: 1;
    }
    """

    def __init__(self, block: Block, depth: int = 0) -> None:
        """`depth`: the bullet lists that it is in."""
        self._depth = depth
        super().__init__(block)

    def read(self, block: Block) -> None:
        self._points = list(_points(block, self._depth))

    def height_at(self, width: int) -> int:
        return sum(point.height(width) for point in self._points)

    def render(self) -> Content:
        return Content("\n").join(self._lines())

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        text = selection.extract("\n".join(line.plain for line in self._lines(FOLD)))
        first, *rest = text.split(FOLD + "\n")
        return "".join((first, *(f" {line.lstrip()}" for line in rest))), "\n"

    def _lines(self, fold: str = "") -> Iterable[Content]:
        width = self.content_size.width
        return chain.from_iterable(point.lines(width, fold) for point in self._points)


def symbols(block: Block, depth: int) -> Sequence[str]:
    """The symbols before a list's items: a bullet, or numbers with aligned dots."""
    if block.token.type == "bullet_list_open":
        return [_BULLETS[depth % len(_BULLETS)]] * len(block.inner)
    first = block.inner[0].token.info if block.inner else ""
    start = int(first) if first.isdecimal() else 1
    numbers = [f"{number}. " for number in range(start, start + len(block.inner))]
    return [number.rjust(max(map(len, numbers)) + 1) for number in numbers]


def deeper(block: Block, depth: int) -> int:
    """The depth of lists inside a list."""
    return depth + (block.token.type == "bullet_list_open")


def is_text(block: Block) -> bool:
    """Whether a list has only text and lists of text in its items."""
    return all(map(_is_text_item, block.inner))


def _is_text_item(item: Block) -> bool:
    return all(
        inner.token.type == "paragraph_open" or (place > 0 and inner.token.type in LISTS and is_text(inner))
        for place, inner in enumerate(item.inner)
    )


def _points(block: Block, depth: int) -> Generator[_Point]:
    """The paragraphs of its items and of the lists in them."""
    for symbol, item in zip(symbols(block, depth), block.inner, strict=True):
        before = symbol
        for inner in item.inner or [Block(item.token)]:
            if inner.token.type in LISTS:
                for point in _points(inner, deeper(block, depth)):
                    yield _Point(before + point.before, point.words)
            else:
                yield _Point(before, words(inner.inline))
            before = " " * len(symbol)
