"""The base of the wizard's steps."""

from __future__ import annotations

from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from ....models.errors import FloeError
from ...text.plain_text import printable


class WizardStep(VerticalScroll, can_focus=False):
    """One page of the wizard.

    Attributes:
        title: its heading. hints: its keys, for the bottom row.
    """

    DEFAULT_CSS = """
    WizardStep {
        height: 1fr;
        scrollbar-size-vertical: 1;

        & .lead { height: auto; margin-bottom: 1; color: $foreground 70%; }
        & .gap { height: 1; }
        & .said { height: auto; }
        & .wrong { height: auto; color: $text-error; }
    }
    """
    title: str = ""
    hints: str = "Enter continues"

    class Hints(Message):
        """The keys of the step changed."""

    def say_keys(self, hints: str) -> None:
        """Show other keys in the bottom row."""
        if hints != self.hints:
            self.hints = hints
            self.post_message(self.Hints())

    def go_on(self) -> None:
        """The person pressed Enter, and no field or list took it."""


class Trouble(Static):
    """What went wrong, why, and what to do; empty if nothing did."""

    DEFAULT_CSS = """
    Trouble {
        height: auto;
        padding: 0 1;
        background: $error 8%;
        border-left: outer $error;
        display: none;
    }
    """

    def __init__(self) -> None:
        super().__init__("")
        self.error: FloeError | None = None

    def show(self, error: FloeError | None) -> None:
        """Show an error, or None to hide it."""
        self.error = error
        self.display = error is not None
        if error is not None:
            self.update(told(error))


def told(error: FloeError) -> Content:
    """An error made safe for a screen: its parts may come from outside."""
    parts = [Content.styled(printable(error.title), "bold $text-error")]
    if error.cause:
        parts.append(Content(printable(error.cause)))
    if error.hint:
        parts.append(Content.assemble(("What to do: ", "bold"), printable(error.hint)))
    return Content("\n").join(parts)
