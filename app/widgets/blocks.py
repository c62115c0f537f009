"""The simple blocks between the messages of a transcript: notes, errors, marks, the welcome."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from .hints import key_of
from .plain import printable
from .themes import MUTED


class Note(Static):
    """A remark of the program between the turns."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(printable(text)))


class Horizon(Widget):
    """Stands before the oldest message that the model still sees."""

    def render(self) -> Content:
        """A line with its meaning in the middle."""
        words = " the model no longer sees what is above "
        left = max(0, self.size.width - len(words)) // 2
        right = max(0, self.size.width - len(words) - left)
        return Content.styled("─" * left + words + "─" * right, MUTED)


class ErrorBlock(Static):
    """What went wrong, why, and what to do."""

    def __init__(self, title: str, cause: str, hint: str) -> None:
        parts = [Content.styled(printable(title), "bold $text-error")]
        if cause:
            parts.append(Content(printable(cause)))
        if hint:
            parts.append(Content.assemble(("What to do: ", "bold"), printable(hint)))
        super().__init__(Content("\n").join(parts))


class Welcome(Widget):
    """What an empty transcript shows."""

    def render(self) -> Content:
        """What this is, something to ask, and the first keys."""
        newline, explained = key_of(self, "newline"), key_of(self, "help")
        return Content("\n").join(
            [
                Content.assemble(
                    ("floe-chat", "bold $primary"),
                    "  a Mixture-of-Experts model, running on this machine. Nothing you write leaves it.",
                ),
                Content.assemble(("Try: ", MUTED), ("What is an expert?", "italic")),
                Content.styled(f"Enter sends · {newline} new line · {explained} explains keys and figures", MUTED),
            ]
        )
