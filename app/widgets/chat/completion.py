"""The list above the text field that completes commands and file names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from ...text.plain_text import one_line
from ..common.themes import MUTED

_COMMAND = re.compile(r"/([a-z]*|\?)$")
_FILE = re.compile(r"""(?:^|\s)@(?:"([^"]*)|([^\s"]\S*)?)$""")
_ROWS = 8


@dataclass(frozen=True, slots=True)
class Completable:
    """The word before the cursor: a "command" or a "file", its first letters, and whether a quote allows
    spaces in it.
    """

    kind: str
    query: str
    quoted: bool = False

    @property
    def written(self) -> int:
        """Characters of it before the cursor, its sign included."""
        return 1 + self.quoted + len(self.query)


def wanted(before: str, *, first_line: bool) -> Completable | None:
    """What to complete, given the line up to the cursor."""
    if first_line and (found := _COMMAND.fullmatch(before)):
        return Completable("command", found[1])
    if found := _FILE.search(before):
        return Completable("file", found[1] or found[2] or "", quoted=found[1] is not None)
    return None


class Completion(OptionList, can_focus=False):
    """Shows choices while the text field keeps the focus."""

    def __init__(self) -> None:
        super().__init__(markup=False, compact=True)
        self.wanted: Completable | None = None
        self._values: Sequence[str] = ()

    @property
    def is_open(self) -> bool:
        """Whether there is something to choose."""
        return self.display and self.wanted is not None and bool(self._values)

    def on_mount(self) -> None:
        self.display = False

    def offer(
        self, wanted: Completable | None, values: Sequence[str], remarks: Mapping[str, str] | None = None
    ) -> None:
        """Show choices, the first one highlighted, each perhaps with a remark; no choices hide the list.

        The last line counts those that do not fit.
        """
        more = len(values) - _ROWS + 1 if len(values) > _ROWS else 0
        self.wanted, self._values = wanted, values[: len(values) - more]
        self.display = bool(values)
        self.clear_options()
        longest = max((len(value) for value in self._values), default=0)
        for value in self._values:
            line = Content(one_line(value))
            if remarks:
                line += Content.styled(" " * (longest - len(value) + 3) + one_line(remarks[value]), MUTED)
            self.add_option(Option(line))
        if more:
            self.add_option(Option(Content.styled(f"… {more:,} more: keep typing", MUTED), disabled=True))
        if values:
            self.highlighted = 0

    def close(self) -> None:
        """Offer nothing."""
        if self.wanted is not None or self.display:
            self.offer(None, ())

    def move(self, step: int) -> None:
        """Highlight the next (1) or the last (-1) choice."""
        if self._values:
            self.highlighted = ((self.highlighted or 0) + step) % len(self._values)

    @property
    def chosen(self) -> str | None:
        """The highlighted choice."""
        return self._values[self.highlighted] if self.is_open and self.highlighted is not None else None
