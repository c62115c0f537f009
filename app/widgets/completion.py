"""The list over the text field that completes commands and file names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from .plain import printable
from .themes import MUTED

_COMMAND = re.compile(r"/([a-z]*)$")
_FILE = re.compile(r"(?:^|\s)@(\S*)$")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is being written before the cursor: a "command" or a "file", and its first letters."""

    kind: str
    query: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One line: what is put in, and what it is."""

    value: str
    remark: str = ""


def wanted(before: str, *, first_line: bool) -> Wanted | None:
    """What can be completed, given the line up to the cursor."""
    if first_line and (found := _COMMAND.fullmatch(before)):
        return Wanted("command", found[1])
    if found := _FILE.search(before):
        return Wanted("file", found[1])
    return None


class Completion(OptionList, can_focus=False):
    """Shows choices while the text field keeps the keys."""

    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self.wanted: Wanted | None = None
        self._choices: Sequence[Choice] = ()

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose."""
        return self.display and self.wanted is not None and bool(self._choices)

    def on_mount(self) -> None:
        self.display = False

    def offer(self, wanted: Wanted | None, choices: Sequence[Choice]) -> None:
        """Show `choices`, the first one highlighted; none hide the list."""
        self.wanted, self._choices = wanted, choices
        self.display = bool(choices)
        self.clear_options()
        longest = max((len(choice.value) for choice in choices), default=0)
        for choice in choices:
            value = printable(choice.value)
            line = Content.assemble(value, (f"{'':{longest - len(value) + 3}}{printable(choice.remark)}", MUTED))
            self.add_option(Option(line))
        if choices:
            self.highlighted = 0

    def close(self) -> None:
        """Offer nothing."""
        if self.wanted is not None or self.display:
            self.offer(None, ())

    def move(self, step: int) -> None:
        """Highlight the next (1) or the last (-1) choice."""
        if self._choices:
            self.highlighted = ((self.highlighted or 0) + step) % len(self._choices)

    @property
    def chosen(self) -> Choice | None:
        """The highlighted choice."""
        return self._choices[self.highlighted] if self.is_open and self.highlighted is not None else None
