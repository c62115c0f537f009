"""A model's Markdown as blocks that are safe to show. Its library takes a quarter of a second to import."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.parser_block import ParserBlock
from markdown_it.rules_block import StateBlock
from markdown_it.token import Token

from ...text.plain_text import printable


class _Blocks(ParserBlock):
    """Blocks nested deeper than the parser's limit stay as a paragraph; the library would drop them, and all that
    follows.

    The limit exists because Textual lays out nested blocks by recursion.
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
    """GitHub's Markdown, with tags shown as text (the renderer would drop them) and nothing unprintable.

    The parser decodes links for display, so that %1b would become an escape character. Creating one takes as long as
    rendering many answers, since it compiles its link patterns: all share one, `the_parser`.
    """

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False})
        self.block = _Blocks(self.block)
        self._turn = threading.Lock()  # the link finder is stateful

    def parse(self, src: str, env: MutableMapping[str, Any] | None = None) -> list[Token]:
        with self._turn:
            tokens = super().parse(src, env)
        _make_printable(tokens)
        return tokens


@cache
def the_parser() -> AnswerParser:
    """The parser of all answers; for any thread."""
    return AnswerParser()


@dataclass(slots=True)
class Block:
    """A block of Markdown and the blocks in it. Equal ones look the same.

    Attributes:
        token: opens it. inline: its words, None if it has none itself. inner: the blocks in it.
    """

    token: Token
    inline: Token | None = None
    inner: list[Block] = field(default_factory=list)


def blocks_of(text: str) -> tuple[list[Block], int]:
    """The blocks of a document, and the line where the last one begins: more text can change only that one."""
    root = Block(Token("root", "", 1))
    opened, last = [root], 0
    for token in the_parser().parse(text):
        if token.map is not None and len(opened) == 1:
            last = token.map[0]
        token.map = None  # a block's position does not change its look
        if token.type == "inline":
            opened[-1].inline = token
        elif token.nesting < 0:
            opened.pop()
        else:
            opened[-1].inner.append(block := Block(token))
            opened += [block] if token.nesting else []
    return root.inner, last


@lru_cache(maxsize=1)  # called whenever the mouse moves over an answer
def codes(text: str) -> tuple[str, ...]:
    """The code blocks of an answer, in order."""
    return tuple(token.content for token in the_parser().parse(text) if token.type in ("fence", "code_block"))


def _make_printable(tokens: Sequence[Token]) -> None:
    for token in tokens:
        token.content, token.info = printable(token.content), printable(token.info)
        _make_printable(token.children or ())
