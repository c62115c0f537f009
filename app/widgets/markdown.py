"""Markdown of a model: what may be shown of it, and how. Its library takes a quarter of a second to import."""

from __future__ import annotations

import threading
from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock

from .code import CodeBlock
from .plain import printable


class AnswerParser(MarkdownIt):
    """GitHub's Markdown with tags as text to be read (the renderer would drop them) and nothing unprintable.

    The parser decodes what stands in a link for display, so that %1b would become an escape character. Making one takes
    as long as rendering many answers, since its patterns for links are compiled: there is one for all, `the_parser`.
    """

    def __init__(self) -> None:
        super().__init__("gfm-like", {"html": False})
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


class AnswerMarkdown(Markdown):
    """Markdown of a model: links are copied instead of opened, and so are code blocks."""

    def __init__(self, text: str) -> None:
        super().__init__(text, parser_factory=the_parser, open_links=False)

    def get_block_class(self, block_name: str) -> type[MarkdownBlock]:
        return CodeBlock if block_name in ("fence", "code_block") else super().get_block_class(block_name)


def codes(text: str) -> list[str]:
    """The code blocks of an answer, in order."""
    return [token.content for token in the_parser().parse(text) if token.type in ("fence", "code_block")]


def _make_printable(tokens: Sequence[Token]) -> None:
    for token in tokens:
        token.content, token.info = printable(token.content), printable(token.info)
        _make_printable(token.children or ())
