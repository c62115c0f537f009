"""An answer's Markdown on the screen, while it grows and afterwards."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_it.token import Token
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.selection import Selection
from textual.widget import Widget

from .common.stable_text import Ground
from .common.themes import MUTED
from .markdown.answer_block import AnswerBlock
from .markdown.code import CodeBlock
from .markdown.growing import LISTS, ROOM, Growing, Heading, Paragraph, TextList, deeper, is_text, symbols
from .markdown.markdown import Block, blocks_of
from .markdown.table import Table


class AnswerMarkdown(Ground, Widget):
    """An answer. New text re-parses its last block; blocks with the same content stay as they are."""

    DEFAULT_CSS = """
    AnswerMarkdown {
        height: auto;
        color: $foreground;
        overflow-y: hidden;
    }
    """

    def __init__(self, text: str, *, waits: bool = False) -> None:
        """`waits`: until the first text comes, show a paragraph as high as its first lines will be."""
        super().__init__()
        self.source = text
        self._complete = 0  # blocks that stay as they are
        self._rest = 0  # where the other blocks begin in the source
        self._waiting = Paragraph(Block(Token("paragraph_open", "p", 1))) if waits else None

    def compose(self) -> ComposeResult:
        if self._waiting is not None:
            self._waiting.room = ROOM
            self.wait("…")
            yield self._waiting
        blocks, _ = blocks_of(self.source)
        yield from (_widget(block, 0) for block in blocks)

    def wait(self, words: str) -> None:
        """Say what happens before the first text."""
        if self._waiting is not None:
            self._waiting.say(Content.styled(words, MUTED))

    async def grow(self, text: str, *, going_on: bool) -> None:
        """Append; while more is `going_on` to come, the last block reserves room for it."""
        async with self.lock:
            if text or (self._waiting is not None and not going_on):
                self.source += text
                await self._read(going_on)
            else:
                self._give_room(going_on)

    async def complete(self, text: str) -> None:
        """Show the whole text, parsed again: parsed piece by piece it may differ."""
        async with self.lock:
            self.source, self._complete, self._rest = text, 0, 0
            await self._read(going_on=False)

    async def _read(self, going_on: bool) -> None:
        self._waiting = None
        rest = self.source[self._rest :]
        blocks, line = blocks_of(rest)
        with self.app.batch_update():
            await _show(self, blocks, 0, self._complete)
            self._give_room(going_on)
        self._complete += max(0, len(blocks) - 1)
        self._rest += sum(map(len, rest.splitlines(keepends=True)[:line]))

    def _give_room(self, going_on: bool) -> None:
        for block in self.children:
            if isinstance(block, Growing):
                block.give(ROOM if going_on and block is self.children[-1] else 1)


class HorizontalRule(AnswerBlock):
    """A line across."""

    DEFAULT_CSS = """
    HorizontalRule {
        border-bottom: solid $secondary;
        height: 1;
        padding-top: 1;
        margin-bottom: 1;
    }
    """

    async def take(self, block: Block) -> None:
        self.block = block

    def render(self) -> Content:
        return Content()


class Column(AnswerBlock):
    """Blocks below each other. `depth`: how many bullet lists contain it."""

    def __init__(self, block: Block, depth: int) -> None:
        super().__init__(block)
        self._depth = depth

    def compose(self) -> ComposeResult:
        yield from (_widget(block, self._depth) for block in self.block.inner)

    async def take(self, block: Block) -> None:
        self.block = block
        await _show(self, block.inner, self._depth)


class Quote(Column):
    """Quoted blocks."""

    DEFAULT_CSS = """
    Quote {
        background: $boost;
        border-left: outer $text-primary 50%;
        margin: 1 0;
    }
    Quote:light {
        border-left: outer $text-secondary;
    }
    """


class _Symbol(Widget):
    """The symbol before an item."""

    DEFAULT_CSS = """
    _Symbol {
        width: auto;
        color: $text-primary;
        &:light {
            color: $text-secondary;
        }
    }
    """

    def __init__(self, symbol: str) -> None:
        super().__init__()
        self._symbol = symbol

    def show(self, symbol: str) -> None:
        """Show another one."""
        if symbol != self._symbol:
            self._symbol = symbol
            self.refresh(layout=True)

    def render(self) -> Content:
        return Content(self._symbol)

    def get_selection(self, selection: Selection) -> tuple[str, str] | None:
        return self._symbol, " "


class _Item(Horizontal):
    """An item of a list: its symbol and a column of blocks."""

    DEFAULT_CSS = """
    _Item {
        height: auto;
        width: 1fr;
    }
    """

    def __init__(self, symbol: str, block: Block, depth: int) -> None:
        super().__init__()
        self.symbol, self.column = _Symbol(symbol), Column(block, depth)

    def compose(self) -> ComposeResult:
        yield from (self.symbol, self.column)


class MixedList(AnswerBlock):
    """A list with more than text in its items."""

    DEFAULT_CSS = """
    MixedList {
        margin-bottom: 1;
    }
    MixedList MixedList, MixedList TextList {
        margin: 0;
    }
    """
    SCOPED_CSS = False

    def __init__(self, block: Block, depth: int) -> None:
        super().__init__(block)
        self._depth = depth

    def compose(self) -> ComposeResult:
        yield from self._items(self.block, 0)

    async def take(self, block: Block) -> None:
        self.block = block
        shown = [child for child in self.children if isinstance(child, _Item)]
        for item, symbol, inner in zip(shown, symbols(block, self._depth), block.inner, strict=False):
            item.symbol.show(symbol)
            await item.column.take(inner)
        if gone := shown[len(block.inner) :]:
            await self.remove_children(gone)
        if new := self._items(block, len(shown)):
            await self.mount_all(new)

    def _items(self, block: Block, start: int) -> list[_Item]:
        depth, found = deeper(block, self._depth), zip(symbols(block, self._depth), block.inner, strict=True)
        return [_Item(symbol, item, depth) for symbol, item in list(found)[start:]]


_KINDS: dict[str, type[AnswerBlock]] = {
    "heading_open": Heading,
    "paragraph_open": Paragraph,
    "blockquote_open": Quote,
    "table_open": Table,
    "fence": CodeBlock,
    "code_block": CodeBlock,
    "hr": HorizontalRule,
}


def _kind(block: Block) -> type[AnswerBlock]:
    if block.token.type in LISTS:
        return TextList if is_text(block) else MixedList
    return _KINDS[block.token.type]


def _widget(block: Block, depth: int) -> AnswerBlock:
    kind = _kind(block)
    return kind(block, depth) if issubclass(kind, TextList | MixedList | Column) else kind(block)


async def _show(where: Widget, blocks: Sequence[Block], depth: int, start: int = 0) -> None:
    """Replace the blocks from number `start` on with `blocks`; those with the same content stay."""
    shown = [child for child in where.children if isinstance(child, AnswerBlock)][start:]
    stays = 0
    for part, block in zip(shown, blocks, strict=False):
        if type(part) is not _kind(block) or part.block.token.tag != block.token.tag:
            break
        if part.block != block:
            await part.take(block)
        stays += 1
    if gone := shown[stays:]:
        await where.remove_children(gone)
    if new := blocks[stays:]:
        await where.mount_all([_widget(block, depth) for block in new])
