"""A code block of an answer, with a bar that copies it."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.content import Content
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme, highlight
from textual.message import Message
from textual.widgets import Static

from ..common.themes import MUTED
from .answer_block import AnswerBlock
from .folded import Folded
from .markdown import Block


class CodeBar(Static):
    """The block's language, and the hint to copy it."""

    def show(self, language: str) -> None:
        """Name another language."""
        name = f"{language.split()[0][:20]}   " if language.split() else ""
        self.update(Content.assemble((name, MUTED), ("copy", "underline $primary")), layout=False)

    def on_click(self, event: events.Click) -> None:
        event.stop()
        if isinstance(self.parent, CodeBlock):
            self.post_message(CodeBlock.Copied(self.parent.code))


class CodeBlock(AnswerBlock):
    """Highlighted code under a `CodeBar`."""

    DEFAULT_CSS = """
    CodeBlock {
        margin: 1 0;
        color: rgb(210,210,210);
        background: black 10%;

        &:light {
            background: white 30%;
        }
        &:ansi {
            background: transparent;
        }
    }
    """

    class Copied(Message):
        """The user wants to copy this code."""

        def __init__(self, code: str) -> None:
            super().__init__()
            self.code = code

    def __init__(self, block: Block) -> None:
        super().__init__(block)
        self._bar, self._folded = CodeBar(), Folded()
        self._theme = self._look()
        self._highlight()

    @property
    def code(self) -> str:
        """All of it, without trailing blanks."""
        return self.block.token.content.rstrip()

    def compose(self) -> ComposeResult:
        yield from (self._bar, self._folded)

    async def take(self, block: Block) -> None:
        self.block = block
        self._highlight()

    def notify_style_update(self) -> None:
        """The application's colours may be others now."""
        super().notify_style_update()
        if self._theme is not self._look():
            self._theme = self._look()
            self._highlight()

    def _highlight(self) -> None:
        language = self.block.token.info
        self._bar.show(language)
        self._folded.show(highlight(self.code, language=language or None, theme=self._theme))

    def _look(self) -> type[HighlightTheme]:
        if not self.app.native_ansi_color:
            return HighlightTheme
        return ANSIDarkHighlightTheme if self.app.current_theme.dark else ANSILightHighlightTheme
