"""Markdown of a model: what may be shown of it, and how. Its library takes a quarter of a second to import."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping, Sequence
from functools import cache, lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.parser_block import ParserBlock
from markdown_it.rules_block import StateBlock
from markdown_it.token import Token
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.content import Content
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock

from .code import CodeBlock
from .growing import HEADINGS, ROOM, BulletList, Growing, OrderedList, Paragraph, same
from .plain import printable
from .table import Table
from .themes import MUTED


class _Blocks(ParserBlock):
    """What is nested deeper than the parser goes stays as a paragraph; the library would drop it, and all that follows.

    How deep it goes is limited since Textual lays nested blocks out by recursion.
    """

    def __init__(self, plain: ParserBlock) -> None:
        super().__init__()
        self.ruler = plain.ruler

    def tokenize(self, state: StateBlock, startLine: int, endLine: int) -> None:
        if state.level < state.md.options.maxNesting:
            super().tokenize(state, startLine, endLine)
            return
        end = startLine
        while end < endLine and (state.isEmpty(end) or state.sCount[end] >= state.blkIndent):
            end += 1
        words = state.getLines(startLine, end, state.blkIndent, False).strip()
        state.line = end
        if words:
            state.push("paragraph_open", "p", 1).map = [startLine, end]
            inline = state.push("inline", "", 0)
            inline.content, inline.map, inline.children = words, [startLine, end], []
            state.push("paragraph_close", "p", -1)


class AnswerParser(MarkdownIt):
    """GitHub's Markdown with tags as text to be read (the renderer would drop them) and nothing unprintable.

    The parser decodes what stands in a link for display, so that %1b would become an escape character. Making one takes
    as long as rendering many answers, since its patterns for links are compiled: there is one for all, `the_parser`.
    """

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False})
        self.block = _Blocks(self.block)
        self._turn = threading.Lock()  # what finds links keeps its place in itself

    def parse(self, src: str, env: MutableMapping[str, Any] | None = None) -> list[Token]:
        with self._turn:
            tokens = super().parse(src, env)
        _make_printable(tokens)
        return tokens


@cache
def the_parser() -> AnswerParser:
    """The parser of all answers; for any thread."""
    return AnswerParser()


_BLOCKS: dict[str, type[MarkdownBlock]] = {
    **HEADINGS,
    "paragraph_open": Paragraph,
    "bullet_list_open": BulletList,
    "ordered_list_open": OrderedList,
    "table_open": Table,
    "fence": CodeBlock,
    "code_block": CodeBlock,
}


class AnswerMarkdown(Markdown):
    """Markdown of a model: links are copied instead of opened, and so are code blocks."""

    def __init__(self, text: str, *, waits: bool = False) -> None:
        """`waits`: for a first text; until then a paragraph stands in its place, as high as its first lines will be."""
        super().__init__(text, parser_factory=the_parser, open_links=False)
        self._waiting = Paragraph(self, Token("paragraph_open", "p", 1)) if waits else None

    def compose(self) -> ComposeResult:
        if self._waiting is not None:
            self._waiting.room = ROOM
            self.wait("…")
            yield self._waiting

    def update(self, markdown: str) -> AwaitComplete:
        """Show another text; nothing, as at the beginning, does not take away what waits for the first one."""
        return super().update(markdown) if markdown or self._waiting is None else AwaitComplete()

    def wait(self, words: str) -> None:
        """Say what happens before the first text."""
        if self._waiting is not None:
            self._waiting.set_content(Content.styled(words, MUTED))

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        return _BLOCKS.get(block_name) or super().get_block_class(block_name)

    async def grow(self, text: str, *, going_on: bool) -> None:
        """Append; while words are `going_on` to come, the last block has room for more of them."""
        with self.app.batch_update():
            if text:
                await self.append(text)
            elif self._waiting is not None and not going_on:
                await self._waiting.remove()
            self._waiting = None
            last = self.children[-1] if self.children else None
            for block in self.children:
                if isinstance(block, Growing):
                    block.give(ROOM if going_on and block is last else 1)

    async def complete(self, text: str) -> None:
        """Show all of a text that has grown.

        Read piece by piece it can have become something else: then it is shown again.
        """
        rest = text[len(self.source) :] if text.startswith(self.source) else ""
        await self.grow(rest, going_on=False)
        if not same(self.children, list(self._parse_markdown(the_parser().parse(text)))):
            await self.update(text)


@lru_cache(maxsize=1)  # asked for whenever the mouse moves in an answer
def codes(text: str) -> tuple[str, ...]:
    """The code blocks of an answer, in order."""
    return tuple(token.content for token in the_parser().parse(text) if token.type in ("fence", "code_block"))


def _make_printable(tokens: Sequence[Token]) -> None:
    for token in tokens:
        token.content, token.info = printable(token.content), printable(token.info)
        _make_printable(token.children or ())
