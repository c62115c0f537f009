"""The files and pasted texts that are attached to the next question, one chip each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from textual import events, on
from textual.containers import Horizontal
from textual.content import Content
from textual.layout import Layout
from textual.message import Message
from textual.style import Style
from textual.widgets import Static

from ....models.errors import FloeError
from ...background import in_background
from ...history import Attachment, read_attachment
from ...text.plain_text import one_line
from ...text.units import count
from ..common.flow import Flow
from ..common.keys import key_of
from ..common.themes import MUTED

_CUT_LINK = Style(underline=True) + Style.from_meta({"cut": True})

Count = Callable[[str], int | None]
_BYTES_PER_TOKEN = 4  # a rough figure, until the tokenizer is loaded
_CHARACTERS_PER_TOKEN = 16  # more than any text has: longer texts need no counting
_CUT = 7 / 8  # share of the room; the rest is for the template's marks and a sentence
_LONGEST_NAME = 32


class Chip(Static):
    """One file: its name and size. A click removes it; one on "cut" shortens a text that does not fit."""

    class Clicked(Message):
        """The person clicked the chip."""

        def __init__(self, chip: Chip, *, cut: bool) -> None:
            super().__init__()
            self.chip = chip
            self.cut = cut

    def __init__(self, file: Attachment, tokens: int | None = None) -> None:
        super().__init__()
        self.file = file
        self._tokens = tokens
        self._room: int | None = None
        self._show()

    @property
    def too_large(self) -> bool:
        """Whether the text alone is too large; False before that is known."""
        if self._room is None:
            return False
        if self._tokens is None:
            return len(self.file.text) > self._room * _CHARACTERS_PER_TOKEN
        return self._tokens > self._room

    @property
    def trouble(self) -> str:
        """Why it cannot be sent, and what to do."""
        held = f"about {_estimate(self.file.text):,}" if self._tokens is None else f"{self._tokens:,}"
        return (
            f"{_short(self.file)} is too large: {held} tokens, and a question may have {self._room:,}. "
            f"/cut attaches only its beginning, Backspace removes it, {key_of(self, 'models')} lists other models"
        )

    def measured(self, tokens: int | None, room: int | None) -> None:
        """It has so many tokens, of the `room` that a question may take."""
        self._tokens, self._room = tokens, room
        self._show()

    def on_click(self, event: events.Click) -> None:
        event.stop()
        self.post_message(self.Clicked(self, cut=bool(event.style.meta.get("cut"))))

    def _show(self) -> None:
        size = f"{count(self._tokens)}" if self._tokens is not None else f"~{count(_estimate(self.file.text))}"
        large = self.too_large
        parts: list[tuple[str, str | Style]] = [
            (f"▤ {_short(self.file)}", "$primary"),
            (f"  {size} of {count(self._room or 0)} tokens  " if large else f"  {size} tokens  ", MUTED),
        ]
        if large:
            parts[1:1] = [("  too large", "bold $text-warning")]
            parts += [("cut", _CUT_LINK), ("  ", "")]
        self.set_class(large, "-too-large")
        self.update(Content.assemble(*parts, ("×", "$text-error")))


class Chips(Horizontal):
    """Holds attached files; a thread reads and measures them. A text that does not fit the window stays, marked."""

    class Refused(Message):
        """What is wrong with a file, and what to do."""

        def __init__(self, reason: str) -> None:
            super().__init__()
            self.reason = reason

    class Changed(Message):
        """Other files are attached than before."""

    def __init__(self, tokens_of: Count, room: Callable[[], int | None]) -> None:
        """`tokens_of` counts a text's tokens, and `room` is how many a question may have; None: not known yet."""
        super().__init__()
        self._flow = Flow()
        self._tokens_of = tokens_of
        self._room = room
        self._reading = 0
        self._chips: list[Chip] = []  # without those that Textual is still removing
        self._removed: list[tuple[Attachment, Chip | None]] = []  # and its replacement

    @property
    def layout(self) -> Layout:
        return self._flow

    @property
    def files(self) -> tuple[Attachment, ...]:
        """What is attached."""
        return tuple(chip.file for chip in self._chips)

    @property
    def trouble(self) -> str:
        """Why a question cannot be sent with these, and what to do; "" if it can."""
        return next((chip.trouble for chip in self._chips if chip.too_large), "")

    @property
    def reading(self) -> bool:
        """Whether a file is still being read."""
        return self._reading > 0

    def attach(self, file: Path | Attachment) -> None:
        """Attach a file once it is read, or a text under a name at once."""
        if isinstance(file, Attachment):
            self._measure(self._show(Chip(file)), told=True)
            return
        self._reading += 1

        def read() -> Attachment | str:
            try:
                return read_attachment(file)
            except FloeError as error:
                return f"{error.title}: {error.cause}"

        in_background(self, read, self._take)

    def give_back(self, files: tuple[Attachment, ...]) -> None:
        """Attach the files of a question that was taken back."""
        for file in files:
            self._measure(self._show(Chip(file)))

    def measure_again(self) -> None:
        """The model has changed: count tokens again."""
        for chip in self._chips:
            self._measure(chip)

    def take_all(self) -> tuple[Attachment, ...]:
        """Return the files and remove all chips."""
        files = self.files
        self.remove_children()
        self._chips.clear()
        self._removed.clear()
        self.post_message(self.Changed())
        return files

    def remove_last(self) -> None:
        """Remove the last one, if there is one."""
        if self._chips:
            self._remove(self._chips[-1])

    def bring_back(self) -> bool:
        """Undo the last removal or cut; False if there is none."""
        if not self._removed:
            return False
        file, instead = self._removed.pop()
        if instead in self._chips:
            self._take_away(instead)
        self.give_back((file,))
        return True

    def cut(self) -> bool:
        """Shorten every text that does not fit; False if there is none."""
        large = [chip for chip in self._chips if chip.too_large]
        for chip in large:
            self._cut(chip)
        return bool(large)

    @on(Chip.Clicked)
    def _clicked(self, event: Chip.Clicked) -> None:
        if event.chip not in self._chips:
            return
        if event.cut:
            self._cut(event.chip)
        else:
            self._remove(event.chip)

    def _remove(self, chip: Chip) -> None:
        self._take_away(chip)
        self._removed.append((chip.file, None))
        self.post_message(self.Refused(f"Removed {_short(chip.file)}; Ctrl+Z brings it back"))

    def _cut(self, chip: Chip) -> None:
        room = self._room()
        if room is None:
            return

        def shorten() -> Attachment | None:
            text = _beginning(chip.file.text, int(room * _CUT), self._tokens_of)
            return None if text is None else Attachment(f"{chip.file.name}, beginning", text)

        def replace(short: Attachment | None) -> None:
            if short is not None and chip in self._chips:
                self._take_away(chip)
                instead = self._show(Chip(short))
                self._removed.append((chip.file, instead))
                self._measure(instead)
                words = f"{count(len(short.text))} of {count(len(chip.file.text))} characters are attached"
                self.post_message(self.Refused(f"{words}; Ctrl+Z brings all of them back"))

        in_background(self, shorten, replace)

    def _take(self, found: Attachment | str) -> None:
        self._reading -= 1
        if isinstance(found, str):
            self.post_message(self.Refused(found))
        else:
            self._measure(self._show(Chip(found)), told=True)

    def _measure(self, chip: Chip, *, told: bool = False) -> None:
        """Count its tokens; with `told`, report it if it has too many."""
        room, text = self._room(), chip.file.text

        def measured(tokens: int | None) -> None:
            chip.measured(tokens, room)
            if told and chip.too_large:
                self.post_message(self.Refused(chip.trouble))

        if room is not None and len(text) > room * _CHARACTERS_PER_TOKEN:
            measured(None)
        else:
            in_background(chip, partial(self._tokens_of, text), measured)

    def _show(self, chip: Chip) -> Chip:
        self._chips.append(chip)
        self.mount(chip)
        self.scroll_end(animate=False)
        self.post_message(self.Changed())
        return chip

    def _take_away(self, chip: Chip) -> None:
        self._chips.remove(chip)
        chip.remove()
        self.post_message(self.Changed())


def _short(file: Attachment) -> str:
    name = one_line(file.name)
    return name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME // 2]}…{name[1 - _LONGEST_NAME // 2 :]}"


def _beginning(text: str, most: int, tokens_of: Count) -> str | None:
    """The first lines of `text` with at most `most` tokens; of a longer line its beginning. None if no model can count
    them.
    """
    fits, over = 0, min(len(text), most * _CHARACTERS_PER_TOKEN) + 1
    while over - fits > 1:
        middle = (fits + over) // 2
        tokens = tokens_of(text[:middle])
        if tokens is None:
            return None
        fits, over = (middle, over) if tokens <= most else (fits, middle)
    lines = text.rfind("\n", 0, fits) + 1
    return text[: lines or fits]


def _estimate(text: str) -> int:
    """About how many tokens `text` has."""
    return max(1, len(text.encode(errors="replace")) // _BYTES_PER_TOKEN)
