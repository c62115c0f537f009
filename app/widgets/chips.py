"""The files that go along with the next question, one chip each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from textual import events, on
from textual.containers import Horizontal
from textual.content import Content
from textual.layout import Layout
from textual.message import Message
from textual.widgets import Static

from ...models.errors import FloeError
from ..history import Attachment, read_attachment
from .background import in_background
from .flow import Flow
from .plain import one_line
from .themes import MUTED
from .units import count

Count = Callable[[str], int | None]
_BYTES_PER_TOKEN = 4  # about, while no tokenizer is there yet
_LONGEST_NAME = 32


class Chip(Static):
    """One file: its name and size. A click takes it away."""

    class Clicked(Message):
        """The person wants it away."""

        def __init__(self, chip: Chip) -> None:
            super().__init__()
            self.chip = chip

    def __init__(self, file: Attachment, tokens: int | None = None) -> None:
        super().__init__(_label(file, tokens))
        self.file = file

    def measured(self, tokens: int | None) -> None:
        """It takes so many tokens."""
        self.update(_label(self.file, tokens))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Clicked(self))


class Chips(Horizontal):
    """Takes files in while a thread reads and measures them; what cannot go along is told by `Refused`."""

    class Refused(Message):
        """A file that does not go along, and why."""

        def __init__(self, reason: str) -> None:
            super().__init__()
            self.reason = reason

    def __init__(self, tokens_of: Count, room: Callable[[], int | None]) -> None:
        """`tokens_of` counts a text's tokens, None before that can be told; `room` is what the window holds."""
        super().__init__()
        self._flow = Flow()
        self._tokens_of = tokens_of
        self._room = room
        self._reading = 0
        self._chips: list[Chip] = []  # without those that Textual is still taking away
        self._removed: list[Attachment] = []

    @property
    def layout(self) -> Layout:
        return self._flow

    @property
    def files(self) -> tuple[Attachment, ...]:
        """What goes along."""
        return tuple(chip.file for chip in self._chips)

    @property
    def reading(self) -> bool:
        """Whether a file is still being read."""
        return self._reading > 0

    def attach(self, file: Path | Attachment) -> None:
        """Take a file, or a text under a name, in."""
        self._reading += 1

        def measured() -> tuple[Attachment, int | None] | str:
            try:
                read = read_attachment(file) if isinstance(file, Path) else file
            except FloeError as error:
                return f"{error.title}: {error.cause}"
            return read, self._tokens_of(read.text)

        in_background(self, measured, self._take)

    def give_back(self, files: tuple[Attachment, ...]) -> None:
        """Show the files of a question that came back, at once: they were measured before."""
        for file in files:
            chip = self._show(Chip(file))
            in_background(chip, partial(self._tokens_of, file.text), chip.measured)

    def take_all(self) -> tuple[Attachment, ...]:
        """Hand the files over, and show none any more."""
        files = self.files
        self.remove_children()
        self._chips.clear()
        self._removed.clear()
        return files

    def remove_last(self) -> None:
        """Take the last one away, if there is one."""
        if self._chips:
            self._remove(self._chips[-1])

    def bring_back(self) -> bool:
        """Show the one again that was taken away last; False if there is none."""
        if self._removed:
            self.give_back((self._removed.pop(),))
            return True
        return False

    @on(Chip.Clicked)
    def _clicked(self, event: Chip.Clicked) -> None:
        if event.chip in self._chips:
            self._remove(event.chip)

    def _remove(self, chip: Chip) -> None:
        self._chips.remove(chip)
        self._removed.append(chip.file)
        chip.remove()
        self.post_message(self.Refused(f"{_short(chip.file)} does not go along; Ctrl+Z brings it back"))

    def _take(self, found: tuple[Attachment, int | None] | str) -> None:
        self._reading -= 1
        if isinstance(found, str):
            self.post_message(self.Refused(found))
            return
        file, tokens = found
        room = self._room()
        held = tokens if tokens is not None else estimate(file.text)
        if room is not None and held > room:
            reason = f"{file.name} takes {held:,} tokens; the model's window holds {room:,}"
            self.post_message(self.Refused(reason))
            return
        self._show(Chip(file, tokens))

    def _show(self, chip: Chip) -> Chip:
        self._chips.append(chip)
        self.mount(chip)
        self.scroll_end(animate=False)
        return chip


def _short(file: Attachment) -> str:
    name = one_line(file.name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…{name[1 - _LONGEST_NAME // 2 :]}"


def _label(file: Attachment, tokens: int | None) -> Content:
    size = f"{count(tokens)} tokens" if tokens is not None else f"~{count(estimate(file.text))} tokens"
    return Content.assemble((f"▤ {_short(file)}", "$primary"), (f"  {size}  ", MUTED), ("×", "$text-error"))


def estimate(text: str) -> int:
    """About how many tokens `text` takes."""
    return max(1, len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)
