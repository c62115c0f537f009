"""The base of every widget that shows a block of an answer."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar
from urllib.parse import unquote

from textual.message import Message
from textual.widget import Widget

from ..common.stable_text import size_of_content
from ..inline import STYLES
from .markdown import Block


class AnswerBlock(Widget):
    """A shown block. It can change to another block of its kind, which is less work than a new widget."""

    COMPONENT_CLASSES: ClassVar[set[str]] = set(STYLES)
    DEFAULT_CSS = """
    AnswerBlock {
        width: 1fr;
        height: auto;

        &:dark > .code_inline {
            background: $warning 10%;
            color: $text-warning 95%;
        }
        &:light > .code_inline {
            background: $error 5%;
            color: $text-error 95%;
        }
        &:ansi > .code_inline {
            background: ansi_default;
        }
        & > .em {
            text-style: italic;
        }
        & > .strong {
            text-style: bold;
        }
        & > .s {
            text-style: strike;
        }
    }
    """

    virtual_size = size_of_content()

    class LinkClicked(Message):
        """A link of an answer was clicked."""

        def __init__(self, href: str) -> None:
            super().__init__()
            self.href = unquote(href)

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    @abstractmethod
    async def take(self, block: Block) -> None:
        """Show another block of the same kind."""

    @property
    def select_container(self) -> Widget:
        """The unit of selection: the whole answer."""
        return self.query_ancestor("AnswerMarkdown", Widget)

    def action_link(self, href: str) -> None:
        """A link was clicked."""
        self.post_message(self.LinkClicked(href))
