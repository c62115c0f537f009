"""Asks before a model is deleted."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from ...models.quantities import size
from ..text.plain_text import printable
from ..widgets.common.hints import Page, hints


class RemoveScreen(ModalScreen[bool]):
    """Y deletes; N, Enter and Esc do not."""

    CSS_PATH = "../setup.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "delete it", show=False),
        Binding("n,escape,enter", "dismiss(False)", "do not delete it", show=False),
    ]

    def __init__(self, name: str, folders: list[Path], size: int, *, again: str) -> None:
        """`folders`: to be deleted. `again`: a sentence on how to get the model back."""
        super().__init__()
        self._model, self._folders, self._bytes, self._again = name, folders, size, again

    def compose(self) -> ComposeResult:
        where = "\n".join(printable(str(folder)) for folder in self._folders)
        with Page(id="asked") as page:
            page.border_title = "Delete"
            page.border_subtitle = hints("Y deletes", "N or Esc cancels")
            yield Static(
                Content.assemble(
                    (f"{printable(self._model)}, {size(self._bytes)}", "bold"),
                    f"\n{where}\n\nThis will be deleted, with everything in it. {self._again}",
                )
            )
