"""The simple blocks of a transcript, between messages: notes, errors, marks, the welcome."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget
from textual.widgets import Static

from ...text.plain_text import printable
from ..common.keys import key_of
from ..common.themes import MUTED

_FOR_THE_DEMO = ("What is an expert?", "What does F4 do?", "How do I get a larger model?")
_FOR_ANY_MODEL = ("What is sea ice?", "Write a poem about the sea.", "Explain recursion.")


class Note(Static):
    """A remark of the program between the turns."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(printable(text)))


class Horizon(Widget):
    """Stands before the oldest message that the model still sees."""

    def render(self) -> Content:
        """A line with its meaning in the middle."""
        words = " the model no longer sees the messages above "
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
    """The welcome in an empty chat: what this is, sample questions, and the first keys.

    `demo`: the built-in model answers, so the way to a real one is shown. `sent`: what leaves this
    machine, in a sentence, or "".
    """

    demo: reactive[bool] = reactive(default=False, layout=True)
    sent: reactive[str] = reactive("", layout=True)

    def __init__(self, *, demo: bool, sent: str) -> None:
        super().__init__()
        self.set_reactive(Welcome.demo, demo)
        self.set_reactive(Welcome.sent, sent)

    def render(self) -> Content:
        """One idea per line."""
        newline, explained, models = (key_of(self, action) for action in ("newline", "help", "models"))
        ask: list[Content | tuple[str, str]] = [("Try: ", MUTED)]
        for at, question in enumerate(_FOR_THE_DEMO if self.demo else _FOR_ANY_MODEL):
            ask += [(" · ", MUTED)] if at else []
            ask.append((question, "italic"))
        lines = [
            Content.assemble(("floe-chat", "bold $primary"), "  ", self._where()),
            Content.assemble(*ask),
            Content.styled(f"Enter sends · {newline} new line · {explained} explains keys and figures", MUTED),
        ]
        if self.demo:
            lines.insert(
                1, Content.assemble("A small demo model answers. ", (f"{models} sets up a real model", "bold"))
            )
        return Content("\n").join(lines)

    def _where(self) -> Content:
        if not self.sent:
            return Content("runs on this machine. Nothing you write leaves it.")
        return Content.assemble(("remote", "bold $warning"), f". {self.sent}")
