"""Asks before a model or a server is deleted."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from ..text.plain_text import printable
from ..widgets.common.hints import Page, hints

LINKED = "linked"  # the answer to delete what a link leads to as well


class RemoveScreen(ModalScreen["bool | str"]):
    """Y deletes; N, Enter and Esc do not. Of a link, Y deletes the link alone, D what it leads to as well."""

    CSS_PATH = "../setup.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "delete it", show=False),
        Binding("d", "linked", "delete the pack that the link leads to", show=False),
        Binding("n,escape,enter", "dismiss(False)", "do not delete it", show=False),
    ]

    def __init__(self, name: str, where: list[str], *, again: str, linked: Path | None = None) -> None:
        """`where`: what is deleted, a line each. `again`: a sentence on how to get it back. `linked`: what the one
        folder, a link, leads to.
        """
        super().__init__()
        self._name_of_it, self._where, self._again = name, where, again
        self._linked = linked

    def compose(self) -> ComposeResult:
        where = printable("\n".join(self._where))
        with Page(id="asked") as page:
            page.border_title = "Delete"
            all_of_it = ["Y deletes the link", "D the pack too"] if self._linked else ["Y deletes"]
            page.border_subtitle = hints(*all_of_it, "N or Esc cancels")
            told = self._again
            if self._linked:
                told = f"This is a link to {printable(str(self._linked))}, which stays there unless you press D."
            yield Static(Content.assemble((printable(self._name_of_it), "bold"), f"\n{where}\n\n{told}"))

    def action_linked(self) -> None:
        """Delete the link and the pack."""
        if self._linked:
            self.dismiss(LINKED)
