"""The help page: every key, and what the panel's words mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.screen import ModalScreen
from textual.widgets import Static

from ..widgets.hints import ScrollingPage, hint, key_name
from ..widgets.meanings import TERMS

Section = tuple[str, Iterable[tuple[str, str]]]


class HelpScreen(ModalScreen[None]):
    """Lies over the chat, which goes on under it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close", show=False),
        Binding("f1", "dismiss", "Close", show=False, id="help"),
        Binding("up,k", "scroll(-1)", show=False),
        Binding("down,j", "scroll(1)", show=False),
        Binding("pageup", "scroll(-10)", show=False),
        Binding("pagedown,space", "scroll(10)", show=False),
    ]

    def __init__(self, sections: Iterable[Section]) -> None:
        """`sections`: a heading each, and under it names with their meanings."""
        super().__init__()
        self._sections = (*sections, ("The panel's words", TERMS))

    def compose(self) -> ComposeResult:
        with ScrollingPage(id="help", classes="page") as page:
            page.can_focus = False
            page.border_title = "floe-chat"
            page.border_subtitle = hint("Esc closes")
            for heading, entries in self._sections:
                yield Static(heading, classes="heading")
                for name, text in entries:
                    yield Horizontal(
                        Static(name, classes="name", markup=False),
                        Static(text, classes="meaning", markup=False),
                        classes="row",
                    )

    def action_scroll(self, lines: int) -> None:
        """Move the page by some lines."""
        self.query_one("#help").scroll_relative(y=lines, animate=False)


def keys_of(bindings: Iterable[BindingType], given: Mapping[str, str]) -> list[tuple[str, str]]:
    """What the keys of `bindings` do, with the keys that the person has `given` to actions instead."""
    entries: list[tuple[str, str]] = []
    for binding in bindings:
        if isinstance(binding, Binding) and binding.description:
            keys = given.get(binding.id or "", binding.key)
            entries.append((" · ".join(key_name(key) for key in keys.split(",")), binding.description))
    return entries
