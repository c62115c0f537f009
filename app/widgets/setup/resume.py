"""The wizard's step zero, if setups are unfinished."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from textual import on
from textual.app import ComposeResult
from textual.content import Content
from textual.message import Message
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option as Row

from ....models.quantities import size
from ...text.plain_text import printable
from ..common.themes import MUTED
from .step import WizardStep

if TYPE_CHECKING:
    from ...setup.wish import Wish


class ResumeStep(WizardStep):
    """Lists unfinished setups: `Continue` is posted for one of them, `Another` for another model."""

    DEFAULT_CSS = """
    ResumeStep #begun {
        height: auto;
        max-height: 1fr;
        padding: 0;
        border: none;
        background: transparent;

        & > .option-list--option { padding: 0 1; }
        & > .option-list--option-highlighted { color: $foreground; background: $panel; }
    }
    """
    title = "Unfinished setups"
    hints = "↑ ↓ move · Enter chooses"

    class Continue(Message):
        """Continue `begun`."""

        def __init__(self, begun: Wish) -> None:
            super().__init__()
            self.begun = begun

    class Another(Message):
        """Set up another model."""

    def __init__(self, begun: Sequence[tuple[Wish, int]]) -> None:
        """`begun`: each with the bytes of the disk that it takes."""
        super().__init__()
        self._begun = list(begun)

    def compose(self) -> ComposeResult:
        yield Static("Everything done so far is saved. A setup continues where it stopped.", classes="lead")
        rows = [Row(_line(one, taken)) for one, taken in self._begun]
        yield OptionList(*rows, Row(Content.styled("Set up another model …", "italic")), id="begun", markup=False)

    def on_mount(self) -> None:
        self.query_one(OptionList).focus()

    @on(OptionList.OptionSelected)
    def _choose(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        at = event.option_index
        self.post_message(self.Continue(self._begun[at][0]) if at < len(self._begun) else self.Another())


def _line(begun: Wish, taken: int) -> Content:
    name = Content.styled(printable(begun.name), "bold")
    facts = f"{printable(begun.model)} · {size(taken)} so far"
    return Content.assemble(name, "\n", (facts, MUTED))
