"""The simple blocks of a transcript: what the person wrote, notes, errors, the welcome."""

from __future__ import annotations

from textual.content import Content
from textual.widgets import Static

from .plain import printable
from .themes import MUTED


class UserTurn(Static):
    """A question, shown exactly as written: neither markup nor Markdown. `note` says what became of it."""

    def __init__(self, text: str, note: str = "") -> None:
        super().__init__()
        self.text = text
        self.note = note

    @property
    def note(self) -> str:
        """A remark under the text, such as that it waits."""
        return self._note

    @note.setter
    def note(self, note: str) -> None:
        self._note = note
        remark = (f"\n{note}", f"italic {MUTED}") if note else ""
        self.update(Content.assemble(printable(self.text).expandtabs(4), remark))


class Note(Static):
    """A remark of the program between the turns."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(text))


class ErrorBlock(Static):
    """What went wrong, why, and what to do."""

    def __init__(self, title: str, cause: str, hint: str) -> None:
        parts = [Content.styled(printable(title), "bold $text-error")]
        if cause:
            parts.append(Content(printable(cause)))
        if hint:
            parts.append(Content.assemble(("What to do: ", "bold"), printable(hint)))
        super().__init__(Content("\n").join(parts))


class Welcome(Static):
    """What an empty transcript shows."""

    def __init__(self) -> None:
        super().__init__(
            Content("\n").join(
                [
                    Content.assemble(
                        ("floe-chat", "bold $primary"),
                        "  a Mixture-of-Experts model, running on this machine. Nothing you write leaves it.",
                    ),
                    Content.assemble(("Try: ", MUTED), ("What is an expert?", "italic")),
                    Content.styled("Enter sends · Ctrl+J new line · F1 explains keys and figures", MUTED),
                ]
            )
        )
