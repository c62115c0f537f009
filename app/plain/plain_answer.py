"""One answer of `floe-chat --plain` as it comes: the answer on stdout, what the model thinks before it on stderr."""

from __future__ import annotations

import sys

from ..history import AnswerStats
from ..history.exporting import thought_for
from ..text.plain_text import printable
from .plain_lines import remark, say
from .plain_markdown import PlainMarkdown


class PlainAnswer:
    """Prints what it gets, after the model's `name`. `shown`: what it thinks too, and not only that it does.

    Attributes:
        text, thought: all of it so far. thought_tokens: of the latter.
    """

    def __init__(self, name: str, *, shown: bool) -> None:
        self._name, self._shown = printable(name), shown
        self._markdown = PlainMarkdown()
        self.text = self.thought = ""
        self.thought_tokens = 0
        self._named = self._thinking = False

    @property
    def begun(self) -> bool:
        """Whether any of it came."""
        return bool(self.text or self.thought)

    def think(self, text: str, tokens: int) -> None:
        """More of what the model thinks."""
        self.thought += text
        self.thought_tokens += tokens
        if not self._thinking:
            self._thinking = True
            remark("Thinking:" if self._shown else "The model is thinking.")
        if self._shown:
            sys.stderr.write(printable(text))
            sys.stderr.flush()

    def write(self, text: str) -> None:
        """More of the answer."""
        self._begin()
        self.text += text
        sys.stdout.write(self._markdown.feed(text))
        sys.stdout.flush()

    def end(self) -> None:
        """No more comes."""
        self._begin()
        say(self._markdown.end())

    def _begin(self) -> None:
        if self._thinking:
            self._thinking = False
            counted = AnswerStats(0, None, None, "", thought_tokens=self.thought_tokens)
            remark("" if self._shown else f"{thought_for(counted)}. /thinking reads it.")
        if not self._named:
            self._named = True
            sys.stdout.write(f"{self._name}: ")
            sys.stdout.flush()
