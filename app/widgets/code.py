"""A code block of an answer, with a bar that copies it."""

from __future__ import annotations

from contextlib import suppress

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.css.query import NoMatches
from textual.message import Message
from textual.widgets import Static
from textual.widgets.markdown import MarkdownFence

from .folded import Folded
from .themes import MUTED


class CodeBar(Static):
    """The block's language, and what a click on it does."""

    def __init__(self, language: str) -> None:
        words = language.split()
        name = f"{words[0][:20]}   " if words else ""
        super().__init__(Content.assemble((name, MUTED), ("copy", "underline $primary")))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        if isinstance(self.parent, CodeBlock):
            self.post_message(CodeBlock.Copied(self.parent.code))


class CodeBlock(MarkdownFence):
    """Highlighted code under a `CodeBar`."""

    class Copied(Message):
        """The person wants this code."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def compose(self) -> ComposeResult:
        yield CodeBar(self.lexer)
        yield Folded(self._highlighted_code)

    def set_content(self, content: Content) -> None:
        self._content = content
        with suppress(NoMatches):
            self.query_one(Folded).show(content)
